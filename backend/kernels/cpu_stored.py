"""The operation PACK: GGUF's blocks, as they lie in the file, into packed strips. For loading.

    bits 4 or 8   the stored integers with their scales, and offsets, as float16
    bits 0        the weights that they mean, rounded to 8 bit per 32 (cpu_pack.rounded)

Eight rows are a strip, and 32 inputs of them are unpacked at a time: a row's integers become bytes
on the stack, its scales float32. Twins, equal to the bit: models/dequantize.py, and cpu_pack.

Layouts: ggml's block structs (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import cpu_ir as vec
from . import cpu_tiles
from .cpu_compile import F32, I64, Intrinsic, Table, inlined, kernel
from .cpu_ir import Emitter
from .cpu_step import Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_BYTES32, _BYTES16 = ir.VectorType(_I8, 32), ir.VectorType(_I8, 16)
_WORDS16, _INTS8 = ir.VectorType(_I16, 16), ir.VectorType(_I32, 8)
_FLOAT32 = ir.VectorType(ir.FloatType(), 32)

# Of an item's stack: 8 rows of 32 bytes; a row's weights; its factors, which are the scale of the
# first 16, that of the others, and the offset, all float32.
ROW_WEIGHTS, FACTORS = 8 * 32, 8 * 32 + 32 * 4
STACK_BYTES = FACTORS + 16


def _define(arguments: str, build: Callable[[Emitter, list[Any]], Any]) -> Intrinsic:
    kinds = tuple(I64 if letter == "i" else F32 for letter in arguments)
    return Intrinsic(lambda builder, values: build(Emitter(builder), values), kinds)


# ------------------------------------------------------------------------------------ instructions


def _same(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _shifted(e: Emitter, source: Any, shift: Any, mask: int) -> Any:
    """Of 32 bytes: the bits above `shift`, as many as the mask has."""
    amount = e.splat(e.b.trunc(shift, _I8), 32)
    return e.b.and_(e.b.lshr(e.load(source, _BYTES32, align=1), amount), _same(_BYTES32, mask))


def _joined(e: Emitter, address: Any, high: Any) -> None:
    """The 32 bytes there get `high` as their upper bits."""
    e.store(e.b.or_(e.load(address, _BYTES32, align=32), high), address, align=32)


def _nibbles(e: Emitter, a: list[Any]) -> None:
    packed = e.load(a[0], _BYTES16, align=1)
    low, high = e.b.and_(packed, _same(_BYTES16, 15)), e.b.lshr(packed, _same(_BYTES16, 4))
    e.store(low, a[1], align=16)
    e.store(high, a[1], 16, align=16)


def _add_fifth_bits(e: Emitter, a: list[Any]) -> None:
    bits = e.b.bitcast(e.load(a[0], _I32, align=1), ir.VectorType(ir.IntType(1), 32))
    _joined(e, a[1], e.b.select(bits, _same(_BYTES32, 16), _same(_BYTES32, 0)))


def _add_high_bits(e: Emitter, a: list[Any], mask: int) -> None:
    high = _shifted(e, a[0], a[1], mask)
    _joined(e, a[2], e.b.shl(high, _same(_BYTES32, 4)))


def _less(e: Emitter, a: list[Any]) -> None:
    taken = e.splat(e.b.trunc(a[1], _I8), 32)
    e.store(e.b.sub(e.load(a[0], _BYTES32, align=32), taken), a[0], align=32)


def _weights(e: Emitter, a: list[Any]) -> None:
    whole = e.b.sitofp(e.load(a[0], _BYTES32, align=32), _FLOAT32)
    halves = [e.slice(whole, begin, 16) for begin in (0, 16)]
    scales = [e.splat(e.load(a[1], ir.FloatType(), offset), 16) for offset in (0, 4)]
    offset = e.splat(e.load(a[1], ir.FloatType(), 8), 16)
    for index, (half, scale) in enumerate(zip(halves, scales, strict=True)):
        e.store(e.b.fadd(e.b.fmul(half, scale), offset), a[2], 64 * index)


def _rounded(e: Emitter, a: list[Any]) -> None:
    scaled = e.b.fmul(e.floats(a[0]), e.splat(a[2], 32))
    whole = e.call("llvm.rint.v32f32", _FLOAT32, scaled)
    low, high = e.constant(-127.0), e.constant(127.0)
    whole = e.b.select(e.b.fcmp_ordered(">", whole, low), whole, low)
    whole = e.b.select(e.b.fcmp_ordered("<", whole, high), whole, high)
    e.store(e.b.trunc(e.b.fptosi(whole, ir.VectorType(_I32, 32)), _BYTES32), a[1], align=32)


def _interleaved(e: Emitter, rows: list[Any]) -> Any:
    """The first elements of all rows, then the second ones, ...; a power of two of rows."""
    while len(rows) > 1:
        half, count = len(rows) // 2, rows[0].type.count
        order = [index // 2 + index % 2 * count for index in range(2 * count)]
        mask = ir.Constant(ir.VectorType(_I32, 2 * count), order)
        rows = [e.b.shuffle_vector(rows[i], rows[i + half], mask) for i in range(half)]
    return rows[0]


def _write_bytes(e: Emitter, a: list[Any]) -> None:
    pairs = [e.load(a[0], _WORDS16, 32 * row, align=32) for row in range(8)]
    e.store(_interleaved(e, pairs), a[1], align=16)


def _write_nibbles(e: Emitter, a: list[Any]) -> None:
    words = [e.load(a[0], _INTS8, 32 * row, align=32) for row in range(8)]
    undefined = ir.Constant(_INTS8, ir.Undefined)
    half = ir.VectorType(_I32, 4)
    low, high = (ir.Constant(half, list(range(first, 8, 2))) for first in (0, 1))
    joined = [
        e.b.or_(
            e.b.shuffle_vector(word, undefined, low),
            e.b.shl(e.b.shuffle_vector(word, undefined, high), _same(half, 4)),
        )
        for word in words
    ]
    e.store(_interleaved(e, joined), a[1], align=16)


store_half = _define("if", lambda e, a: e.store(e.b.fptrunc(a[1], ir.HalfType()), a[0], align=2))
copy32 = _define("ii", lambda e, a: e.store(e.load(a[0], _BYTES32, align=1), a[1], align=32))
nibbles = _define("ii", _nibbles)  # 16 bytes: the low ones, then the high ones
lower = _define("iii", lambda e, a: e.store(_shifted(e, a[0], a[1], 15), a[2], align=32))
add_fifth_bits = _define("ii", _add_fifth_bits)  # (32 bits, bytes)
add_bit = _define("iii", lambda e, a: _add_high_bits(e, a, 1))  # (32 bytes, shift, bytes)
add_two_bits = _define("iii", lambda e, a: _add_high_bits(e, a, 3))
less = _define("ii", _less)  # 32 bytes, in place
weights = _define("iii", _weights)  # (bytes, factors, out): float32
rounded = _define("iif", _rounded)  # (32 floats, out, factor): bytes of -127..127
write_bytes = _define("ii", _write_bytes)  # 8 rows of 32 as cpu_pack has them
write_nibbles = _define("ii", _write_nibbles)
stack = _define("", lambda e, a: e.local(STACK_BYTES))

# ------------------------------------------------------------------------------------- 32 of a row


@inlined
def set_factors(factors: int, first: float, second: float, offset: float) -> None:
    vec.store_float(factors, first)
    vec.store_float(factors + 4, second)
    vec.store_float(factors + 8, offset)


@inlined
def unpack_plain(row: int, group: int, type: int, quants: int, factors: int) -> None:
    """Blocks of 32: Q8_0, Q5_0, Q4_0, Q4_1."""
    offset = 0.0
    if type == Q8_0:
        block = row + group * 34
        copy32(block + 2, quants)
    elif type == Q5_0:
        block = row + group * 22
        nibbles(block + 6, quants)
        add_fifth_bits(block + 2, quants)
        less(quants, 16)
    elif type == Q4_0:
        block = row + group * 18
        nibbles(block + 2, quants)
        offset = vec.load_half(block) * -8.0
    else:
        block = row + group * 20
        nibbles(block + 4, quants)
        offset = vec.load_half(block + 2)
    scale = vec.load_half(block)
    set_factors(factors, scale, scale, offset)


@inlined
def unpack_k(row: int, group: int, type: int, quants: int, factors: int) -> None:
    """Blocks of 256, whose eight groups have scales and minimums of 6 bits: Q4_K, Q5_K."""
    index = group % 8
    block = row + group // 8 * (144 if type == Q4_K else 176)
    packed = block + 4
    scale, minimum = 0, 0
    if index < 4:
        scale = vec.load_nibbles(packed + index) % 64
        minimum = vec.load_nibbles(packed + 4 + index) % 64
    else:
        both = vec.load_nibbles(packed + 4 + index)
        scale = both % 16 + vec.load_nibbles(packed + index - 4) // 64 * 16
        minimum = both // 16 + vec.load_nibbles(packed + index) // 64 * 16
    low = block + (16 if type == Q4_K else 48) + index // 2 * 32
    lower(low, index % 2 * 4, quants)
    if type == Q5_K:
        add_bit(block + 16, index, quants)
    factor = vec.load_half(block) * float(scale)
    set_factors(factors, factor, factor, -(vec.load_half(block + 2) * float(minimum)))


@inlined
def unpack_q6_k(row: int, group: int, quants: int, factors: int) -> None:
    """Blocks of 256, whose sixteen groups of 16 have scales of 8 bits."""
    block, index = row + group // 8 * 210, group % 8
    lower(block + index // 4 * 64 + index % 2 * 32, index % 4 // 2 * 4, quants)
    add_two_bits(block + 128 + index // 4 * 32, index % 4 * 2, quants)
    less(quants, 32)
    scale, scales = vec.load_half(block + 208), block + 192 + index * 2
    set_factors(factors, scale * vec.load_byte(scales), scale * vec.load_byte(scales + 1), 0.0)


@inlined
def round_weights(x: int, quants: int, scale_at: int) -> None:
    """The bytes of these 32 weights, and their scale."""
    store_half(scale_at, vec.largest_magnitude(x) / 127.0)
    scale = vec.load_half(scale_at)
    rounded(x, quants, 1.0 / scale if scale > 0.0 else 0.0)


# ------------------------------------------------------------------------------------- a strip


@kernel
def pack(strip: int, op: Table) -> None:
    # op: rows of blocks, bytes of a row, groups of 32 in a row, packed strips, type (cpu_step),
    # bits of the integers or 0 to round the weights, sums of scales² and weights² (float32 each,
    # per strip; the latter where weights are rounded)
    type, bits = op[5], op[6]
    size = cpu_tiles.BYTES_4BIT if bits == 4 else cpu_tiles.BYTES_8BIT
    quants = stack()
    x, factors = quants + ROW_WEIGHTS, quants + FACTORS
    scale_squares, weight_squares = 0.0, 0.0
    for group in range(op[3]):
        target = op[4] + (strip * op[3] + group) * size
        for index in range(8):
            row, bytes = op[1] + (strip * 8 + index) * op[2], quants + index * 32
            if type < Q4_K:
                unpack_plain(row, group, type, bytes, factors)
            elif type == Q6_K:
                unpack_q6_k(row, group, bytes, factors)
            else:
                unpack_k(row, group, type, bytes, factors)
            at = target + (128 if bits == 4 else 256) + index * 2
            if bits:
                store_half(at, vec.load_float(factors))
            else:
                weights(bytes, factors, x)
                weight_squares += vec.squares(x)
                round_weights(x, bytes, at)
            if bits == 4:
                store_half(at + 16, vec.load_float(factors + 8))
            scale_squares += vec.load_half(at) * vec.load_half(at)
        if bits == 4:
            write_nibbles(quants, target)
        else:
            write_bytes(quants, target)
    vec.store_float(op[7] + strip * 8, scale_squares)
    vec.store_float(op[7] + strip * 8 + 4, weight_squares)
