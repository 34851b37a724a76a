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
bits never depend on it. Threads take items from a counter and meet after each operation.

The keys of a block lie transposed, [head_dim, 32], so that 32 scores are computed at once; values
lie as they are. Both are bfloat16; arithmetic is float32. The keys of a sequence are summed up in
pieces of 512, each from scratch, and the pieces are joined in order. That depends on positions
alone, so it is free whether one thread does the pieces of a long sequence or many do (as in
Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from . import cpu_ir as vec
from . import cpu_tiles
from .cpu_compile import Table, inlined, kernel

BLOCK_SIZE = 32  # tokens of a cache block, and scores of a row at a time
QUERY_TILE = 8  # query tokens that share the widened keys of a block
PIECE_BLOCKS = 16  # cache blocks that are summed up from scratch
NARROW_ROWS = 6  # so few rows read bfloat16 keys straight; more share widened ones

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
    BLOCKS,  # address of int64 per group of layers and row: the block that its key goes to
    NUM_TILES,
    TILES,  # address of TILE_FIELDS int64 per group of layers and tile
    NUM_PIECES,  # 0: a thread does all pieces of its item; else ATTEND's items are pieces
    PIECES,  # address of their results
    EPS,  # float32 bits
    SCRATCH,
    SCRATCH_STRIDE,  # bytes per thread
    THREADS_SEEN,  # address of one int64, zero at the start
    CYCLES,  # address of one int64 per operation, for the processor's clock at its end; 0: none
    HEADER_FIELDS,
) = range(20)

# A query tile: first row, rows, position of the first, address of the block table (int64).
TILE_FIELDS = 4

NORM, MATMUL, ROPE, ATTEND, MERGE, GATE, QUANTIZE, BEST, THIN, EMBED, CAP = range(11)
OP_FIELDS = 16

MATMUL_STRIPS = 4  # of 8 outputs, an item
ROW_PANEL = 32  # rows that pass over an item's weights while both are in the nearest cache
SPINS_BEFORE_YIELD = 4000


# ------------------------------------------------------------------------------------------ rows


@inlined
def row_bytes(width: int, bits: int) -> int:
    """From one row of a product's inputs to the next."""
    return width * 4 if bits == 16 else width * 2


@inlined
def quantize_row(x: int, width: int, bits: int, out: int, scales: int) -> None:
    """float32 [width] at x to int8 or int16 at out, and (scale, scaled sum) per 32 at scales.

    int8 for weights of 4 bits, int16 for those of 8; those of 16 take the row as it is.
    """
    if bits == 16:
        for lane in range(0, width * 4, 128):
            vec.times(x + lane, out + lane, 1.0)
        return
    for block in range(width // 32):
        source = x + block * 128
        peak = vec.largest_magnitude(source)
        limit = 127.0 if bits == 4 else 32767.0
        factor = limit / peak if peak > 1e-30 else 0.0
        scale = peak / limit
        if bits == 4:
            total = vec.quantize8(source, out + block * 32, factor)
            vec.store_float(scales + block * 8 + 4, scale * total)
        else:
            vec.quantize16(source, out + block * 64, factor)
        vec.store_float(scales + block * 8, scale)


@inlined
def squares(x: int, width: int) -> float:
    total = 0.0
    for block in range(width // 32):
        total += vec.squares(x + block * 128)
    return total


@inlined
def rms_norm(x: int, weight: int, out: int, width: int, eps: float) -> None:
    factor = 1.0 / vec.sqrt(squares(x, width) / float(width) + eps)
    for block in range(width // 32):
        vec.scaled(x + block * 128, weight + block * 128, out + block * 128, factor)


@inlined
def layer_norm(x: int, weight: int, out: int, width: int, eps: float) -> None:
    total = 0.0
    for block in range(width // 32):
        total += vec.total32(x + block * 128)
    mean = total / float(width)
    for block in range(width // 32):
        vec.plus(x + block * 128, out + block * 128, -mean)
    rms_norm(out, weight, out, width, eps)


@inlined
def add_branches(x: int, op: Table, at: int, eps: float) -> float:
    """residual += (normed, scaled) delta + second delta; the sum of its squares."""
    delta, width = op[2] + at, op[4]
    if op[10]:
        rms_norm(delta, op[10], delta, width, eps)
    if op[11]:
        for block in range(width // 32):
            vec.times(delta + block * 128, delta + block * 128, vec.bits_to_float(op[11]))
    total = 0.0
    if op[13]:
        for block in range(width // 32):
            total = vec.add_squares(x + block * 128, op[13] + at + block * 128)
    total = 0.0
    for block in range(width // 32):
        total += vec.add_squares(x + block * 128, delta + block * 128)
    return total


@kernel
def norm(row: int, op: Table, head: Table) -> None:
    # op: hidden, delta or 0, weight or 0, width, bits, out, scales, only logit rows, normed rows,
    # weight of the delta's own norm or 0, factor of the delta (float32 bits) or 0, is LayerNorm,
    # second delta or 0
    weight, width = op[3], op[4]
    source = row
    if op[8]:
        rows = head[LOGIT_ROWS]
        source = vec.load_int(rows + row * 8)
    at = source * width * 4
    x, eps = op[1] + at, vec.bits_to_float(head[EPS])
    total = 0.0
    if op[2]:
        total = add_branches(x, op, at, eps)
    elif weight:
        total = squares(x, width)
    normed = op[9] + row * width * 4
    if op[12]:
        layer_norm(x, weight, normed, width, eps)
    elif weight:
        factor = 1.0 / vec.sqrt(total / float(width) + eps)
        for block in range(width // 32):
            vec.scaled(x + block * 128, weight + block * 128, normed + block * 128, factor)
    else:
        normed = x
    out = op[6] + row * row_bytes(width, op[5])
    quantize_row(normed, width, op[5], out, op[7] + row * (width // 32) * 8)


@kernel
def gate(row: int, op: Table) -> None:
    # op: gate and up, width, bits, out, scales, products, 0 for SiLU or 1 for GELU
    width = op[2]
    x = op[1] + row * width * 8
    products = op[6] + row * width * 4
    for block in range(width // 32):
        up = x + (width + block * 32) * 4
        if op[7]:
            vec.gelu_product(x + block * 128, up, products + block * 128)
        else:
            vec.silu_product(x + block * 128, up, products + block * 128)
    out = op[4] + row * row_bytes(width, op[3])
    quantize_row(products, width, op[3], out, op[5] + row * (width // 32) * 8)


@kernel
def quantize(row: int, op: Table) -> None:
    # op: x, width, bits, out, scales
    width = op[2]
    x = op[1] + row * width * 4
    out = op[4] + row * row_bytes(width, op[3])
    quantize_row(x, width, op[3], out, op[5] + row * (width // 32) * 8)


# ------------------------------------------------------------------------------------ embeddings


@inlined
def embed_8bit(block: int, lane: int, out: int, scale: float) -> None:
    factor = vec.load_half(block + 256 + lane * 2) * scale
    for pair in range(16):
        at = block + pair * 16 + lane * 2
        vec.store_float(out + pair * 8, vec.load_byte(at) * factor)
        vec.store_float(out + pair * 8 + 4, vec.load_byte(at + 1) * factor)


@inlined
def embed_4bit(block: int, lane: int, out: int, scale: float) -> None:
    factor = vec.load_half(block + 128 + lane * 2)
    offset = vec.load_half(block + 144 + lane * 2)
    for index in range(16):
        at = out + (index // 4 * 8 + index % 4) * 4
        both = vec.load_nibbles(block + index // 4 * 32 + lane * 4 + index % 4)
        vec.store_float(at, (float(both % 16) * factor + offset) * scale)
        vec.store_float(at + 16, (float(both // 16) * factor + offset) * scale)


@kernel
def embed(row: int, op: Table) -> None:
    # op: token ids, the packed table, width, bits, hidden, factor (float32 bits)
    id = vec.load_int(op[1] + row * 8)
    width, scale = op[3], vec.bits_to_float(op[6])
    out = op[5] + row * width * 4
    blocks = width // 32
    if op[4] == 16:
        column = op[2] + id // 32 * width * 64 + id % 32 * 2
        for index in range(width):
            vec.store_float(out + index * 4, vec.load_bfloat(column + index * 64) * scale)
    elif op[4] == 8:
        strip = op[2] + id // 8 * blocks * cpu_tiles.BYTES_8BIT
        for block in range(blocks):
            embed_8bit(strip + block * cpu_tiles.BYTES_8BIT, id % 8, out + block * 128, scale)
    else:
        strip = op[2] + id // 8 * blocks * cpu_tiles.BYTES_4BIT
        for block in range(blocks):
            embed_4bit(strip + block * cpu_tiles.BYTES_4BIT, id % 8, out + block * 128, scale)


# ------------------------------------------------------------------------------- matrix products

tile4_1, tile4_2, tile4_4 = (cpu_tiles.tile_4bit(rows, 2) for rows in (1, 2, 4))
tile8_1, tile8_2, tile8_4 = (cpu_tiles.tile_8bit(rows, 2) for rows in (1, 2, 4))
strip4, strip8 = cpu_tiles.tile_4bit(1, 1), cpu_tiles.tile_8bit(1, 1)


@inlined
def add_bias(out: int, bias: int, num_outputs: int) -> None:
    for column in range(num_outputs):
        at = out + column * 4
        vec.store_float(at, vec.load_float(at) + vec.load_float(bias + column * 4))


@kernel
def matmul4(item: int, op: Table, num_rows: int) -> None:
    # op: x, scales, weights, inputs, outputs, out, bytes of an out row, bits, bias or 0
    num_blocks, ldc = op[4] // 32, op[7]
    ldx, lds = num_blocks * 64, num_blocks * 8
    strip_bytes = num_blocks * cpu_tiles.BYTES_4BIT
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
                    strip4(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 1
                elif end - row >= 4:
                    tile4_4(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 4
                elif end - row >= 2:
                    tile4_2(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 2
                else:
                    tile4_1(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 1
    if op[9]:
        for row in range(num_rows):
            out = op[6] + row * ldc + first * 32
            add_bias(out, op[9] + first * 32, (last - first) * 8)


@kernel
def matmul8(item: int, op: Table, num_rows: int) -> None:
    # as matmul4
    num_blocks, ldc = op[4] // 32, op[7]
    ldx, lds = num_blocks * 64, num_blocks * 8
    strip_bytes = num_blocks * cpu_tiles.BYTES_8BIT
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
                    strip8(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 1
                elif end - row >= 4:
                    tile8_4(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 4
                elif end - row >= 2:
                    tile8_2(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 2
                else:
                    tile8_1(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                    row += 1
    if op[9]:
        for row in range(num_rows):
            out = op[6] + row * ldc + first * 32
            add_bias(out, op[9] + first * 32, (last - first) * 8)


narrow3, narrow2, narrow1 = (vec.float_tile(n, True, False) for n in (3, 2, 1))


@kernel
def matmul16(item: int, op: Table, num_rows: int) -> None:
    # as matmul4; rows are float32, weights bfloat16 of [outputs / 32][inputs][32]
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


# ------------------------------------------------------------------------- rotation and KV cache


@inlined
def turn(x: int, cos: int, sin: int, pairs: int, is_interleaved: int) -> None:
    """The first 2 · pairs elements of a head."""
    for lane in range(0, pairs * 4, 32):
        if is_interleaved:
            vec.rotated_pairs(x + lane * 2, cos + lane, sin + lane)
        else:
            vec.rotated(x + lane, x + pairs * 4 + lane, cos + lane, sin + lane)


@kernel
def rope(row: int, op: Table, head: Table) -> None:
    # op: qkv, keys of block 0, values of block 0, q norm weight or 0, k norm weight or 0, cos or 0,
    # sin (float32 [positions, pairs]), heads, kv heads, dim, bytes from a block to the next, group
    # of layers, norms are over all heads, pairs that turn, pairs are neighbours
    heads, kv_heads, dim = op[8], op[9], op[10]
    x = op[1] + row * (heads + 2 * kv_heads) * dim * 4
    position = vec.load_int(head[POSITIONS] + row * 8)
    slot = position % BLOCK_SIZE
    block = vec.load_int(head[BLOCKS] + (op[12] * head[NUM_ROWS] + row) * 8) * op[11]
    eps = vec.bits_to_float(head[EPS])
    angles = position * op[14] * 4
    if op[13]:
        rms_norm(x, op[4], x, heads * dim, eps)
        rms_norm(x + heads * dim * 4, op[5], x + heads * dim * 4, kv_heads * dim, eps)
    for index in range(heads + kv_heads):
        at = x + index * dim * 4
        weight = op[4] if index < heads else op[5]
        if weight and not op[13]:
            rms_norm(at, weight, at, dim, eps)
        if op[6]:
            turn(at, op[6] + angles, op[7] + angles, op[14], op[15])
    for index in range(kv_heads):
        key = x + (heads + index) * dim * 4
        value = x + (heads + kv_heads + index) * dim * 4
        base = block + index * dim * BLOCK_SIZE * 2
        for lane in range(0, dim, 8):
            target = op[2] + base + (lane * BLOCK_SIZE + slot) * 2
            vec.scatter(key + lane * 4, target, BLOCK_SIZE * 2)
        for lane in range(0, dim, 32):
            vec.narrow(value + lane * 4, op[3] + base + (slot * dim + lane) * 2)


# ------------------------------------------------------------------------------------- attention

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


def piece_bytes(group: int, head_dim: int) -> int:
    """What one piece's result takes."""
    return (4 * QUERY_TILE * group * (head_dim + 9) + 63) // 64 * 64


def scratch_bytes(group: int, head_dim: int) -> int:
    """What `attend` needs of each thread's scratch: two pieces, queries, scores, factors, keys and
    values."""
    rows = QUERY_TILE * group
    floats = rows * head_dim + rows * 32 + rows + 2 * 32 * head_dim
    return (2 * piece_bytes(group, head_dim) + 4 * floats + 4095) // 4096 * 4096


@kernel
def attend_block(
    op: Table,
    tile: Table,
    queries: int,
    piece: int,
    kv_head: int,
    block: int,
    next_block: int,
    max_rows: int,
) -> None:
    """One cache block joins the running softmax of a piece. The next one is fetched meanwhile: it
    lies elsewhere in memory, and the processor can't guess where."""
    group, dim = op[8] // op[9], op[10]
    first, count, ld = tile[2], tile[1], op[10] * 4
    scores = queries + max_rows * ld
    shrinks = scores + max_rows * 128
    wide_keys = shrinks + max_rows * 4
    wide_values = wide_keys + 32 * ld
    window = op[7]
    begin = block * BLOCK_SIZE
    base = vec.load_int(tile[3] + block * 8) * op[11] + kv_head * dim * BLOCK_SIZE * 2
    keys, values, ldv = op[2] + base, op[3] + base, dim * 2
    ahead = (vec.load_int(tile[3] + next_block * 8) - vec.load_int(tile[3] + block * 8)) * op[11]
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
            vec.widen(keys + lane * 64, wide_keys + lane * 128)
        for lane in range(0, held * dim, 32):
            vec.widen(values + lane * 2, wide_values + lane * 4)
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
    op: Table, tile: Table, queries: int, piece: int, kv_head: int, number: int, max_rows: int
) -> None:
    """All blocks of one piece, from scratch."""
    dim = op[10]
    rows = tile[1] * (op[8] // op[9])
    for lane in range(0, rows * dim, 32):
        vec.zero(piece + lane * 4)
    totals, peaks = totals_of(piece, max_rows, dim), peaks_of(piece, max_rows, dim)
    for row in range(rows):
        vec.zero8(totals + row * 32)
        vec.store_float(peaks + row * 4, -3e38)
    begin = number * PIECE_BLOCKS
    if op[7]:
        begin = max(begin, max(0, tile[2] - op[7] + 1) // BLOCK_SIZE)
    end = min((number + 1) * PIECE_BLOCKS, (tile[2] + tile[1] + BLOCK_SIZE - 1) // BLOCK_SIZE)
    for block in range(begin, end):
        next_block = min(block + 1, end - 1)
        attend_block(op, tile, queries, piece, kv_head, block, next_block, max_rows)


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
            attend_piece(op, tile, queries, target, kv_head, number, max_rows)
        return
    load_queries(op, tile, queries, kv_head)
    begin = 0
    if op[7]:
        begin = max(0, tile[2] - op[7] + 1) // (PIECE_BLOCKS * BLOCK_SIZE)
    attend_piece(op, tile, queries, piece, kv_head, begin, max_rows)
    for later in range(begin + 1, last):
        attend_piece(op, tile, queries, part, kv_head, later, max_rows)
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
    begin = 0
    if op[7]:
        begin = max(0, tile[2] - op[7] + 1) // (PIECE_BLOCKS * BLOCK_SIZE)
    whole = first + begin * op[13]
    for number in range(begin + 1, pieces_of(tile)):
        join(whole, first + number * op[13], tile[1] * (op[8] // kv_heads), max_rows, dim)
    finish(op, tile, whole, kv_head, max_rows)


# ---------------------------------------------------------------------------------------- logits


@kernel
def cap(row: int, op: Table) -> None:
    # op: logits, vocabulary, nothing, factor, cap (float32 bits) or 0
    x, vocab = op[1] + row * op[2] * 4, op[2]
    for at in range(0, vocab * 4, 32):
        vec.times8(x + at, vec.bits_to_float(op[4]))
        if op[5]:
            vec.capped8(x + at, vec.bits_to_float(op[5]))


# -------------------------------------------------------------------------------------- sampling

MOST_LEFT = 2047  # ids that THIN writes for a row; it counts them all
REQUEST_FIELDS = (
    4  # of THIN: logits' row, hash of seed and position, 1 / temperature (float32 bits)
)

_LN2 = 0.6931472


@kernel
def best(row: int, op: Table) -> None:
    # op: logits, vocabulary, out: int64 per row, the lowest id of the largest logit; -1 if that is
    # not finite or any logit is NaN
    x, vocab = op[1] + row * op[2] * 4, op[2]
    peak, is_sound = -3e38, 1
    whole = vocab // 32 * 32
    for at in range(0, whole, 32):
        peak = max(peak, vec.peak(x + at * 4))
        is_sound = min(is_sound, vec.are_numbers(x + at * 4))
    for at in range(whole, vocab):
        value = vec.load_float(x + at * 4)
        is_sound = is_sound if value == value else 0
        peak = max(peak, value)
    id = 0
    while id < whole and vec.peak(x + id * 4) < peak:
        id += 32
    while id < vocab - 1 and vec.load_float(x + id * 4) < peak:
        id += 1
    is_usable = is_sound == 1 and peak > -3e38 and peak < 3e38
    vec.store_int(op[3] + row * 8, id if is_usable else -1)


@kernel
def thin(row: int, op: Table) -> None:
    # op: logits, vocabulary, requests, out: per row a count and up to MOST_LEFT ids, ascending
    #
    # The winner is the largest x + g, where g = -log(-log u) and u comes from a hash. How many ones
    # the hash begins with bounds g: with k of them, k ln 2 - 0.33 < g < (k + 1) ln 2; with none,
    # but z zeros, 0.36 - z < g. Who can't reach what another has for sure can't win.
    request = Table(op[3] + row * (REQUEST_FIELDS * 8))
    x, vocab = op[1] + request[0] * op[2] * 4, op[2]
    base, factor = request[1], vec.bits_to_float(request[2])
    out = op[4] + row * ((MOST_LEFT + 1) * 8)
    sure = -3e38
    count = 0
    for id in range(vocab):
        score = vec.load_float(x + id * 4) * factor
        bits = vec.mix(base + id)
        ones = float(vec.leading_ones(bits))
        slack = 0.001 + max(score, -score) * 0.00001
        if score + (ones + 1.0) * _LN2 + slack >= sure:
            count += 1
            if count <= MOST_LEFT:
                vec.store_int(out + count * 8, id)
            low = ones * _LN2 - 0.33 if ones > 0.0 else 0.36 - float(vec.leading_zeros(bits))
            sure = max(sure, score + low - slack)
    vec.store_int(out, count)


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
            matmul4(item, op, num_rows)
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


@kernel
def run(head: Table) -> None:
    """Walk the step that the header at this address describes. Called once per thread."""
    threads = head[NUM_THREADS]
    me = vec.fetch_add(head[THREADS_SEEN], 1)
    scratch = head[SCRATCH] + me * head[SCRATCH_STRIDE]
    meetings = 0
    for index in range(head[NUM_OPS]):
        op = Table(head[OPS] + index * (OP_FIELDS * 8))
        counter = head[COUNTERS] + index * 8
        items = num_items(op, head)
        if items == 0:
            continue
        item = vec.fetch_add(counter, 1)
        while item < items:
            run_item(item, op, head, scratch)
            item = vec.fetch_add(counter, 1)
        if threads > 1:
            meetings += 1
            wait_for(head, meetings * threads)
        if head[CYCLES] and me == 0:
            vec.store_int(head[CYCLES] + index * 8, vec.cycles())
