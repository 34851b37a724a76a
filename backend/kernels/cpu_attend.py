"""The operations ATTEND and MERGE of a compiled step: attention over the paged cache. See
cpu_program for what they promise.
"""

from __future__ import annotations

from . import cpu_ir as vec
from .cpu_compile import Table, inlined, kernel
from .cpu_rows import quantize_row, row_bytes
from .cpu_step import (
    BLOCK_SIZE,
    NUM_PIECES,
    NUM_TILES,
    PIECE_BLOCKS,
    PIECES,
    QUERY_TILE,
    TILE_FIELDS,
    TILES,
)

NARROW_ROWS = 6  # so few rows read bfloat16 keys straight; more share widened ones

narrow3, narrow2, narrow1 = (vec.float_tile(n, True, False) for n in (3, 2, 1))
scores_wide3, scores_wide2, scores_wide1 = (vec.float_tile(n, False, False) for n in (3, 2, 1))
mix_wide3, mix_wide2, mix_wide1 = (vec.float_tile(n, False, True) for n in (3, 2, 1))
mix_narrow3, mix_narrow2, mix_narrow1 = (vec.float_tile(n, True, True) for n in (3, 2, 1))


@kernel
def score_rows(
    a: int, lda: int, keys: int, ahead: int, is_narrow: int, c: int, depth: int, num_rows: int
) -> None:
    """C [rows, 32] = A [rows, depth] · keys [depth, 32]."""
    row = 0
    while row < num_rows:
        x, y = a + row * lda, c + row * 128
        if is_narrow:
            if num_rows - row >= 3:
                narrow3(x, lda, keys, 64, y, 128, depth, 0, ahead)
            elif num_rows - row == 2:
                narrow2(x, lda, keys, 64, y, 128, depth, 0, ahead)
            else:
                narrow1(x, lda, keys, 64, y, 128, depth, 0, ahead)
        elif num_rows - row >= 3:
            scores_wide3(x, lda, keys, 128, y, 128, depth, 0, 0)
        elif num_rows - row == 2:
            scores_wide2(x, lda, keys, 128, y, 128, depth, 0, 0)
        else:
            scores_wide1(x, lda, keys, 128, y, 128, depth, 0, 0)
        row += 3


@kernel
def mix_rows(
    a: int,
    values: int,
    ldv: int,
    ahead: int,
    is_narrow: int,
    c: int,
    ldc: int,
    held: int,
    num_rows: int,
    shrinks: int,
) -> None:
    """C [rows, 32] = C · shrink + A [rows, 32] · values [held, 32]."""
    row = 0
    while row < num_rows:
        x, y, factors = a + row * 128, c + row * ldc, shrinks + row * 4
        if is_narrow:
            if num_rows - row >= 3:
                mix_narrow3(x, 128, values, ldv, y, ldc, held, factors, ahead)
            elif num_rows - row == 2:
                mix_narrow2(x, 128, values, ldv, y, ldc, held, factors, ahead)
            else:
                mix_narrow1(x, 128, values, ldv, y, ldc, held, factors, ahead)
        elif num_rows - row >= 3:
            mix_wide3(x, 128, values, ldv, y, ldc, held, factors, 0)
        elif num_rows - row == 2:
            mix_wide2(x, 128, values, ldv, y, ldc, held, factors, 0)
        else:
            mix_wide1(x, 128, values, ldv, y, ldc, held, factors, 0)
        row += 3


# A piece's result, of QUERY_TILE · group rows: sums [rows, dim], totals [rows, 8], peaks [rows].


@inlined
def totals_of(piece: int, max_rows: int, dim: int) -> int:
    return piece + max_rows * dim * 4


@inlined
def peaks_of(piece: int, max_rows: int, dim: int) -> int:
    return piece + max_rows * (dim + 8) * 4


@inlined
def place(op: Table, tile: Table, kv_head: int, block: int) -> int:
    """Where a block's keys of a head lie, in bytes from those of block 0; its values as well."""
    base: int = vec.load_int(tile[3] + block * 8) * op[11]
    return base + kv_head * op[10] * BLOCK_SIZE * 2


@inlined
def first_block(op: Table, tile: Table) -> int:
    """The first that any query of the tile sees."""
    return max(0, tile[2] - op[7] + 1) // BLOCK_SIZE if op[7] else 0


@kernel
def attend_block(
    op: Table,
    tile: Table,
    queries: int,
    piece: int,
    kv_head: int,
    block: int,
    later: int,
    max_rows: int,
) -> None:
    """One cache block joins the running softmax of a piece. What is read after it, at `later`, is
    fetched meanwhile: it lies elsewhere in memory, and the processor can't guess where."""
    group, dim = op[8] // op[9], op[10]
    first, count, ld = tile[2], tile[1], op[10] * 4
    scores = queries + max_rows * ld
    shrinks = scores + max_rows * 128
    wide_keys = shrinks + max_rows * 4
    wide_values = wide_keys + 32 * ld
    window = op[7]
    begin = block * BLOCK_SIZE
    base = place(op, tile, kv_head, block)
    keys, values, ldv = op[2] + base, op[3] + base, dim * 2
    ahead = later - base
    begin_row = max(0, begin - first) * group  # earlier queries see nothing of this block
    end_row = count * group
    if window:
        end_row = min(count, begin + BLOCK_SIZE - 1 + window - first) * group
    num = end_row - begin_row
    if num <= 0:
        return
    held = min(BLOCK_SIZE, first + count - begin)
    is_narrow = count * group <= NARROW_ROWS
    if not is_narrow:
        for lane in range(dim):
            vec.widen(keys + lane * 64, wide_keys + lane * 128, ahead)
        for lane in range(0, held * dim, 32):
            vec.widen(values + lane * 2, wide_values + lane * 4, ahead)
        keys, values, ldv = wide_keys, wide_values, ld
    totals, peaks = totals_of(piece, max_rows, dim), peaks_of(piece, max_rows, dim)
    scores += begin_row * 128
    score_rows(queries + begin_row * ld, ld, keys, ahead, is_narrow, scores, dim, num)
    for row in range(num):
        position = first + (begin_row + row) // group
        low = max(0, position - window + 1 - begin) if window else 0
        high = min(BLOCK_SIZE, position + 1 - begin)
        at = scores + row * 128
        if op[15]:
            vec.capped(at, vec.bits_to_float(op[15]))
        if low > 0 or high < BLOCK_SIZE:
            vec.hide(at, low, high)
        here = vec.peak(at)
        peak_at = peaks + (begin_row + row) * 4
        old = vec.load_float(peak_at)
        shrink = 1.0
        if here > old:
            shrink = vec.exp(old - here)
            vec.store_float(peak_at, here)
            old = here
        vec.store_float(shrinks + row * 4, shrink)
        vec.weights(at, totals + (begin_row + row) * 32, old, shrink)
    for lane in range(0, dim, 32):
        sums = piece + begin_row * ld + lane * 4
        column = values + lane * (ldv // dim)
        mix_rows(scores, column, ldv, ahead, is_narrow, sums, ld, held, num, shrinks)


@kernel
def attend_piece(
    op: Table,
    tile: Table,
    queries: int,
    piece: int,
    kv_head: int,
    number: int,
    later: int,
    max_rows: int,
) -> None:
    """All blocks of one piece, from scratch. `later`: what is read after the tile's last block."""
    dim = op[10]
    rows = tile[1] * (op[8] // op[9])
    for lane in range(0, rows * dim, 32):
        vec.zero(piece + lane * 4)
    totals, peaks = totals_of(piece, max_rows, dim), peaks_of(piece, max_rows, dim)
    for row in range(rows):
        vec.zero8(totals + row * 32)
        vec.store_float(peaks + row * 4, -3e38)
    begin = max(number * PIECE_BLOCKS, first_block(op, tile))
    num_blocks = (tile[2] + tile[1] + BLOCK_SIZE - 1) // BLOCK_SIZE
    for block in range(begin, min((number + 1) * PIECE_BLOCKS, num_blocks)):
        following = later
        if block + 1 < num_blocks:
            following = place(op, tile, kv_head, block + 1)
        attend_block(op, tile, queries, piece, kv_head, block, following, max_rows)


@kernel
def join(whole: int, part: int, rows: int, max_rows: int, dim: int) -> None:
    """The sums of a later piece join those of the pieces before it."""
    totals, peaks = totals_of(whole, max_rows, dim), peaks_of(whole, max_rows, dim)
    other_totals, other_peaks = totals_of(part, max_rows, dim), peaks_of(part, max_rows, dim)
    for row in range(rows):
        old, new = vec.load_float(peaks + row * 4), vec.load_float(other_peaks + row * 4)
        peak = max(old, new)
        mine, other = vec.exp(old - peak), vec.exp(new - peak)
        vec.store_float(peaks + row * 4, peak)
        vec.blend8(totals + row * 32, other_totals + row * 32, mine, other)
        for lane in range(0, dim, 8):
            at = (row * dim + lane) * 4
            vec.blend8(whole + at, part + at, mine, other)


@kernel
def finish(op: Table, tile: Table, piece: int, kv_head: int, max_rows: int) -> None:
    """Divide by the softmax's sum; quantise for the output projection."""
    heads, dim = op[8], op[10]
    group = heads // op[9]
    totals = totals_of(piece, max_rows, dim)
    width = heads * dim
    for row in range(tile[1] * group):
        token, start = tile[0] + row // group, (kv_head * group + row % group) * dim
        x = piece + row * dim * 4
        factor = 1.0 / vec.total8(totals + row * 32)
        for lane in range(0, dim * 4, 128):
            vec.times(x + lane, x + lane, factor)
        size = op[6] // 4  # bytes of an element: 1, 2 or 4
        out = op[4] + token * row_bytes(width, op[6]) + start * size
        quantize_row(x, dim, op[6], out, op[5] + (token * width + start) // 32 * 8)


@inlined
def load_queries(op: Table, tile: Table, queries: int, kv_head: int) -> None:
    """The scaled query rows of one item, one after another."""
    heads, kv_heads, dim = op[8], op[9], op[10]
    group = heads // kv_heads
    width = (heads + 2 * kv_heads) * dim
    scale = vec.bits_to_float(op[12])
    for row in range(tile[1] * group):
        start = (kv_head * group + row % group) * dim
        source = op[1] + ((tile[0] + row // group) * width + start) * 4
        for lane in range(0, dim * 4, 128):
            vec.times(source + lane, queries + row * dim * 4 + lane, scale)


@inlined
def pieces_of(tile: Table) -> int:
    """Up to which piece the tile's last query looks."""
    return (tile[2] + tile[1] + PIECE_BLOCKS * BLOCK_SIZE - 1) // (PIECE_BLOCKS * BLOCK_SIZE)


@inlined
def tile_of(op: Table, head: Table, number: int) -> Table:
    return Table(head[TILES] + (op[14] * head[NUM_TILES] + number) * (TILE_FIELDS * 8))


@inlined
def after(op: Table, head: Table, pair: int) -> int:
    """Where the next pair of tile and head begins to read: most likely this thread's next item."""
    pair = min(pair + 1, head[NUM_TILES] * op[9] - 1)
    tile = tile_of(op, head, pair // op[9])
    return place(op, tile, pair % op[9], first_block(op, tile))


@kernel
def attend(item: int, op: Table, head: Table, scratch: int) -> None:
    # op: qkv, keys of block 0, values of block 0, out, scales, bits, window or 0, heads, kv heads,
    # dim, bytes from a block to the next, scale (float32 bits), bytes of a piece, group of layers,
    # cap of the scores (float32 bits) or 0
    kv_heads, dim = op[9], op[10]
    max_rows = QUERY_TILE * (op[8] // kv_heads)
    num_pieces = head[NUM_PIECES]
    number, pair = item % max(1, num_pieces), item // max(1, num_pieces)
    kv_head = pair % kv_heads
    tile = tile_of(op, head, pair // kv_heads)
    piece, part = scratch, scratch + op[13]
    queries = part + op[13]
    last = pieces_of(tile)
    if num_pieces:
        if number < last:
            load_queries(op, tile, queries, kv_head)
            target = head[PIECES] + item * op[13]
            own = place(op, tile, kv_head, number * PIECE_BLOCKS)
            attend_piece(op, tile, queries, target, kv_head, number, own, max_rows)
        return
    load_queries(op, tile, queries, kv_head)
    later = after(op, head, pair)
    begin = first_block(op, tile) // PIECE_BLOCKS
    attend_piece(op, tile, queries, piece, kv_head, begin, later, max_rows)
    for follower in range(begin + 1, last):
        attend_piece(op, tile, queries, part, kv_head, follower, later, max_rows)
        join(piece, part, tile[1] * (op[8] // kv_heads), max_rows, dim)
    finish(op, tile, piece, kv_head, max_rows)


@kernel
def merge(item: int, op: Table, head: Table) -> None:
    # op: as ATTEND
    kv_heads, dim = op[9], op[10]
    max_rows = QUERY_TILE * (op[8] // kv_heads)
    kv_head = item % kv_heads
    tile = tile_of(op, head, item // kv_heads)
    first = head[PIECES] + item * head[NUM_PIECES] * op[13]
    begin = first_block(op, tile) // PIECE_BLOCKS
    whole = first + begin * op[13]
    for number in range(begin + 1, pieces_of(tile)):
        join(whole, first + number * op[13], tile[1] * (op[8] // kv_heads), max_rows, dim)
    finish(op, tile, whole, kv_head, max_rows)
