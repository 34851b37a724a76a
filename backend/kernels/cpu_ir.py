"""Vector instructions for the compiled CPU kernels, written as LLVM IR through numba.

numba compiles loops; what a loop needs and Python cannot say is here: loads and stores at bare
addresses, 32-wide vector arithmetic, atomics, and the inner tiles of the matrix products. Addresses
are int64, because a step's description is one flat table of integers (cpu_program).

Vectors are 32 elements long, whatever the machine has: LLVM splits them into registers. So a row's
arithmetic, and the order of its sums, are fixed at compile time and never depend on the batch.

The weight tiles use AVX2's `vpmaddubsw` and `vpmaddwd`. Sources: Intel's intrinsics guide, LLVM
language reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 32

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_FAST_SUM = ("reassoc", "nsz")
_FUSED = ("contract", "nsz")

_int, _float, _void = types.int64, types.float32, types.void

Build = Callable[["Emitter", list[Any]], Any]


class Emitter:
    """A thin layer over llvmlite's builder: what the bodies below are written with."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: int, type: Any) -> Any:
        moved = self.b.add(address, ir.Constant(_I64, offset)) if offset else address
        return self.b.inttoptr(moved, type.as_pointer())

    def load(self, address: Any, type: Any, offset: int = 0, align: int = 4) -> Any:
        return self.b.load(self.at(address, offset, type), align=align)

    def store(self, value: Any, address: Any, offset: int = 0, align: int = 4) -> None:
        self.b.store(value, self.at(address, offset, value.type), align=align)

    def call(self, name: str, result: Any, *args: Any, fast: tuple[str, ...] = ()) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, args, fastmath=fast)

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

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        length = a.type.count
        return self.call(f"llvm.fma.v{length}f32", a.type, a, b, c)

    def total(self, vector: Any) -> Any:
        zero = ir.Constant(_F32, 0.0)
        name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
        return self.call(name, _F32, zero, vector, fast=_FAST_SUM)

    def largest(self, vector: Any) -> Any:
        return self.call(f"llvm.vector.reduce.fmax.v{vector.type.count}f32", _F32, vector)

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0 or little above, to 2 units in the last place; 0 below -87."""
        length = x.type.count
        wide = x.type
        low = self.b.fcmp_ordered("<", x, self.constant(-87.0, length))
        x = self.b.select(low, self.constant(-87.0, length), x)
        scaled = self.b.fmul(x, self.constant(1.4426950408889634, length))
        n = self.call(f"llvm.rint.v{length}f32", wide, scaled)
        # ln 2 in two parts: the first is exact in few bits, so n times it is too
        r = self.fma(n, self.constant(-0.693359375, length), x)
        r = self.fma(n, self.constant(2.12194440054690583e-4, length), r)
        y = self.constant(1.0 / 5040, length)
        for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
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


def _define(result: Any, arguments: str, build: Build) -> Any:
    """A numba intrinsic. `arguments`: one letter each, i for int64 and f for float32."""
    kinds = [_int if letter == "i" else _float for letter in arguments]

    def body(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = build(Emitter(builder), list(args))
        return context.get_dummy_value() if value is None else value

    names = [f"a{index}" for index in range(len(kinds))]
    scope: dict[str, Any] = {"result": result, "kinds": kinds, "body": body}
    # numba reads the number of arguments off the signature, so the function must really have them
    source = f"def typed(context, {', '.join(names)}):\n    return result(*kinds), body"
    exec(source, scope)
    return intrinsic(scope["typed"])


# ------------------------------------------------------------------------------ memory and threads

load_int = _define(_int, "i", lambda e, a: e.load(a[0], _I64, align=8))
store_int = _define(_void, "ii", lambda e, a: e.store(a[1], a[0], align=8))
load_float = _define(_float, "i", lambda e, a: e.load(a[0], _F32))
store_float = _define(_void, "if", lambda e, a: e.store(a[1], a[0]))
bits_to_float = _define(_float, "i", lambda e, a: e.b.bitcast(e.b.trunc(a[0], _I32), _F32))
fetch_add = _define(
    _int, "ii", lambda e, a: e.b.atomic_rmw("add", e.at(a[0], 0, _I64), a[1], "seq_cst")
)
load_atomic = _define(_int, "i", lambda e, a: e.b.load_atomic(e.at(a[0], 0, _I64), "seq_cst", 8))


@intrinsic
def _int_pointer(context: Any, address: Any) -> Any:
    def body(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _I64.as_pointer())

    return types.CPointer(_int)(_int), body


@njit(inline="always")
def int_array(address, length):
    """The int64 values that lie there, as an array."""
    return carray(_int_pointer(address), length)


def _pause(e: Emitter, a: list[Any]) -> None:
    e.call("llvm.x86.sse2.pause", ir.VoidType())


def _yield_thread(e: Emitter, a: list[Any]) -> None:
    e.call("sched_yield", _I32)


pause = _define(_void, "", _pause)
yield_thread = _define(_void, "", _yield_thread)


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


def _silu_product(e: Emitter, a: list[Any]) -> None:
    gate, up = e.floats(a[0]), e.floats(a[1])
    magnitude = e.call("llvm.fabs.v32f32", gate.type, gate)
    # of e^-|x| both halves of the logistic function follow without overflow
    power = e.exp(e.b.fsub(e.constant(0.0), magnitude))
    below = e.b.fcmp_ordered("<", gate, e.constant(0.0))
    top = e.b.select(below, power, e.constant(1.0))
    logistic = e.b.fdiv(top, e.b.fadd(e.constant(1.0), power))
    e.store(e.b.fmul(e.b.fmul(gate, logistic), up), a[2])


def _narrow(e: Emitter, a: list[Any]) -> None:
    e.store(e.to_bfloat16(e.floats(a[0])), a[1], align=2)


def _widen(e: Emitter, a: list[Any]) -> None:
    halves = e.load(a[0], ir.VectorType(_I16, WIDTH), align=2)
    e.store(e.from_bfloat16(halves), a[1])


def _zero(e: Emitter, a: list[Any]) -> None:
    e.store(e.constant(0.0), a[0])


add_squares = _define(_float, "ii", _add_squares)  # x += y at (x, y); the sum of x²
squares = _define(_float, "i", _squares)
scaled = _define(_void, "iiif", _scaled)  # (x, weight, out, factor)
times = _define(_void, "iif", _times)  # (x, out, factor)
largest_magnitude = _define(_float, "i", _largest_magnitude)
silu_product = _define(_void, "iii", _silu_product)  # (gate, up, out)
narrow = _define(_void, "ii", _narrow)  # float32 to bfloat16
widen = _define(_void, "ii", _widen)  # bfloat16 to float32
zero = _define(_void, "i", _zero)


def _rotated(e: Emitter, a: list[Any]) -> None:
    """8 pairs: (first, second, cos, sin), in place."""
    first, second, cos, sin = (e.floats(address, 0, 8) for address in a)
    e.store(e.b.fsub(e.b.fmul(first, cos), e.b.fmul(second, sin)), a[0])
    e.store(e.b.fadd(e.b.fmul(second, cos), e.b.fmul(first, sin)), a[1])


rotated = _define(_void, "iiii", _rotated)


def _scatter(e: Emitter, a: list[Any]) -> None:
    """8 floats to bfloat16 at (source, destination, stride in bytes)."""
    halves = e.to_bfloat16(e.floats(a[0], 0, 8))
    address = a[1]
    for lane in range(8):
        value = e.b.extract_element(halves, ir.Constant(_I32, lane))
        e.store(value, address, align=2)
        address = e.b.add(address, a[2])


scatter = _define(_void, "iii", _scatter)


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


quantize8 = _define(_float, "iif", _quantize8)  # (x, out, factor); the sum of the integers
quantize16 = _define(_void, "iif", _quantize16)


# ----------------------------------------------------------------------------------- softmax row


def _softmax_block(e: Emitter, a: list[Any]) -> Any:
    """One row of 32 scores joins a running softmax; scores become weights.

    (scores, first visible, end of visible, running max, running sum): returns the factor by which
    what was summed up before must shrink.
    """
    scores, begin, end, peak_at, sum_at = a
    index = ir.Constant(ir.VectorType(_I64, WIDTH), list(range(WIDTH)))
    after = e.b.icmp_signed(">=", index, e.splat(begin, WIDTH))
    before = e.b.icmp_signed("<", index, e.splat(end, WIDTH))
    seen = e.b.and_(after, before)
    x = e.b.select(seen, e.floats(scores), e.constant(float("-inf")))
    old = e.load(peak_at, _F32)
    here = e.largest(x)
    peak = e.b.select(e.b.fcmp_ordered(">", here, old), here, old)
    weights = e.exp(e.b.fsub(x, e.splat(peak, WIDTH)))
    e.store(weights, scores)
    change = e.splat(e.b.fsub(old, peak), 8)
    shrink = e.b.extract_element(e.exp(change), ir.Constant(_I32, 0))
    total = e.b.fadd(e.b.fmul(e.load(sum_at, _F32), shrink), e.total(weights))
    e.store(total, sum_at)
    e.store(peak, peak_at)
    return shrink


softmax_block = _define(_float, "iiiii", _softmax_block)


# ----------------------------------------------------------------------------------------- tiles


class _Loop:
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


def _rows(e: Emitter, address: Any, stride: Any, count: int) -> list[Any]:
    return [e.b.add(address, e.b.mul(stride, ir.Constant(_I64, row))) for row in range(count)]


def float_tile(num_rows: int, num_vectors: int) -> Any:
    """C += A · B in float32: (A, lda, B, ldb, C, ldc, depth), strides in bytes.

    A [num_rows, depth], B [depth, 8 · num_vectors], C [num_rows, 8 · num_vectors].
    """

    def build(e: Emitter, args: list[Any]) -> None:
        a, lda, b, ldb, c, ldc, depth = args
        a_rows, c_rows = _rows(e, a, lda, num_rows), _rows(e, c, ldc, num_rows)
        start = [e.floats(row, 32 * j, 8) for row in c_rows for j in range(num_vectors)]
        loop = _Loop(e, depth, start)
        b_row = e.b.add(b, e.b.mul(loop.step, ldb))
        offset = e.b.mul(loop.step, ir.Constant(_I64, 4))
        columns = [e.floats(b_row, 32 * j, 8) for j in range(num_vectors)]
        values = []
        for index, row in enumerate(a_rows):
            x = e.splat(e.load(e.b.add(row, offset), _F32), 8)
            for j, column in enumerate(columns):
                values.append(e.fma(x, column, loop.carried[index * num_vectors + j]))
        loop.end(values)
        for index, row in enumerate(c_rows):
            for j in range(num_vectors):
                e.store(values[index * num_vectors + j], row, 32 * j)

    return _define(_void, "iiiiiii", build)


BYTES_4BIT = 128 + 32  # of 8 outputs · 32 inputs: nibbles, 8 scales, 8 offsets
BYTES_8BIT = 256 + 16  # ... : bytes, 8 scales


def tile_4bit(num_rows: int) -> Any:
    """C = X · Wᵀ for 8 outputs of 4-bit weights: (X, ldx, S, lds, W, C, ldc, num_blocks).

    X int8 rows with, in S, scale and scaled sum of each 32; layout of W: cpu_pack.
    """
    bytes32, words16 = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)
    ints8, half8, float8 = (ir.VectorType(t, 8) for t in (_I32, _F16, _F32))

    def build(e: Emitter, args: list[Any]) -> None:
        x, ldx, s, lds, w, c, ldc, num_blocks = args
        x_rows, s_rows = _rows(e, x, ldx, num_rows), _rows(e, s, lds, num_rows)
        loop = _Loop(e, num_blocks, [e.constant(0.0, 8)] * num_rows)
        block = e.b.add(w, e.b.mul(loop.step, ir.Constant(_I64, BYTES_4BIT)))
        x_at = e.b.mul(loop.step, ir.Constant(_I64, 32))
        s_at = e.b.mul(loop.step, ir.Constant(_I64, 8))
        sums: list[Any] = [None] * num_rows
        low_mask = ir.Constant(bytes32, [15] * 32)
        four = ir.Constant(words16, [4] * 16)
        x_rows = [e.b.add(row, x_at) for row in x_rows]
        for quarter in range(4):
            packed = e.load(block, bytes32, 32 * quarter, align=32)
            shifted = e.b.bitcast(e.b.lshr(e.b.bitcast(packed, words16), four), bytes32)
            for half, weights in enumerate((packed, shifted)):
                weights = e.b.and_(weights, low_mask)
                for index, row in enumerate(x_rows):
                    four_inputs = e.load(row, _I32, 8 * quarter + 4 * half)
                    inputs = e.b.bitcast(e.splat(four_inputs, 8), bytes32)
                    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", words16, weights, inputs)
                    # 8 · 2 · 15 · 127 < 2^15: eight of them fit before they must be widened
                    sums[index] = pairs if sums[index] is None else e.b.add(sums[index], pairs)
        scale = e.b.fpext(e.load(block, half8, 128, align=16), float8)
        offset = e.b.fpext(e.load(block, half8, 144, align=16), float8)
        ones = ir.Constant(words16, [1] * 16)
        values = []
        for index, row in enumerate(s_rows):
            whole = e.call("llvm.x86.avx2.pmadd.wd", ints8, sums[index], ones)
            product = e.b.sitofp(whole, float8)
            row_scale = e.splat(e.load(e.b.add(row, s_at), _F32), 8)
            row_sum = e.splat(e.load(e.b.add(row, s_at), _F32, 4), 8)
            value = e.fma(product, e.b.fmul(scale, row_scale), loop.carried[index])
            values.append(e.fma(offset, row_sum, value))
        loop.end(values)
        for row, value in zip(_rows(e, c, ldc, num_rows), values, strict=True):
            e.store(value, row)

    return _define(_void, "iiiiiiii", build)


def tile_8bit(num_rows: int) -> Any:
    """As tile_4bit, for 8-bit weights and int16 rows: (X, ldx, S, lds, W, C, ldc, num_blocks)."""
    bytes16, words16 = ir.VectorType(_I8, 16), ir.VectorType(_I16, 16)
    ints8, half8, float8 = (ir.VectorType(t, 8) for t in (_I32, _F16, _F32))

    def build(e: Emitter, args: list[Any]) -> None:
        x, ldx, s, lds, w, c, ldc, num_blocks = args
        x_rows, s_rows = _rows(e, x, ldx, num_rows), _rows(e, s, lds, num_rows)
        loop = _Loop(e, num_blocks, [e.constant(0.0, 8)] * num_rows)
        block = e.b.add(w, e.b.mul(loop.step, ir.Constant(_I64, BYTES_8BIT)))
        x_at = e.b.mul(loop.step, ir.Constant(_I64, 64))
        s_at = e.b.mul(loop.step, ir.Constant(_I64, 8))
        x_rows = [e.b.add(row, x_at) for row in x_rows]
        sums: list[Any] = [None] * num_rows
        for pair in range(16):
            weights = e.b.sext(e.load(block, bytes16, 16 * pair, align=16), words16)
            for index, row in enumerate(x_rows):
                two_inputs = e.load(row, _I32, 4 * pair)
                inputs = e.b.bitcast(e.splat(two_inputs, 8), words16)
                products = e.call("llvm.x86.avx2.pmadd.wd", ints8, weights, inputs)
                sums[index] = products if sums[index] is None else e.b.add(sums[index], products)
        scale = e.b.fpext(e.load(block, half8, 256, align=16), float8)
        values = []
        for index, row in enumerate(s_rows):
            product = e.b.sitofp(sums[index], float8)
            row_scale = e.splat(e.load(e.b.add(row, s_at), _F32), 8)
            values.append(e.fma(product, e.b.fmul(scale, row_scale), loop.carried[index]))
        loop.end(values)
        for row, value in zip(_rows(e, c, ldc, num_rows), values, strict=True):
            e.store(value, row)

    return _define(_void, "iiiiiiii", build)
