"""A whole forward pass as one compiled call: a list of operations that all threads walk together.

Python builds the list once per model and says per step only how many rows there are and where they
lie. EMBED begins; then, per layer:

    NORM      residual += norm(delta); norm; quantise         a row is an item
    MATMUL    quantised rows times packed weights             32 outputs are an item
    ROPE      (q/k norm,) rotate, write keys and values       a row is an item
    ATTEND    paged attention over the block table; quantise  (query tile, kv head) is an item
    MERGE     joins what ATTEND did in pieces; quantise       the same
    GATE      silu(gate) · up, or GELU; quantise              a row is an item

Which norms there are, and what else varies between families, is said by an operation's fields. At
the end CAP scales and caps the logits of families that do, and BEST finds each row's largest. THIN,
a program of its own, finds for rows that are drawn at random the few tokens that can win.

An item belongs to one thread and is computed the same way whoever else is in the batch, so a row's
bits never depend on it. Threads take items from counters and meet after each operation.

The keys of a block lie transposed, [head_dim, 32], so that 32 scores are computed at once; values
lie as they are. Both are bfloat16; arithmetic is float32. The keys of a sequence are summed up in
pieces of 512, each from scratch, and the pieces are joined in order. That depends on positions
alone, so it is free whether one thread does the pieces of a long sequence or many do (as in
Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import cpu_ir as vec
from . import cpu_tiles
from .cpu_attend import attend, merge
from .cpu_compile import Intrinsic, Table, inlined, kernel
from .cpu_rows import best, cap, embed, gate, norm, quantize, rope, thin
from .cpu_step import (
    ARRIVALS,
    ATTEND,
    BEST,
    BYTES_UNPACKED,
    CAP,
    COUNTER_STRIDE,
    COUNTERS,
    CYCLES,
    EMBED,
    GATE,
    MATMUL,
    MERGE,
    NORM,
    NUM_LOGIT_ROWS,
    NUM_OPS,
    NUM_PIECES,
    NUM_ROWS,
    NUM_THREADS,
    NUM_TILES,
    OP_FIELDS,
    OPS,
    PACK,
    ROPE,
    SCRATCH,
    SCRATCH_STRIDE,
    THIN,
    THREADS_SEEN,
)
from .cpu_stored import pack

MATMUL_STRIPS = 4  # of 8 outputs, an item
ROW_PANEL = 32  # rows that pass over an item's weights while both are in the nearest cache
UNPACK_ROWS = 16  # so many share unpacked weights
SPINS_BEFORE_YIELD = 4000

# ------------------------------------------------------------------------------- matrix products


@inlined
def add_bias(out: int, bias: int, num_outputs: int) -> None:
    for column in range(num_outputs):
        at = out + column * 4
        vec.store_float(at, vec.load_float(at) + vec.load_float(bias + column * 4))


def _matmul(tiles: Sequence[Intrinsic], strip_alone: Intrinsic, block_bytes: int) -> Any:
    """Rows times the strips of an item, by tiles of two strips and one, two or four rows."""
    one, two, four = tiles

    @kernel
    def matmul(item: int, op: Table, num_rows: int) -> None:
        # op: x, scales, weights, inputs, outputs, out, bytes of an out row, bits, bias or 0
        num_blocks, ldc = op[4] // 32, op[7]
        ldx, lds = num_blocks * 64, num_blocks * 8
        strip_bytes = num_blocks * block_bytes
        first = item * MATMUL_STRIPS
        last = min(first + MATMUL_STRIPS, op[5] // 8)
        for panel in range(0, num_rows, ROW_PANEL):
            end = min(panel + ROW_PANEL, num_rows)
            for strip in range(first, last, 2):
                w = op[3] + strip * strip_bytes
                row = panel
                while row < end:
                    x, s, c = op[1] + row * ldx, op[2] + row * lds, op[6] + row * ldc + strip * 32
                    if strip + 1 == last:
                        strip_alone(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 1
                    elif end - row >= 4:
                        four(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 4
                    elif end - row >= 2:
                        two(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 2
                    else:
                        one(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 1
        if op[9]:
            for row in range(num_rows):
                out = op[6] + row * ldc + first * 32
                add_bias(out, op[9] + first * 32, (last - first) * 8)

    return matmul


tiles4 = [cpu_tiles.tile_4bit(rows, 2) for rows in (1, 2, 4)]
tiles8 = [cpu_tiles.tile_8bit(rows, 2) for rows in (1, 2, 4)]
matmul4_packed = _matmul(tiles4, cpu_tiles.tile_4bit(1, 1), cpu_tiles.BYTES_4BIT)
matmul8 = _matmul(tiles8, cpu_tiles.tile_8bit(1, 1), cpu_tiles.BYTES_8BIT)

unpack_strips = cpu_tiles.unpack_4bit()
unpacked4, unpacked2, unpacked1 = (cpu_tiles.tile_unpacked(rows) for rows in (4, 2, 1))


@kernel
def matmul4(item: int, op: Table, num_rows: int, unpacked: int, size: int) -> None:
    """As matmul4_packed, and to the same bits; many rows pass over weights that were unpacked.

    They lie in this thread's scratch, of `size` bytes.
    """
    num_blocks, ldc = op[4] // 32, op[7]
    num_strips = op[5] // 8 - item * MATMUL_STRIPS
    needed = num_blocks * BYTES_UNPACKED
    if num_rows < UNPACK_ROWS or needed > size or num_strips < MATMUL_STRIPS:
        matmul4_packed(item, op, num_rows)
        return
    ldx, lds = num_blocks * 64, num_blocks * 8
    strip_bytes = num_blocks * cpu_tiles.BYTES_4BIT
    first = item * MATMUL_STRIPS
    for strip in range(first, first + MATMUL_STRIPS, 2):
        unpack_strips(op[3] + strip * strip_bytes, strip_bytes, unpacked, num_blocks)
        row = 0
        while row < num_rows:
            x, s, c = op[1] + row * ldx, op[2] + row * lds, op[6] + row * ldc + strip * 32
            if num_rows - row >= 4:
                unpacked4(x, ldx, s, lds, unpacked, 0, c, ldc, num_blocks)
            elif num_rows - row >= 2:
                unpacked2(x, ldx, s, lds, unpacked, 0, c, ldc, num_blocks)
            else:
                unpacked1(x, ldx, s, lds, unpacked, 0, c, ldc, num_blocks)
            row += 4 if num_rows - row >= 4 else 2 if num_rows - row >= 2 else 1
    if op[9]:
        for row in range(num_rows):
            add_bias(op[6] + row * ldc + first * 32, op[9] + first * 32, MATMUL_STRIPS * 8)


narrow3, narrow2, narrow1 = (vec.float_tile(n, True, False) for n in (3, 2, 1))


@kernel
def matmul16(item: int, op: Table, num_rows: int) -> None:
    # as the others; rows are float32, weights bfloat16 of [outputs / 32][inputs][32]
    inputs, ldc = op[4], op[7]
    w = op[3] + item * inputs * 64
    row = 0
    while row < num_rows:
        x, c = op[1] + row * inputs * 4, op[6] + row * ldc + item * 128
        if num_rows - row >= 3:
            narrow3(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        elif num_rows - row == 2:
            narrow2(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        else:
            narrow1(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        row += 3
    if op[9]:
        for row in range(num_rows):
            add_bias(op[6] + row * ldc + item * 128, op[9] + item * 128, 32)


# ------------------------------------------------------------------------------------ the program


@inlined
def num_items(op: Table, head: Table) -> int:
    kind = op[0]
    if kind == MATMUL:
        return (op[5] // 8 + MATMUL_STRIPS - 1) // MATMUL_STRIPS
    if kind == ATTEND:
        return head[NUM_TILES] * op[9] * max(1, head[NUM_PIECES])
    if kind == MERGE:
        return head[NUM_TILES] * op[9] if head[NUM_PIECES] else 0
    if kind == CAP:
        return head[NUM_LOGIT_ROWS]
    if kind == BEST or (kind == NORM and op[8]):
        return head[NUM_LOGIT_ROWS]
    return head[NUM_ROWS]


@inlined
def run_item(item: int, op: Table, head: Table, scratch: int) -> None:
    kind = op[0]
    if kind == NORM:
        norm(item, op, head)
    elif kind == MATMUL:
        num_rows = head[NUM_LOGIT_ROWS] if op[10] else head[NUM_ROWS]
        if op[8] == 4:
            matmul4(item, op, num_rows, scratch, head[SCRATCH_STRIDE])
        elif op[8] == 16:
            matmul16(item, op, num_rows)
        else:
            matmul8(item, op, num_rows)
    elif kind == ROPE:
        rope(item, op, head)
    elif kind == ATTEND:
        attend(item, op, head, scratch)
    elif kind == MERGE:
        merge(item, op, head)
    elif kind == GATE:
        gate(item, op)
    elif kind == BEST:
        best(item, op)
    elif kind == THIN:
        thin(item, op)
    elif kind == EMBED:
        embed(item, op)
    elif kind == CAP:
        cap(item, op)
    elif kind == PACK:
        pack(item, op)
    else:
        quantize(item, op)


@inlined
def wait_for(head: Table, arrivals: int) -> None:
    """Until so many have arrived, this thread among them."""
    vec.fetch_add(head[ARRIVALS], 1)
    spins = 0
    while vec.load_atomic(head[ARRIVALS]) < arrivals:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            vec.pause()
        else:
            vec.yield_thread()


@inlined
def run_op(index: int, op: Table, head: Table, items: int, me: int, scratch: int) -> None:
    """This thread's part of an operation.

    Weights lie in the order of the items, and come from memory half as fast again if a thread reads
    on where it is. And a row that a thread wrote is in its cache: so items are cut into a share for
    each thread, who then helps the others.
    """
    shares = head[NUM_THREADS] if head[COUNTER_STRIDE] else 1
    for turn in range(shares):
        share = (me + turn) % shares
        first, end = share * items // shares, (share + 1) * items // shares
        counter = head[COUNTERS] + share * head[COUNTER_STRIDE] + index * 8
        item = first + vec.fetch_add(counter, 1)
        while item < end:
            run_item(item, op, head, scratch)
            item = first + vec.fetch_add(counter, 1)


@kernel
def run(head: Table) -> None:
    """Walk the step that the header at this address describes. Called once per thread."""
    threads = head[NUM_THREADS]
    me = vec.fetch_add(head[THREADS_SEEN], 1)
    scratch = head[SCRATCH] + me * head[SCRATCH_STRIDE]
    meetings = 0
    for index in range(head[NUM_OPS]):
        op = Table(head[OPS] + index * (OP_FIELDS * 8))
        items = num_items(op, head)
        if items == 0:
            continue
        run_op(index, op, head, items, me, scratch)
        if threads > 1:
            meetings += 1
            wait_for(head, meetings * threads)
        if head[CYCLES] and me == 0:
            vec.store_int(head[CYCLES] + index * 8, vec.cycles())
