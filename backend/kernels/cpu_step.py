"""How a compiled step is told what to do: a header, a list of operations, tiles of queries.

All are int64 in flat tables, addresses among them; what a kind of operation expects in its fields
stands at its kernel (cpu_program says where). Here are the numbers of the fields and kinds, and the
sizes of what the writer of a program must provide.
"""

from __future__ import annotations

from collections.abc import Iterable

BLOCK_SIZE = 32  # tokens of a cache block, and scores of a row at a time
QUERY_TILE = 8  # query tokens that share the widened keys of a block
BYTES_UNPACKED = 2 * (256 + 64)  # 16 outputs · 32 inputs: bytes, scales, offsets (float32)
CURSOR_BYTES = 64
MOST_UNPACKED = 320 * 1024  # bytes of unpacked weights
PIECE_BLOCKS = 16  # cache blocks that are summed up from scratch

# Header of a step: int64 fields. Addresses are bytes.
(
    NUM_OPS,
    OPS,
    COUNTERS,  # one int64 per thread and operation, zero at the start
    COUNTER_STRIDE,  # bytes from a thread's counters to the next one's; 0: all take from one
    ARRIVALS,  # address of one int64, zero at the start
    NUM_THREADS,
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    LOGIT_ROWS,  # address of int64 row numbers
    POSITIONS,  # address of int64 per row
    BLOCKS,  # address of int64 per group of layers and row: the block that its key goes to
    NUM_TILES,
    TILES,  # address of TILE_FIELDS int64 per group of layers and tile
    NUM_PIECES,  # 0: a thread does all pieces of its item; else ATTEND's items are pieces
    PIECES,  # address of their results
    EPS,  # float32 bits
    SCRATCH,
    SCRATCH_STRIDE,  # bytes per thread; the last CURSOR_BYTES are for cpu_fetch
    THREADS_SEEN,  # address of one int64, zero at the start
    CYCLES,  # address of one int64 per operation, for the processor's clock at its end; 0: none
    HEADER_FIELDS,
) = range(21)

# A query tile: first row, rows, position of the first, address of the block table (int64).
TILE_FIELDS = 4

NORM, MATMUL, ROPE, ATTEND, MERGE, GATE, QUANTIZE, BEST, THIN, EMBED, CAP, PACK = range(12)
OP_FIELDS = 16

# GGUF's types that PACK takes: those with blocks of 32 first.
Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K = range(7)
STORED_TYPES = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q5_0": Q5_0, "Q8_0": Q8_0}
STORED_TYPES |= {"Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K}

MOST_LEFT = 2047  # ids that THIN writes for a row; it counts them all
REQUEST_FIELDS = (
    4  # of THIN: logits' row, hash of seed and position, 1 / temperature (float32 bits)
)


def piece_bytes(group: int, head_dim: int) -> int:
    """What one piece's result takes."""
    return (4 * QUERY_TILE * group * (head_dim + 9) + 63) // 64 * 64


def scratch_bytes(group: int, head_dim: int) -> int:
    """What `attend` needs of each thread's scratch: two pieces, queries, scores, factors, keys and
    values."""
    rows = QUERY_TILE * group
    floats = rows * head_dim + rows * 32 + rows + 2 * 32 * head_dim
    return (2 * piece_bytes(group, head_dim) + 4 * floats + 4095) // 4096 * 4096


def unpacked_bytes(num_inputs: int) -> int:
    """What a product of many rows needs of each thread's scratch, for two strips of 4-bit weights.

    With less it reads them as they are stored. Beyond the limit they would not stay in a core's
    cache, which is the point of it.
    """
    size = num_inputs // 32 * BYTES_UNPACKED
    return size if size <= MOST_UNPACKED else 0


def scratch_stride(sizes: Iterable[int]) -> int:
    """Bytes of scratch per thread, for operations that need so many each."""
    return (max(sizes) + 63) // 64 * 64 + CURSOR_BYTES
