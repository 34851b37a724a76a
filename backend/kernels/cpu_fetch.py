"""What attention will read is fetched while products of many rows are computed.

Decoding many sequences reads each one's keys and values from memory, and the processor waits for
it; the products between two attentions leave the memory idle. So their inner loops ask for the
lines of the next attention, a line at a time, in the order in which it will read them. What does
not fit into the nearest cache waits in the next one, which is nearer than memory.

Each thread has a cursor at the end of its scratch: the operation that it fetches for, the query
tile (of a share of the tiles), the block, and how far in its keys and then its values. Nothing is
computed from what it says: a line that is fetched in vain costs its time and no more.
"""

from __future__ import annotations

from . import cpu_ir as vec
from .cpu_attend import first_block, tile_of
from .cpu_compile import Table, inlined, kernel
from .cpu_step import (
    BLOCK_SIZE,
    CURSOR_BYTES,
    NUM_THREADS,
    NUM_TILES,
    OP_FIELDS,
    OPS,
    QUERY_TILE,
    SCRATCH_STRIDE,
)

# Fields of a cursor, int64.
_TARGET, _TILE, _BLOCK, _OFFSET, _FIRST_TILE, _END_TILE = range(0, 48, 8)


@inlined
def cursor_of(head: Table, scratch: int) -> int:
    return scratch + head[SCRATCH_STRIDE] - CURSOR_BYTES


@inlined
def begin_fetching(head: Table, scratch: int, me: int) -> None:
    """This thread's cursor at the start of a step."""
    cursor = cursor_of(head, scratch)
    tiles, threads = head[NUM_TILES], head[NUM_THREADS]
    vec.store_int(cursor + _TARGET, 0)
    vec.store_int(cursor + _FIRST_TILE, me * tiles // threads)
    vec.store_int(cursor + _END_TILE, (me + 1) * tiles // threads)


@kernel
def next_lines(head: Table, scratch: int, target: int, size: int) -> int:
    """The address of the `size` bytes that operation `target` reads next; when all is fetched,
    the scratch's, which is at hand."""
    cursor = cursor_of(head, scratch)
    if vec.load_int(cursor + _TARGET) != target:
        vec.store_int(cursor + _TARGET, target)
        vec.store_int(cursor + _TILE, vec.load_int(cursor + _FIRST_TILE))
        vec.store_int(cursor + _BLOCK, 0)
        vec.store_int(cursor + _OFFSET, 0)
    number = vec.load_int(cursor + _TILE)
    if number >= vec.load_int(cursor + _END_TILE):
        return scratch
    op = Table(head[OPS] + target * (OP_FIELDS * 8))
    tile = tile_of(op, head, number)
    num_blocks = (tile[2] + tile[1] + BLOCK_SIZE - 1) // BLOCK_SIZE
    block = max(vec.load_int(cursor + _BLOCK), first_block(op, tile))
    if tile[1] == QUERY_TILE or block >= num_blocks:  # a prompt's tiles share what they read
        vec.store_int(cursor + _TILE, number + 1)
        vec.store_int(cursor + _BLOCK, 0)
        return scratch
    offset, half = vec.load_int(cursor + _OFFSET), op[9] * op[10] * BLOCK_SIZE * 2
    base = vec.load_int(tile[3] + block * 8) * op[11]
    address: int = op[2] + base + offset
    if offset >= half:
        address = op[3] + base + offset - half
    end = offset + size
    if offset < half and end > half:
        end = half
    if end >= 2 * half:
        end = 0
        block += 1
    vec.store_int(cursor + _OFFSET, end)
    vec.store_int(cursor + _BLOCK, block)
    return address
