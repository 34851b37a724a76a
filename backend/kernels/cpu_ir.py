"""Vector instructions for the compiled CPU kernels, written as LLVM IR.

A kernel (cpu_compile) is loops and integers; what else it needs is here: loads and stores at bare
addresses, 32-wide vector arithmetic, atomics, and the inner tiles of the matrix products. Addresses
are int64, because a step's description is one flat table of integers (cpu_program).

Vectors are 32 elements long, whatever the machine has: LLVM splits them into registers. So a row's
arithmetic, and the order of its sums, are fixed at compile time and never depend on the batch.

The tiles of the quantised products are in cpu_tiles. Sources: LLVM language reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .cpu_compile import F32, I64, Intrinsic

WIDTH = 32

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
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

    def largest(self, vector: Any) -> Any:
        """Not NaN's business: LLVM's own maximum takes three instructions for its sake."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            low, high = self.slice(vector, 0, half), self.slice(vector, half, half)
            vector = self.b.select(self.b.fcmp_ordered(">", low, high), low, high)
        return self.b.extract_element(vector, ir.Constant(_I32, 0))

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0 or little above, to 3 units in the last place; 0 below -87."""
        length = x.type.count
        wide = x.type
        low = self.b.fcmp_ordered("<", x, self.constant(-87.0, length))
        x = self.b.select(low, self.constant(-87.0, length), x)
        scaled = self.b.fmul(x, self.constant(1.4426950408889634, length))
        n = self.call(f"llvm.rint.v{length}f32", wide, scaled)
        # ln 2 in two parts: the first is exact in few bits, so n times it is too
        r = self.fma(n, self.constant(-0.693359375, length), x)
        r = self.fma(n, self.constant(2.12194440054690583e-4, length), r)
        y = self.constant(1.0 / 720, length)
        for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            y = self.fma(y, r, self.constant(factor, length))
        bits = ir.VectorType(_I32, length)
        exponent = self.b.fptosi(n, bits)
        exponent = self.b.add(exponent, ir.Constant(bits, [127] * length))
        exponent = self.b.shl(exponent, ir.Constant(bits, [23] * length))
        y = self.b.fmul(y, self.b.bitcast(exponent, wide))
        return self.b.select(low, self.constant(0.0, length), y)

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
    """`arguments`: one letter each, i for int64 and f for float32."""
    kinds = tuple(I64 if letter == "i" else F32 for letter in arguments)
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


def _add_squares(e: Emitter, a: list[Any]) -> Any:
    total = e.b.fadd(e.floats(a[0]), e.floats(a[1]))
    e.store(total, a[0])
    return e.total(e.b.fmul(total, total))


def _squares(e: Emitter, a: list[Any]) -> Any:
    x = e.floats(a[0])
    return e.total(e.b.fmul(x, x))


def _scaled(e: Emitter, a: list[Any]) -> None:
    x = e.b.fmul(e.floats(a[0]), e.splat(a[3], WIDTH))
    e.store(e.b.fmul(x, e.floats(a[1])), a[2])


def _times(e: Emitter, a: list[Any]) -> None:
    e.store(e.b.fmul(e.floats(a[0]), e.splat(a[2], WIDTH)), a[1])


def _largest_magnitude(e: Emitter, a: list[Any]) -> Any:
    x = e.floats(a[0])
    return e.largest(e.call("llvm.fabs.v32f32", x.type, x))


def _logistic(e: Emitter, x: Any) -> Any:
    """1 / (1 + e^-x): of e^-|x| both halves follow without overflow."""
    magnitude = e.call(f"llvm.fabs.v{x.type.count}f32", x.type, x)
    one, zero = e.constant(1.0, x.type.count), e.constant(0.0, x.type.count)
    power = e.exp(e.b.fsub(zero, magnitude))
    top = e.b.select(e.b.fcmp_ordered("<", x, zero), power, one)
    return e.b.fdiv(top, e.b.fadd(one, power))


def _silu_product(e: Emitter, a: list[Any]) -> None:
    gate, up = e.floats(a[0]), e.floats(a[1])
    e.store(e.b.fmul(e.b.fmul(gate, _logistic(e, gate)), up), a[2])


def _gelu_product(e: Emitter, a: list[Any]) -> None:
    """GELU's tanh form (Hendrycks and Gimpel, 2016): x (1 + tanh u) / 2 = x / (1 + e^-2u), where
    2u = x (c + c 0.044715 x²) and c = √(8 / π)."""
    gate, up = e.floats(a[0]), e.floats(a[1])
    bent = e.fma(e.b.fmul(gate, gate), e.constant(0.0713548162726), e.constant(1.5957691216057308))
    answer = e.b.fmul(gate, _logistic(e, e.b.fmul(gate, bent)))
    e.store(e.b.fmul(answer, up), a[2])


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


add_squares = _define("ii", _add_squares)  # x += y at (x, y); the sum of x²
squares = _define("i", _squares)
scaled = _define("iiif", _scaled)  # (x, weight, out, factor)
times = _define("iif", _times)  # (x, out, factor)
largest_magnitude = _define("i", _largest_magnitude)
silu_product = _define("iii", _silu_product)  # (gate, up, out)
gelu_product = _define("iii", _gelu_product)
capped = _define("if", lambda e, a: _capped(e, a, WIDTH))  # (32 scores, cap)
capped8 = _define("if", lambda e, a: _capped(e, a, 8))
times8 = _define("if", lambda e, a: e.store(e.b.fmul(e.floats(a[0], 0, 8), e.splat(a[1], 8)), a[0]))
total32 = _define("i", lambda e, a: e.total(e.floats(a[0])))
plus = _define("iif", lambda e, a: e.store(e.b.fadd(e.floats(a[0]), e.splat(a[2], WIDTH)), a[1]))
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


def _rounded(e: Emitter, address: Any, factor: Any) -> Any:
    x = e.b.fmul(e.floats(address), e.splat(factor, WIDTH))
    whole = e.call("llvm.rint.v32f32", x.type, x)
    return e.b.fptosi(whole, ir.VectorType(_I32, WIDTH))


def _quantize8(e: Emitter, a: list[Any]) -> Any:
    whole = _rounded(e, a[0], a[2])
    e.store(e.b.trunc(whole, ir.VectorType(_I8, WIDTH)), a[1], align=1)
    total = e.call("llvm.vector.reduce.add.v32i32", _I32, whole)
    return e.b.sitofp(total, _F32)


def _quantize16(e: Emitter, a: list[Any]) -> None:
    e.store(e.b.trunc(_rounded(e, a[0], a[2]), ir.VectorType(_I16, WIDTH)), a[1], align=2)


quantize8 = _define("iif", _quantize8)  # (x, out, factor); the sum of the integers
quantize16 = _define("iif", _quantize16)


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
