"""A whole forward pass as one compiled call: a list of operations that all threads walk together.

Python builds the list once per model and says per step only how many rows there are and where they
lie. Per layer:

    NORM      residual += delta; RMSNorm; quantise        a row is an item
    MATMUL    quantised rows times packed weights         64 outputs are an item
    ROPE      (q/k norm,) rotate, write keys and values   a row is an item
    ATTEND    paged attention that reads the block table  (query tile, kv head) is an item
    QUANTIZE  attention's output                          a row is an item
    SILU      silu(gate) · up; quantise                   a row is an item

An item belongs to one thread and is computed the same way whoever else is in the batch, so a row's
bits never depend on it. Threads take items from a counter and meet after each operation. The
keys of a block lie transposed, [head_dim, 32], so that 32 scores are computed at once; values lie
as they are. Both are bfloat16; arithmetic is float32.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from . import cpu_ir as vec

BLOCK_SIZE = 32  # tokens of a cache block, and scores of a row at a time
QUERY_TILE = 8  # query tokens that share the widened keys of a block

# Header of a step: int64 fields. Addresses are bytes.
(
    NUM_OPS,
    OPS,
    COUNTERS,  # one int64 per operation, zero at the start
    ARRIVALS,  # address of one int64, zero at the start
    NUM_THREADS,
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    LOGIT_ROWS,  # address of int64 row numbers
    POSITIONS,  # address of int64 per row
    BLOCKS,  # address of int64 per row: the block that its key goes to
    NUM_TILES,
    TILES,  # address of TILE_FIELDS int64 each
    COS,  # address of float32 [positions, head_dim / 2]
    SIN,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    BLOCK_STRIDE,  # bytes from one cache block to the next
    WINDOW,  # 0: none
    SCALE,  # float32 bits
    EPS,  # float32 bits
    SCRATCH,
    SCRATCH_STRIDE,  # bytes per thread
    THREADS_SEEN,  # address of one int64, zero at the start
    HEADER_FIELDS,
) = range(25)

# A query tile: first row, rows, position of the first, address of the block table (int64).
TILE_FIELDS = 4

NORM, MATMUL, ROPE, ATTEND, QUANTIZE, SILU = range(6)
OP_FIELDS = 12

_f = np.float32


@njit(inline="always")
def _quantize_row(x, width, bits, out, scales):
    """float32 [width] at x to int8 or int16 at out, and (scale, scaled sum) per 32 at scales."""
    for block in range(width // 32):
        source = x + block * 128
        peak = vec.largest_magnitude(source)
        limit = _f(127.0) if bits == 4 else _f(32767.0)
        factor = limit / peak if peak > _f(1e-30) else _f(0.0)
        scale = peak / limit
        if bits == 4:
            total = vec.quantize8(source, out + block * 32, factor)
            vec.store_float(scales + block * 8 + 4, scale * total)
        else:
            vec.quantize16(source, out + block * 64, factor)
        vec.store_float(scales + block * 8, scale)


@njit
def _norm(row, op, head):
    # op: hidden, delta or 0, weight, width, bits, out, scales, only logit rows, scratch row floats
    hidden, delta, weight, width = op[1], op[2], op[3], op[4]
    source = row
    if op[8]:
        source = vec.load_int(head[LOGIT_ROWS] + row * 8)
    x = hidden + source * width * 4
    total = _f(0.0)
    for block in range(width // 32):
        if delta:
            total += vec.add_squares(x + block * 128, delta + (source * width + block * 32) * 4)
        else:
            total += vec.squares(x + block * 128)
    eps = vec.bits_to_float(head[EPS])
    factor = _f(1.0) / _f(math.sqrt(total / _f(width) + eps))
    normed = op[9] + row * width * 4
    for block in range(width // 32):
        vec.scaled(x + block * 128, weight + block * 128, normed + block * 128, factor)
    _quantize_row(normed, width, op[5], op[6] + row * width * 2, op[7] + row * (width // 32) * 8)


_tile4_1, _tile4_2, _tile4_4 = vec.tile_4bit(1), vec.tile_4bit(2), vec.tile_4bit(4)
_tile8_1, _tile8_2, _tile8_4 = vec.tile_8bit(1), vec.tile_8bit(2), vec.tile_8bit(4)

STRIPS_PER_ITEM = 8
ROW_PANEL = 32  # rows that pass over an item's weights while both are in the nearest cache


@njit
def _matmul(item, op, num_rows):
    # op: x, scales, weights, inputs, outputs, out, bytes of an out row, bits, bias or 0
    x, scales, weights, inputs, outputs = op[1], op[2], op[3], op[4], op[5]
    out, ldc, bits, bias = op[6], op[7], op[8], op[9]
    num_blocks = inputs // 32
    ldx, lds = inputs * 2, num_blocks * 8
    strip_bytes = num_blocks * (vec.BYTES_4BIT if bits == 4 else vec.BYTES_8BIT)
    first = item * STRIPS_PER_ITEM
    last = min(first + STRIPS_PER_ITEM, outputs // 8)
    for panel in range(0, num_rows, ROW_PANEL):
        end = min(panel + ROW_PANEL, num_rows)
        for strip in range(first, last):
            w = weights + strip * strip_bytes
            row = panel
            while row < end:
                xa, sa, ca = x + row * ldx, scales + row * lds, out + row * ldc + strip * 32
                if bits == 4:
                    if end - row >= 4:
                        _tile4_4(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                        row += 4
                    elif end - row >= 2:
                        _tile4_2(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                        row += 2
                    else:
                        _tile4_1(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                        row += 1
                elif end - row >= 4:
                    _tile8_4(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                    row += 4
                elif end - row >= 2:
                    _tile8_2(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                    row += 2
                else:
                    _tile8_1(xa, ldx, sa, lds, w, ca, ldc, num_blocks)
                    row += 1
    if bias:
        for row in range(num_rows):
            for column in range(first * 8, last * 8):
                at = out + row * ldc + column * 4
                vec.store_float(at, vec.load_float(at) + vec.load_float(bias + column * 4))


@njit(inline="always")
def _head_norm(x, weight, dim, eps):
    total = _f(0.0)
    for block in range(dim // 32):
        total += vec.squares(x + block * 128)
    factor = _f(1.0) / _f(math.sqrt(total / _f(dim) + eps))
    for block in range(dim // 32):
        vec.scaled(x + block * 128, weight + block * 128, x + block * 128, factor)


@njit
def _rope(row, op, head):
    # op: qkv, keys of block 0, values of block 0, q norm weight or 0, k norm weight or 0
    dim, heads, kv_heads = head[HEAD_DIM], head[NUM_HEADS], head[NUM_KV_HEADS]
    width = (heads + 2 * kv_heads) * dim
    x = op[1] + row * width * 4
    position = vec.load_int(head[POSITIONS] + row * 8)
    slot = position % BLOCK_SIZE
    block = vec.load_int(head[BLOCKS] + row * 8) * head[BLOCK_STRIDE]
    eps = vec.bits_to_float(head[EPS])
    angles = position * (dim // 2) * 4
    for index in range(heads + kv_heads):
        at = x + index * dim * 4
        weight = op[4] if index < heads else op[5]
        if weight:
            _head_norm(at, weight, dim, eps)
        for lane in range(0, dim // 2, 8):
            vec.rotated(
                at + lane * 4,
                at + (lane + dim // 2) * 4,
                head[COS] + angles + lane * 4,
                head[SIN] + angles + lane * 4,
            )
    for index in range(kv_heads):
        key = x + (heads + index) * dim * 4
        value = x + (heads + kv_heads + index) * dim * 4
        base = block + index * dim * BLOCK_SIZE * 2
        for lane in range(0, dim, 8):
            vec.scatter(
                key + lane * 4, op[2] + base + (lane * BLOCK_SIZE + slot) * 2, BLOCK_SIZE * 2
            )
        for lane in range(0, dim, 32):
            vec.narrow(value + lane * 4, op[3] + base + (slot * dim + lane) * 2)


_scores3, _scores2, _scores1 = (vec.float_tile(rows, 4) for rows in (3, 2, 1))


@njit(inline="always")
def _tiles(a, lda, b, ldb, c, ldc, depth, rows):
    """C [rows, 32] += A [rows, depth] · B [depth, 32]."""
    row = 0
    while row < rows:
        if rows - row >= 3:
            _scores3(a + row * lda, lda, b, ldb, c + row * ldc, ldc, depth)
            row += 3
        elif rows - row == 2:
            _scores2(a + row * lda, lda, b, ldb, c + row * ldc, ldc, depth)
            row += 2
        else:
            _scores1(a + row * lda, lda, b, ldb, c + row * ldc, ldc, depth)
            row += 1


def scratch_bytes(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """What `_attend` needs of each thread's scratch."""
    rows = QUERY_TILE * (num_heads // num_kv_heads)
    floats = 2 * rows * head_dim + rows * 32 + 2 * rows + 2 * 32 * head_dim
    return (4 * floats + 4095) // 4096 * 4096


@njit
def _attend(item, op, head, scratch):
    # op: qkv, keys of block 0, values of block 0, out
    dim, heads, kv_heads = head[HEAD_DIM], head[NUM_HEADS], head[NUM_KV_HEADS]
    group = heads // kv_heads
    tile, kv_head = item // kv_heads, item % kv_heads
    at = head[TILES] + tile * TILE_FIELDS * 8
    first_row, count = vec.load_int(at), vec.load_int(at + 8)
    first, table = vec.load_int(at + 16), vec.load_int(at + 24)
    width = (heads + 2 * kv_heads) * dim
    rows = count * group
    # scratch: queries, sums, scores, peaks, totals, keys, values
    ld = dim * 4
    queries = scratch
    sums = queries + QUERY_TILE * group * ld
    scores = sums + QUERY_TILE * group * ld
    peaks = scores + QUERY_TILE * group * 128
    totals = peaks + QUERY_TILE * group * 4
    keys = totals + QUERY_TILE * group * 4
    values = keys + 32 * ld
    scale = vec.bits_to_float(head[SCALE])
    for row in range(rows):
        source = (
            op[1] + ((first_row + row // group) * width + (kv_head * group + row % group) * dim) * 4
        )
        for lane in range(0, ld, 128):
            vec.times(source + lane, queries + row * ld + lane, scale)
            vec.zero(sums + row * ld + lane)
        vec.store_float(peaks + row * 4, _f(-3e38))
        vec.store_float(totals + row * 4, _f(0.0))
    window = head[WINDOW]
    end = first + count  # tokens in the cache when the last query looks
    first_block = 0
    if window:
        first_block = max(0, first - window + 1) // BLOCK_SIZE
    for block in range(first_block, (end + BLOCK_SIZE - 1) // BLOCK_SIZE):
        begin = block * BLOCK_SIZE
        base = vec.load_int(table + block * 8) * head[BLOCK_STRIDE]
        base += kv_head * dim * BLOCK_SIZE * 2
        for lane in range(dim):
            vec.widen(op[2] + base + lane * BLOCK_SIZE * 2, keys + lane * 128)
        held = min(BLOCK_SIZE, end - begin)
        for slot in range(held):
            for lane in range(0, dim, 32):
                vec.widen(op[3] + base + (slot * dim + lane) * 2, values + (slot * dim + lane) * 4)
        for lane in range(held * dim, BLOCK_SIZE * dim, 32):
            vec.zero(values + lane * 4)
        begin_row = max(0, begin - first) * group  # earlier queries see nothing of this block
        end_row = rows
        if window:
            end_row = min(count, begin + BLOCK_SIZE - 1 + window - first) * group
        num = end_row - begin_row
        if num <= 0:
            continue
        for row in range(begin_row, end_row):
            vec.zero(scores + row * 128)
        _tiles(queries + begin_row * ld, ld, keys, 128, scores + begin_row * 128, 128, dim, num)
        for row in range(begin_row, end_row):
            position = first + row // group
            low = 0
            if window:
                low = max(0, position - window + 1 - begin)
            shrink = vec.softmax_block(
                scores + row * 128,
                low,
                min(BLOCK_SIZE, position + 1 - begin),
                peaks + row * 4,
                totals + row * 4,
            )
            if shrink != _f(1.0):
                for lane in range(0, ld, 128):
                    vec.times(sums + row * ld + lane, sums + row * ld + lane, shrink)
        for lane in range(0, ld, 128):
            _tiles(
                scores + begin_row * 128,
                128,
                values + lane,
                ld,
                sums + begin_row * ld + lane,
                ld,
                BLOCK_SIZE,
                num,
            )
    for row in range(rows):
        target = op[4] + ((first_row + row // group) * heads + kv_head * group + row % group) * ld
        factor = _f(1.0) / vec.load_float(totals + row * 4)
        for lane in range(0, ld, 128):
            vec.times(sums + row * ld + lane, target + lane, factor)


@njit
def _silu(row, op):
    # op: gate and up, width, bits, out, scales, products
    width = op[2]
    gate = op[1] + row * width * 8
    products = op[6] + row * width * 4
    for block in range(width // 32):
        vec.silu_product(
            gate + block * 128, gate + (width + block * 32) * 4, products + block * 128
        )
    _quantize_row(products, width, op[3], op[4] + row * width * 2, op[5] + row * (width // 32) * 8)


@njit
def _num_items(op, head):
    kind = op[0]
    if kind == MATMUL:
        return (op[5] // 8 + STRIPS_PER_ITEM - 1) // STRIPS_PER_ITEM
    if kind == ATTEND:
        return head[NUM_TILES] * head[NUM_KV_HEADS]
    if kind == NORM and op[8]:
        return head[NUM_LOGIT_ROWS]
    return head[NUM_ROWS]


@njit
def _run_item(item, op, head, scratch):
    kind = op[0]
    if kind == NORM:
        _norm(item, op, head)
    elif kind == MATMUL:
        _matmul(item, op, head[NUM_LOGIT_ROWS] if op[10] else head[NUM_ROWS])
    elif kind == ROPE:
        _rope(item, op, head)
    elif kind == ATTEND:
        _attend(item, op, head, scratch)
    elif kind == QUANTIZE:
        # op: x, width, bits, out, scales
        width = op[2]
        _quantize_row(
            op[1] + item * width * 4,
            width,
            op[3],
            op[4] + item * width * 2,
            op[5] + item * (width // 32) * 8,
        )
    else:
        _silu(item, op)


SPINS_BEFORE_YIELD = 4000


@njit
def _run(header):
    head = vec.int_array(header, HEADER_FIELDS)
    threads = head[NUM_THREADS]
    me = vec.fetch_add(head[THREADS_SEEN], 1)
    scratch = head[SCRATCH] + me * head[SCRATCH_STRIDE]
    for index in range(head[NUM_OPS]):
        op = vec.int_array(head[OPS] + index * OP_FIELDS * 8, OP_FIELDS)
        counter = head[COUNTERS] + index * 8
        items = _num_items(op, head)
        item = vec.fetch_add(counter, 1)
        while item < items:
            _run_item(item, op, head, scratch)
            item = vec.fetch_add(counter, 1)
        if threads > 1:
            vec.fetch_add(head[ARRIVALS], 1)
            spins = 0
            while vec.load_atomic(head[ARRIVALS]) < (index + 1) * threads:
                spins += 1
                if spins < SPINS_BEFORE_YIELD:
                    vec.pause()
                else:
                    vec.yield_thread()


@cfunc("void(int64)", cache=True)
def run(header):
    """Walk the step that the header at this address describes. Called once per thread."""
    _run(header)
