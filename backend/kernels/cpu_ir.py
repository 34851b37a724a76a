"""Vector instructions for the compiled CPU kernels, written as LLVM IR.

A kernel (cpu_compile) is loops and integers; what else it needs is here: loads and stores at bare
addresses, functions of 32 floats, atomics, and the inner tiles of the matrix products. Addresses
are int64, because a step's description is one flat table of integers (cpu_program).

Vectors are 32 elements long, whatever the machine has: LLVM splits them into registers. So a row's
arithmetic, and the order of its sums, are fixed at compile time and never depend on the batch.

The tiles of the quantised products are in cpu_tiles. Sources: LLVM language reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .cpu_compile import F32, I64, VECTOR, Intrinsic

WIDTH = 32

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_BYTES32, _WORDS16, _INTS8 = (
    ir.VectorType(kind, count) for kind, count in ((_I8, 32), (_I16, 16), (_I32, 8))
)
# 2^r for |r| <= 1/2, to 1e-7 of it: the polynomial with the smallest largest error (Remez)
_POWERS_OF_2 = (0.0013264726, 0.009671513, 0.055507337, 0.24022242, 0.69314698, 1.0)
_LOG2_E = 1.44269502162933349609375  # a float32, and what is left
_LOG2_E_REST = 1.9259629911e-8
_FAST_SUM = ("reassoc", "nsz")

Build = Callable[["Emitter", list[Any]], Any]


class Emitter:
    """A thin layer over llvmlite's builder: what the bodies below are written with."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def has(self, feature: str) -> bool:
        """The processor that is compiled for has these instructions."""
        return feature in self.b.module.features

    def at(self, address: Any, offset: int, type: Any) -> Any:
        moved = self.b.add(address, ir.Constant(_I64, offset)) if offset else address
        return self.b.inttoptr(moved, type.as_pointer())

    def load(self, address: Any, type: Any, offset: int = 0, align: int = 4) -> Any:
        return self.b.load(self.at(address, offset, type), align=align)

    def store(self, value: Any, address: Any, offset: int = 0, align: int = 4) -> None:
        self.b.store(value, self.at(address, offset, value.type), align=align)

    def call(self, name: str, result: Any, *args: Any, fast: tuple[str, ...] = ()) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.b.call(function, args, fastmath=fast)

    def prefetch(self, address: Any, offset: int = 0) -> None:
        read, near, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        self.call(
            "llvm.prefetch.p0", ir.VoidType(), self.at(address, offset, _I8), read, near, data
        )

    def local(self, size: int) -> Any:
        """The address of so many bytes of the function's own."""
        block = self.b.function.entry_basic_block
        cell = ir.IRBuilder(block).alloca(ir.ArrayType(_I8, size))
        cell.align = 32
        return self.b.ptrtoint(cell, _I64)

    def splat(self, value: Any, length: int) -> Any:
        kind = ir.VectorType(value.type, length)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, length), [0] * length)
        return self.b.shuffle_vector(first, undefined, mask)

    def constant(self, value: float, length: int = WIDTH) -> Any:
        return ir.Constant(ir.VectorType(_F32, length), [value] * length)

    def floats(self, address: Any, offset: int = 0, length: int = WIDTH) -> Any:
        return self.load(address, ir.VectorType(_F32, length), offset)

    def rows(self, address: Any, stride: Any, count: int) -> list[Any]:
        """The addresses of `count` rows."""
        return [
            self.b.add(address, self.b.mul(stride, ir.Constant(_I64, row))) for row in range(count)
        ]

    def slice(self, vector: Any, begin: int, length: int) -> Any:
        """Some of the elements, one after another."""
        mask = ir.Constant(ir.VectorType(_I32, length), list(range(begin, begin + length)))
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        length = a.type.count
        return self.call(f"llvm.fma.v{length}f32", a.type, a, b, c)

    def total(self, vector: Any) -> Any:
        zero = ir.Constant(_F32, 0.0)
        name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
        return self.call(name, _F32, zero, vector, fast=_FAST_SUM)

    def larger(self, x: Any, y: Any) -> Any:
        """Not NaN's business: LLVM's own maximum takes three instructions for its sake."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def largest(self, vector: Any) -> Any:
        return self.b.extract_element(self.halved(vector, self.larger), ir.Constant(_I32, 0))

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0 or little above, to 3 units in the last place; 0 below -87."""
        length = x.type.count
        low = self.b.fcmp_ordered("<", x, self.constant(-87.0, length))
        power = self.power(self.b.select(low, self.constant(-87.0, length), x))
        return self.b.select(low, self.constant(0.0, length), power)

    def power(self, x: Any) -> Any:
        """e^x for |x| <= 87; NaN of NaN."""
        length = x.type.count
        # The sum has no bits for fractions, so it is rounded: what was added, and n = x / ln 2. Its
        # lowest bits are n + 127, the exponent of 2^n.
        large = self.constant(1.5 * 2.0**23 + 127, length)
        factor = self.constant(_LOG2_E, length)
        sum = self.fma(x, factor, large)
        n = self.b.fsub(sum, large)
        r = self.fma(x, factor, self.b.fneg(n))  # -1/2 ... 1/2
        r = self.fma(x, self.constant(_LOG2_E_REST, length), r)
        y = self.constant(_POWERS_OF_2[0], length)
        for term in _POWERS_OF_2[1:]:
            y = self.fma(y, r, self.constant(term, length))
        bits = ir.VectorType(_I32, length)
        exponent = self.b.shl(self.b.bitcast(sum, bits), ir.Constant(bits, [23] * length))
        return self.b.fmul(y, self.b.bitcast(exponent, x.type))

    def halved(self, x: Any, join: Callable[[Any, Any], Any], length: int = 1) -> Any:
        """The vector's halves joined, and theirs, until so few elements are left."""
        while x.type.count > length:
            half = x.type.count // 2
            x = join(self.slice(x, 0, half), self.slice(x, half, half))
        return x

    def to_bfloat16(self, x: Any) -> Any:
        """float32 vector to the upper 16 bits, rounded to nearest even."""
        length = x.type.count
        kind = ir.VectorType(_I32, length)
        bits = self.b.bitcast(x, kind)
        odd = self.b.and_(
            self.b.lshr(bits, ir.Constant(kind, [16] * length)), ir.Constant(kind, [1] * length)
        )
        rounded = self.b.add(self.b.add(bits, odd), ir.Constant(kind, [0x7FFF] * length))
        upper = self.b.lshr(rounded, ir.Constant(kind, [16] * length))
        return self.b.trunc(upper, ir.VectorType(_I16, length))

    def from_bfloat16(self, halves: Any) -> Any:
        length = halves.type.count
        kind = ir.VectorType(_I32, length)
        wide = self.b.zext(halves, kind)
        shifted = self.b.shl(wide, ir.Constant(kind, [16] * length))
        return self.b.bitcast(shifted, ir.VectorType(_F32, length))


def _define(arguments: str, build: Build) -> Intrinsic:
    """`arguments`: one letter each, i for int64, f for float32, v for 32 of them."""
    kinds = tuple({"i": I64, "f": F32, "v": VECTOR}[letter] for letter in arguments)
    return Intrinsic(lambda builder, values: build(Emitter(builder), values), kinds)


# ------------------------------------------------------------------------------ memory and threads

load_int = _define("i", lambda e, a: e.load(a[0], _I64, align=8))
store_int = _define("ii", lambda e, a: e.store(a[1], a[0], align=8))
load_float = _define("i", lambda e, a: e.load(a[0], _F32))
copy_pair = _define("ii", lambda e, a: e.store(e.load(a[0], _I16, align=2), a[1], align=2))
load_byte = _define("i", lambda e, a: e.b.sitofp(e.load(a[0], _I8, align=1), _F32))
load_nibbles = _define("i", lambda e, a: e.b.zext(e.load(a[0], _I8, align=1), _I64))
load_half = _define("i", lambda e, a: e.b.fpext(e.load(a[0], _F16, align=2), _F32))


def _load_bfloat(e: Emitter, a: list[Any]) -> Any:
    wide = e.b.zext(e.load(a[0], _I16, align=2), _I32)
    return e.b.bitcast(e.b.shl(wide, ir.Constant(_I32, 16)), _F32)


load_bfloat = _define("i", _load_bfloat)
store_float = _define("if", lambda e, a: e.store(a[1], a[0]))
bits_to_float = _define("i", lambda e, a: e.b.bitcast(e.b.trunc(a[0], _I32), _F32))
fetch_add = _define("ii", lambda e, a: e.b.atomic_rmw("add", e.at(a[0], 0, _I64), a[1], "seq_cst"))
load_atomic = _define("i", lambda e, a: e.b.load_atomic(e.at(a[0], 0, _I64), "seq_cst", 8))


def _pause(e: Emitter, a: list[Any]) -> None:
    e.call("llvm.x86.sse2.pause", ir.VoidType())


def _yield_thread(e: Emitter, a: list[Any]) -> None:
    e.call("sched_yield", _I32)


pause = _define("", _pause)
cycles = _define("", lambda e, a: e.call("llvm.readcyclecounter", _I64))
yield_thread = _define("", _yield_thread)


# --------------------------------------------------------------------------- 32 floats at a time


def _times(e: Emitter, a: list[Any]) -> None:
    e.store(e.b.fmul(e.floats(a[0]), e.splat(a[2], WIDTH)), a[1])


def _squares(e: Emitter, a: list[Any]) -> Any:
    x = e.floats(a[0])
    return e.total(e.b.fmul(x, x))


def _largest_magnitude(e: Emitter, a: list[Any]) -> Any:
    x = e.floats(a[0])
    return e.largest(e.call("llvm.fabs.v32f32", x.type, x))


def _gated(e: Emitter, a: list[Any]) -> Any:
    x, z = a
    low, high = e.constant(-87.0), e.constant(87.0)
    bounded = e.b.select(e.b.fcmp_ordered(">", low, z), low, z)  # NaN stays
    bounded = e.b.select(e.b.fcmp_ordered("<", high, bounded), high, bounded)
    return e.b.fdiv(x, e.b.fadd(e.constant(1.0), e.power(e.b.fneg(bounded))))


def _gelu_exponent(e: Emitter, a: list[Any]) -> Any:
    """2u of GELU's tanh form (Hendrycks and Gimpel, 2016): x (1 + tanh u) / 2 = x / (1 + e^-2u),
    where 2u = x (c + c 0.044715 x²) and c = √(8 / π)."""
    (x,) = a
    bent = e.fma(e.b.fmul(x, x), e.constant(0.0713548162726), e.constant(1.5957691216057308))
    return e.b.fmul(x, bent)


def _capped(e: Emitter, a: list[Any], length: int) -> None:
    """cap · tanh(x / cap) in place: tanh |y| = (1 - p) / (1 + p), p = e^-2|y|."""
    x, limit = e.floats(a[0], 0, length), e.splat(a[1], length)
    one, zero = e.constant(1.0, length), e.constant(0.0, length)
    name = f"llvm.fabs.v{length}f32"
    double = e.b.fmul(e.call(name, x.type, x), e.b.fdiv(e.constant(-2.0, length), limit))
    power = e.exp(double)
    top = e.b.fmul(limit, e.b.fdiv(e.b.fsub(one, power), e.b.fadd(one, power)))
    below = e.b.fcmp_ordered("<", x, zero)
    capped = e.b.select(below, e.b.fsub(zero, top), top)
    # what is not a number stays so
    e.store(e.b.select(e.b.fcmp_unordered("uno", x, x), x, capped), a[0])


def _narrow(e: Emitter, a: list[Any]) -> None:
    e.store(e.to_bfloat16(e.floats(a[0])), a[1], align=2)


def _widen(e: Emitter, a: list[Any]) -> None:
    """What lies `ahead` of it will be widened next, and is fetched."""
    e.prefetch(e.b.add(a[0], a[2]))
    halves = e.load(a[0], ir.VectorType(_I16, WIDTH), align=2)
    e.store(e.from_bfloat16(halves), a[1])


def _zero(e: Emitter, a: list[Any]) -> None:
    e.store(e.constant(0.0), a[0])


def _blend(e: Emitter, a: list[Any]) -> None:
    x = e.b.fmul(e.floats(a[0], 0, 8), e.splat(a[2], 8))
    e.store(e.fma(e.floats(a[1], 0, 8), e.splat(a[3], 8), x), a[0])


load32 = _define("i", lambda e, a: e.floats(a[0]))
store32 = _define("vi", lambda e, a: e.store(a[0], a[1]))
splat = _define("f", lambda e, a: e.splat(a[0], WIDTH))
fma = _define("vvv", lambda e, a: e.fma(*a))  # x · y + z
total = _define("v", lambda e, a: e.total(a[0]))
gated = _define("vv", _gated)  # x / (1 + e^-z) of (x, z)
gelu_exponent = _define("v", _gelu_exponent)
squares = _define("i", _squares)
largest_magnitude = _define("i", _largest_magnitude)
times = _define("iif", _times)  # (x, out, factor)
capped = _define("if", lambda e, a: _capped(e, a, WIDTH))  # (32 scores, cap)
capped8 = _define("if", lambda e, a: _capped(e, a, 8))
times8 = _define("if", lambda e, a: e.store(e.b.fmul(e.floats(a[0], 0, 8), e.splat(a[1], 8)), a[0]))
narrow = _define("ii", _narrow)  # float32 to bfloat16
widen = _define("iii", _widen)  # (bfloat16, float32, ahead)
zero = _define("i", _zero)
zero8 = _define("i", lambda e, a: e.store(e.constant(0.0, 8), a[0]))
blend8 = _define("iiff", _blend)  # 8 floats at (x, y, f, g): x = x · f + y · g


def _rotated(e: Emitter, a: list[Any]) -> None:
    """8 pairs: (first, second, cos, sin), in place."""
    first, second, cos, sin = (e.floats(address, 0, 8) for address in a)
    e.store(e.b.fsub(e.b.fmul(first, cos), e.b.fmul(second, sin)), a[0])
    e.store(e.b.fadd(e.b.fmul(second, cos), e.b.fmul(first, sin)), a[1])


def _rotated_pairs(e: Emitter, a: list[Any]) -> None:
    """8 pairs of neighbours: (16 floats, cos, sin), in place."""
    x = e.floats(a[0], 0, 16)
    cos, sin = e.floats(a[1], 0, 8), e.floats(a[2], 0, 8)
    undefined = ir.Constant(x.type, ir.Undefined)

    def picked(first: Any, second: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
        return e.b.shuffle_vector(first, second, mask)

    left = picked(x, undefined, list(range(0, 16, 2)))
    right = picked(x, undefined, list(range(1, 16, 2)))
    low = e.b.fsub(e.b.fmul(left, cos), e.b.fmul(right, sin))
    high = e.b.fadd(e.b.fmul(right, cos), e.b.fmul(left, sin))
    e.store(picked(low, high, [place for lane in range(8) for place in (lane, 8 + lane)]), a[0])


rotated = _define("iiii", _rotated)
rotated_pairs = _define("iii", _rotated_pairs)


def _scatter(e: Emitter, a: list[Any]) -> None:
    """8 floats to bfloat16 at (source, destination, stride in bytes)."""
    halves = e.to_bfloat16(e.floats(a[0], 0, 8))
    address = a[1]
    for lane in range(8):
        value = e.b.extract_element(halves, ir.Constant(_I32, lane))
        e.store(value, address, align=2)
        address = e.b.add(address, a[2])


scatter = _define("iii", _scatter)


# -------------------------------------------------------------------------------- quantised rows


def _chosen(e: Emitter, x: Any, y: Any, places: list[int]) -> Any:
    """Elements of x, and of y behind it."""
    return e.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _joined(e: Emitter, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """What the elements of a vector of 8 come to, for one vector or for four at once."""
    if len(vectors) == 1:
        return e.halved(vectors[0], join)
    evens, odds = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    first, second = (
        join(_chosen(e, x, y, evens), _chosen(e, x, y, odds)) for x, y in (vectors[:2], vectors[2:])
    )
    evens, odds = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    return e.halved(
        join(_chosen(e, first, second, evens), _chosen(e, first, second, odds)), join, 4
    )


def _peak(e: Emitter, x: Any, block: int) -> Any:
    """The largest magnitudes of 32, as 8."""
    parts = [e.floats(x, 128 * block + at, 8) for at in range(0, 128, 32)]
    sizes = [e.call("llvm.fabs.v8f32", part.type, part) for part in parts]
    return e.larger(e.larger(sizes[0], sizes[1]), e.larger(sizes[2], sizes[3]))


def _quantized(bits: int, num_blocks: int) -> Intrinsic:
    """Blocks of 32 floats to int8 or int16, and (scale, scaled sum) of each; (x, out, scales).

    1 or 4 blocks, whose bits are the same: the steps between the peak and the first product wait
    for each other, and 4 go through them together.
    """
    limit = 127.0 if bits == 8 else 32767.0

    def build(e: Emitter, a: list[Any]) -> None:
        x, out, scales = a
        peaks = _joined(e, [_peak(e, x, block) for block in range(num_blocks)], e.larger)
        most = e.constant(limit, num_blocks)
        scale, factor = e.b.fdiv(peaks, most), e.b.fdiv(most, peaks)
        is_tiny = e.b.fcmp_ordered("<=", peaks, e.constant(1e-30, num_blocks))
        factor = e.b.select(is_tiny, e.constant(0.0, num_blocks), factor)
        sums = []
        for block in range(num_blocks):
            mine = e.splat(e.b.extract_element(factor, ir.Constant(_I32, block)), 8)
            parts = [e.floats(x, 128 * block + at, 8) for at in range(0, 128, 32)]
            # to the nearest even, in one instruction
            name = "llvm.x86.avx.cvt.ps2dq.256"
            ints = [e.call(name, _INTS8, e.b.fmul(part, mine)) for part in parts]
            _pack(e, ints, bits, e.b.add(out, ir.Constant(_I64, 4 * bits * block)))
            sums.append(e.b.add(e.b.add(ints[0], ints[1]), e.b.add(ints[2], ints[3])))
        total = _joined(e, sums, e.b.add)
        scaled = e.b.fmul(scale, e.b.sitofp(total, scale.type))
        places = [at for block in range(num_blocks) for at in (block, num_blocks + block)]
        e.store(_chosen(e, scale, scaled, places), scales)

    return _define("iii", build)


def _pack(e: Emitter, ints: list[Any], bits: int, out: Any) -> None:
    """32 int32 in four vectors become int8 or int16. The instructions pack each half of a register
    for itself: first comes the first half of every vector."""
    words = [e.call("llvm.x86.avx2.packssdw", _WORDS16, ints[at], ints[at + 1]) for at in (0, 2)]
    if bits == 8:
        bytes = e.b.bitcast(e.call("llvm.x86.avx2.packsswb", _BYTES32, *words), _INTS8)
        e.store(_chosen(e, bytes, bytes, [0, 4, 1, 5, 2, 6, 3, 7]), out, align=1)
        return
    for index, half in enumerate(words):
        pairs = e.b.bitcast(half, ir.VectorType(_I64, 4))
        e.store(_chosen(e, pairs, pairs, [0, 2, 1, 3]), out, 32 * index, align=2)


quantize8, quantize8_four = _quantized(8, 1), _quantized(8, 4)
quantize16, quantize16_four = _quantized(16, 1), _quantized(16, 4)
room = _define("", lambda e, a: e.local(4 * 4 * WIDTH))  # of a function's own, for 4 blocks


# ----------------------------------------------------------------------------------- softmax row


def _hide(e: Emitter, a: list[Any]) -> None:
    """(32 scores, first visible, end of visible): the others become -inf."""
    scores, begin, end = a
    index = ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH)))
    after = e.b.icmp_signed(">=", index, e.splat(e.b.trunc(begin, _I32), WIDTH))
    before = e.b.icmp_signed("<", index, e.splat(e.b.trunc(end, _I32), WIDTH))
    hidden = e.constant(float("-inf"))
    e.store(e.b.select(e.b.and_(after, before), e.floats(scores), hidden), scores)


def _weights(e: Emitter, a: list[Any]) -> None:
    """(32 scores, 8 running sums, peak, shrink): scores become weights, sums shrink and grow."""
    scores, sums, peak, shrink = a
    weights = e.exp(e.b.fsub(e.floats(scores), e.splat(peak, WIDTH)))
    e.store(weights, scores)
    parts = [e.slice(weights, 8 * part, 8) for part in range(4)]
    added = e.b.fadd(e.b.fadd(parts[0], parts[1]), e.b.fadd(parts[2], parts[3]))
    e.store(e.fma(e.floats(sums, 0, 8), e.splat(shrink, 8), added), sums)


def _exp(e: Emitter, a: list[Any]) -> Any:
    return e.b.extract_element(e.exp(e.splat(a[0], 8)), ir.Constant(_I32, 0))


peak = _define("i", lambda e, a: e.largest(e.floats(a[0])))
hide = _define("iii", _hide)
weights = _define("iiff", _weights)
exp = _define("f", _exp)
total8 = _define("i", lambda e, a: e.total(e.floats(a[0], 0, 8)))
sqrt = _define("f", lambda e, a: e.call("llvm.sqrt.f32", _F32, a[0]))


# ---------------------------------------------------------------------------------------- sampling


def _are_numbers(e: Emitter, a: list[Any]) -> Any:
    x = e.floats(a[0])
    same = e.b.fcmp_ordered("==", x, x)
    return e.b.zext(e.call("llvm.vector.reduce.and.v32i1", ir.IntType(1), same), _I64)


def _mix(e: Emitter, a: list[Any]) -> Any:
    """The finaliser of splitmix64, as in runner/sampler.py."""

    def folded(value: Any, shift: int) -> Any:
        return e.b.xor(value, e.b.lshr(value, ir.Constant(_I64, shift)))

    value = e.b.add(a[0], ir.Constant(_I64, 0x9E3779B97F4A7C15))
    value = e.b.mul(folded(value, 30), ir.Constant(_I64, 0xBF58476D1CE4E5B9))
    value = e.b.mul(folded(value, 27), ir.Constant(_I64, 0x94D049BB133111EB))
    return folded(value, 31)


def _leading_zeros(e: Emitter, value: Any) -> Any:
    """Of the upper 53 bits, which are what becomes a number."""
    ends = e.b.or_(value, ir.Constant(_I64, 1 << 10))
    return e.call("llvm.ctlz.i64", _I64, ends, ir.Constant(ir.IntType(1), 0))


are_numbers = _define("i", _are_numbers)  # 1 if none of 32 is NaN
mix = _define("i", _mix)
leading_zeros = _define("i", lambda e, a: _leading_zeros(e, a[0]))
leading_ones = _define("i", lambda e, a: _leading_zeros(e, e.b.not_(a[0])))


# --------------------------------------------------------------------------------- float products


class Loop:
    """for step in range(count), with values carried from turn to turn; count >= 1."""

    def __init__(self, e: Emitter, count: Any, carried: list[Any]) -> None:
        builder = e.b
        self._builder, self._count = builder, count
        before = builder.block
        self._head = builder.append_basic_block("turn")
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.step = builder.phi(_I64)
        self.step.add_incoming(ir.Constant(_I64, 0), before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)

    def end(self, values: list[Any]) -> None:
        builder = self._builder
        step = builder.add(self.step, ir.Constant(_I64, 1))
        self.step.add_incoming(step, builder.block)
        for phi, value in zip(self.carried, values, strict=True):
            phi.add_incoming(value, builder.block)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", step, self._count), self._head, done)
        builder.position_at_end(done)


def float_tile(num_rows: int, is_narrow: bool, adds: bool) -> Intrinsic:
    """C = A · B for 32 columns: (A, lda, B, ldb, C, ldc, depth, factors, ahead), strides in bytes.

    A [num_rows, depth] float32, B [depth, 32] bfloat16 if `is_narrow` else float32. With `adds`,
    the old C, times a factor for each row, is where the sums begin. As a row of B is read, the line
    that lies `ahead` of it is fetched: one by one, as a burst of fetches would block all loads.
    """

    def build(e: Emitter, args: list[Any]) -> None:
        a, lda, b, ldb, c, ldc, depth, factors, ahead = args
        a_rows, c_rows = e.rows(a, lda, num_rows), e.rows(c, ldc, num_rows)
        start = [e.constant(0.0, 8)] * (4 * num_rows)
        if adds:
            start = []
            for index, row in enumerate(c_rows):
                factor = e.splat(e.load(factors, _F32, 4 * index), 8)
                start += [e.b.fmul(e.floats(row, 32 * j, 8), factor) for j in range(4)]
        loop = Loop(e, depth, start)
        b_row = e.b.add(b, e.b.mul(loop.step, ldb))
        offset = e.b.mul(loop.step, ir.Constant(_I64, 4))
        if is_narrow:
            e.prefetch(e.b.add(b_row, ahead))
        # in this order: twelve sums, three inputs and one column are AVX2's sixteen registers
        inputs = [e.splat(e.load(e.b.add(row, offset), _F32), 8) for row in a_rows]
        values: list[Any] = [None] * (4 * num_rows)
        for j in range(4):
            if is_narrow:
                halves = e.load(b_row, ir.VectorType(_I16, 8), 16 * j, align=2)
                column = e.from_bfloat16(halves)
            else:
                column = e.floats(b_row, 32 * j, 8)
            for index, x in enumerate(inputs):
                at = index * 4 + j
                values[at] = e.fma(x, column, loop.carried[at])
        loop.end(values)
        for index, row in enumerate(c_rows):
            for j in range(4):
                e.store(values[index * 4 + j], row, 32 * j)

    return _define("iiiiiiiii", build)
