"""The operations of a compiled step whose items are rows: EMBED, NORM, GATE, QUANTIZE, ROPE, and of
logits CAP, BEST and THIN. See cpu_program.
"""

from __future__ import annotations

from . import cpu_ir as vec
from . import cpu_tiles
from .cpu_compile import Table, inlined, kernel
from .cpu_step import (
    BLOCK_SIZE,
    BLOCKS,
    EPS,
    LOGIT_ROWS,
    MOST_LEFT,
    NUM_ROWS,
    POSITIONS,
    REQUEST_FIELDS,
)

# ------------------------------------------------------------------------------------------ rows


@inlined
def row_bytes(width: int, bits: int) -> int:
    """From one row of a product's inputs to the next."""
    return width * 4 if bits == 16 else width * 2


@kernel
def quantize_row(x: int, width: int, bits: int, out: int, scales: int) -> None:
    """float32 [width] at x to int8 or int16 at out, and (scale, scaled sum) per 32 at scales.

    int8 for weights of 4 bits, int16 for those of 8; those of 16 take the row as it is.
    """
    num_blocks = width // 32
    fours = num_blocks // 4 * 4
    if bits == 4:
        for block in range(0, fours, 4):
            vec.quantize8_four(x + block * 128, out + block * 32, scales + block * 8)
        for block in range(fours, num_blocks):
            vec.quantize8(x + block * 128, out + block * 32, scales + block * 8)
    elif bits == 8:
        for block in range(0, fours, 4):
            vec.quantize16_four(x + block * 128, out + block * 64, scales + block * 8)
        for block in range(fours, num_blocks):
            vec.quantize16(x + block * 128, out + block * 64, scales + block * 8)
    else:
        for at in range(0, width * 4, 128):
            vec.store32(vec.load32(x + at), out + at)


@inlined
def quantize_part(x: int, begin: int, count: int, bits: int, out: int, scales: int) -> None:
    """Elements of a row from `begin` on, which lie at x."""
    quantize_row(x, count, bits, out + begin * (bits // 4), scales + begin // 4)


@inlined
def squares(x: int, mean: float, width: int) -> float:
    """The sum of (x - mean)²: 32 sums, joined at the end."""
    sums, center = vec.splat(0.0), vec.splat(mean)
    for at in range(0, width * 4, 128):
        part = vec.load32(x + at) - center
        sums = vec.fma(part, part, sums)
    total: float = vec.total(sums)
    return total


@inlined
def mean_of(x: int, width: int) -> float:
    sums = vec.splat(0.0)
    for at in range(0, width * 4, 128):
        sums = sums + vec.load32(x + at)
    total: float = vec.total(sums)
    return total / float(width)


@inlined
def inverse_rms(squares: float, width: int, eps: float) -> float:
    factor: float = 1.0 / vec.sqrt(squares / float(width) + eps)
    return factor


@inlined
def rms_norm(x: int, weight: int, width: int, eps: float) -> None:
    """In place."""
    factor = vec.splat(inverse_rms(squares(x, 0.0, width), width, eps))
    for at in range(0, width * 4, 128):
        vec.store32(vec.load32(x + at) * factor * vec.load32(weight + at), x + at)


@inlined
def add_branches(x: int, op: Table, at: int, eps: float) -> float:
    """residual += second delta + (normed, scaled) delta; the sum of its squares."""
    delta, second, width, weight = op[2] + at, op[13] + at, op[4], op[10]
    scale, factor = vec.splat(vec.bits_to_float(op[11])), vec.splat(1.0)
    sums = vec.splat(0.0)
    if weight:
        factor = vec.splat(inverse_rms(squares(delta, 0.0, width), width, eps))
    for lane in range(0, width * 4, 128):
        added, whole = vec.load32(delta + lane), vec.load32(x + lane)
        if weight:
            added = added * factor * vec.load32(weight + lane)
        if op[11]:
            added = added * scale
        if op[13]:
            whole = whole + vec.load32(second + lane)
        whole = whole + added
        vec.store32(whole, x + lane)
        sums = vec.fma(whole, whole, sums)
    total: float = vec.total(sums)
    return total


@kernel
def norm(row: int, op: Table, head: Table) -> None:
    # op: hidden, delta or 0, weight or 0, width, bits, out, scales, only logit rows, where normed
    # rows are kept or 0, weight of the delta's own norm or 0, factor of the delta (float32 bits) or
    # 0, is LayerNorm, second delta or 0
    weight, width, bits = op[3], op[4], op[5]
    source = row
    if op[8]:
        rows = head[LOGIT_ROWS]
        source = vec.load_int(rows + row * 8)
    at = source * width * 4
    x, eps = op[1] + at, vec.bits_to_float(head[EPS])
    mean, total = 0.0, 0.0
    if op[2]:
        total = add_branches(x, op, at, eps)
    elif weight:
        total = squares(x, 0.0, width)
    if op[12]:
        mean = mean_of(x, width)
        total = squares(x, mean, width)
    center, factor = vec.splat(mean), vec.splat(inverse_rms(total, width, eps))
    out, scales = op[6] + row * row_bytes(width, bits), op[7] + row * (width // 32) * 8
    normed = op[9] + row * width * 4
    room = vec.room()
    for begin in range(0, width, 128):
        count = min(128, width - begin)
        target = normed + begin * 4 if op[9] else room
        if weight:
            for at in range(0, count * 4, 128):
                part = (vec.load32(x + begin * 4 + at) - center) * factor
                vec.store32(part * vec.load32(weight + begin * 4 + at), target + at)
        else:
            target = x + begin * 4
        quantize_part(target, begin, count, bits, out, scales)


@kernel
def gate(row: int, op: Table) -> None:
    # op: gate and up, width, bits, out, scales, 0 for SiLU or 1 for GELU
    width, bits = op[2], op[3]
    x = op[1] + row * width * 8
    out, scales = op[4] + row * row_bytes(width, bits), op[5] + row * (width // 32) * 8
    room = vec.room()
    for begin in range(0, width, 128):
        count = min(128, width - begin)
        for at in range(0, count * 4, 128):
            part = vec.load32(x + begin * 4 + at)
            exponent = part
            if op[6]:
                exponent = vec.gelu_exponent(part)
            up = vec.load32(x + (width + begin) * 4 + at)
            vec.store32(vec.gated(part, exponent) * up, room + at)
        quantize_part(room, begin, count, bits, out, scales)


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
        rms_norm(x, op[4], heads * dim, eps)
        rms_norm(x + heads * dim * 4, op[5], kv_heads * dim, eps)
    for index in range(heads + kv_heads):
        at = x + index * dim * 4
        weight = op[4] if index < heads else op[5]
        if weight and not op[13]:
            rms_norm(at, weight, dim, eps)
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
