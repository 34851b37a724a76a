"""The inner tiles of the products with quantised weights.

A tile is the product of a few rows with one or two strips of 8 outputs (cpu_pack has the layout).
Each 32 inputs are one exact integer sum per row and output, which is then scaled and added in
float32. Integer sums have no order, and each output adds its blocks one after another: so a row's
bits are the same in every tile, and with every instruction set.

Two strips share the loads of a row's inputs, which is what bounds a tile on AVX2 (two loads a
cycle). The running float sums of a tile of four rows lie on the stack, as integers fill the
registers.

Instructions: AVX2's `vpmaddubsw` and `vpmaddwd`; where the processor has VNNI, `vpdpbusd` and
`vpdpwssd`, which do three and two steps in one. Source: Intel's intrinsics guide.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .cpu_compile import I64, Intrinsic
from .cpu_ir import Emitter, Loop
from .cpu_step import BYTES_UNPACKED

BYTES_4BIT = 128 + 32  # of 8 outputs · 32 inputs: nibbles, 8 scales, 8 offsets
BYTES_8BIT = 256 + 16  # ... : bytes, 8 scales

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_BYTES32, _BYTES16 = ir.VectorType(_I8, 32), ir.VectorType(_I8, 16)
_WORDS16, _INTS8 = ir.VectorType(_I16, 16), ir.VectorType(_I32, 8)
_HALF8, _FLOAT8 = ir.VectorType(ir.HalfType(), 8), ir.VectorType(_F32, 8)


class _Tile:
    """Rows and strips while the blocks go by: sums of integers per block, float sums overall."""

    def __init__(self, e: Emitter, num_rows: int, num_strips: int, x_bytes: int, args: list[Any]):
        x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks = args
        self.e, self.num_rows, self.num_strips = e, num_rows, num_strips
        self._c_rows = e.rows(c, ldc, num_rows)
        x_rows, s_rows = e.rows(x, ldx, num_rows), e.rows(s, lds, num_rows)
        count = num_rows * num_strips
        self._on_stack = count > 4
        start = [e.constant(0.0, 8)] * count
        if self._on_stack:
            self._cells = e.local(32 * count)
            for index, zero in enumerate(start):
                e.store(zero, self._cells, 32 * index, align=32)
        self._loop = Loop(e, num_blocks, [] if self._on_stack else start)
        step = self._loop.step
        self.x_rows = [e.b.add(row, e.b.mul(step, ir.Constant(_I64, x_bytes))) for row in x_rows]
        self._s_rows = [e.b.add(row, e.b.mul(step, ir.Constant(_I64, 8))) for row in s_rows]
        self.step = step
        self.strips = e.rows(w, strip_bytes, num_strips)
        self._next = e.b.mul(strip_bytes, ir.Constant(_I64, num_strips))
        self.sums: list[Any] = [None] * count

    def fetch_next(self, blocks: list[Any], size: int) -> None:
        """The same blocks of the next strips: a tile waits for memory unless somebody asked."""
        for block in blocks:
            ahead = self.e.b.add(block, self._next)
            for line in range(0, size, 64):
                self.e.prefetch(ahead, line)

    def add(self, row: int, strip: int, value: Any) -> None:
        """`value` joins the block's integer sum."""
        at = row * self.num_strips + strip
        self.sums[at] = value if self.sums[at] is None else self.e.b.add(self.sums[at], value)

    def accumulate(self, name: str, row: int, strip: int, weights: Any, inputs: Any) -> None:
        """sum += weights · inputs in one instruction of VNNI."""
        at = row * self.num_strips + strip
        old = ir.Constant(_INTS8, [0] * 8) if self.sums[at] is None else self.sums[at]
        self.sums[at] = self.e.call(name, _INTS8, old, weights, inputs)

    def end(self, scales: list[Any], offsets: list[Any]) -> None:
        """Close the block, and the loop: sums are int32 by now. `offsets` may be empty."""
        e, values = self.e, []
        for row, s_row in enumerate(self._s_rows):
            row_scale = e.splat(e.load(s_row, _F32), 8)
            row_sum = e.splat(e.load(s_row, _F32, 4), 8) if offsets else None
            for strip in range(self.num_strips):
                at = row * self.num_strips + strip
                old = (
                    e.load(self._cells, _FLOAT8, 32 * at, 32)
                    if self._on_stack
                    else self._loop.carried[at]
                )
                product = e.b.sitofp(self.sums[at], _FLOAT8)
                value = e.fma(product, e.b.fmul(scales[strip], row_scale), old)
                if offsets:
                    value = e.fma(offsets[strip], row_sum, value)
                if self._on_stack:
                    e.store(value, self._cells, 32 * at, align=32)
                values.append(value)
        self._loop.end([] if self._on_stack else values)
        for row, c_row in enumerate(self._c_rows):
            for strip in range(self.num_strips):
                at = row * self.num_strips + strip
                value = e.load(self._cells, _FLOAT8, 32 * at, 32) if self._on_stack else values[at]
                e.store(value, c_row, 32 * strip)


def _halves(e: Emitter, block: Any, offset: int) -> Any:
    return e.b.fpext(e.load(block, _HALF8, offset, align=16), _FLOAT8)


def tile_4bit(num_rows: int, num_strips: int) -> Intrinsic:
    """C = X · Wᵀ for 8 or 16 outputs of 4-bit weights.

    (X, ldx, S, lds, W, bytes of a strip, C, ldc, num_blocks): X are int8 rows with, in S, scale and
    scaled sum of each 32.
    """

    def build(e: Emitter, args: list[Any]) -> None:
        tile = _Tile(e, num_rows, num_strips, 32, args)
        offset = e.b.mul(tile.step, ir.Constant(_I64, BYTES_4BIT))
        blocks = [e.b.add(strip, offset) for strip in tile.strips]
        tile.fetch_next(blocks, BYTES_4BIT)
        low_mask, four = ir.Constant(_BYTES32, [15] * 32), ir.Constant(_WORDS16, [4] * 16)
        for quarter in range(4):
            packed = [e.load(block, _BYTES32, 32 * quarter, align=32) for block in blocks]
            for half in range(2):
                if half:
                    shifted = [e.b.lshr(e.b.bitcast(part, _WORDS16), four) for part in packed]
                    packed = [e.b.bitcast(part, _BYTES32) for part in shifted]
                weights = [e.b.and_(part, low_mask) for part in packed]
                for row, x_row in enumerate(tile.x_rows):
                    inputs = e.splat(e.load(x_row, _I32, 8 * quarter + 4 * half), 8)
                    for strip, nibbles in enumerate(weights):
                        _four_products(tile, row, strip, nibbles, inputs)
        _widen_sums(tile)
        tile.end([_halves(e, b, 128) for b in blocks], [_halves(e, b, 144) for b in blocks])

    return Intrinsic(lambda builder, values: build(Emitter(builder), values), (I64,) * 9)


def unpack_4bit() -> Intrinsic:
    """(W, bytes of a strip, out, num_blocks): two strips of 4-bit weights as tile_unpacked reads
    them, a step's 32 bytes of either strip side by side."""

    def build(e: Emitter, args: list[Any]) -> None:
        w, strip_bytes, out, num_blocks = args
        loop = Loop(e, num_blocks, [])
        offset = e.b.mul(loop.step, ir.Constant(_I64, BYTES_4BIT))
        target = e.b.add(out, e.b.mul(loop.step, ir.Constant(_I64, BYTES_UNPACKED)))
        low_mask, four = ir.Constant(_BYTES32, [15] * 32), ir.Constant(_WORDS16, [4] * 16)
        for strip, start in enumerate(e.rows(w, strip_bytes, 2)):
            block = e.b.add(start, offset)
            for quarter in range(4):
                packed = e.load(block, _BYTES32, 32 * quarter, align=32)
                shifted = e.b.bitcast(e.b.lshr(e.b.bitcast(packed, _WORDS16), four), _BYTES32)
                for half, part in enumerate((packed, shifted)):
                    at = 64 * (2 * quarter + half) + 32 * strip
                    e.store(e.b.and_(part, low_mask), target, at, align=32)
            e.store(_halves(e, block, 128), target, 512 + 32 * strip, align=32)
            e.store(_halves(e, block, 144), target, 576 + 32 * strip, align=32)
        loop.end([])

    return Intrinsic(lambda builder, values: build(Emitter(builder), values), (I64,) * 4)


def tile_unpacked(num_rows: int) -> Intrinsic:
    """As tile_4bit for two strips that unpack_4bit has written: many rows share its work.

    Two addresses more, `ahead` and `keys`: a block fetches the next two lines from either.
    """

    def build(e: Emitter, args: list[Any]) -> None:
        *args, ahead, keys = args
        tile = _Tile(e, num_rows, 2, 32, args)
        block = e.b.add(args[4], e.b.mul(tile.step, ir.Constant(_I64, BYTES_UNPACKED)))
        weights_line = e.b.add(ahead, e.b.mul(tile.step, ir.Constant(_I64, 128)))
        e.prefetch(weights_line)
        e.prefetch(weights_line, 64)
        keys_line = e.b.add(keys, e.b.mul(tile.step, ir.Constant(_I64, 128)))
        e.prefetch(keys_line)
        e.prefetch(keys_line, 64)
        for step in range(8):
            weights = [e.load(block, _BYTES32, 64 * step + 32 * strip, 32) for strip in range(2)]
            for row, x_row in enumerate(tile.x_rows):
                inputs = e.splat(e.load(x_row, _I32, 4 * step), 8)
                for strip, part in enumerate(weights):
                    _four_products(tile, row, strip, part, inputs)
        _widen_sums(tile)
        scales = [e.load(block, _FLOAT8, 512 + 32 * strip, 32) for strip in range(2)]
        offsets = [e.load(block, _FLOAT8, 576 + 32 * strip, 32) for strip in range(2)]
        tile.end(scales, offsets)

    return Intrinsic(lambda builder, values: build(Emitter(builder), values), (I64,) * 11)


def _widen_sums(tile: _Tile) -> None:
    """What _four_products left in int16 becomes int32."""
    e = tile.e
    if not e.has("vnni"):
        ones = ir.Constant(_WORDS16, [1] * 16)
        tile.sums = [e.call("llvm.x86.avx2.pmadd.wd", _INTS8, s, ones) for s in tile.sums]


def _four_products(tile: _Tile, row: int, strip: int, nibbles: Any, inputs: Any) -> None:
    """Each of 8 outputs: the sum of 4 products of a nibble and an int8."""
    e = tile.e
    inputs = e.b.bitcast(inputs, _BYTES32)
    if e.has("vnni"):
        tile.accumulate("llvm.x86.avx512.vpdpbusd.256", row, strip, nibbles, inputs)
        return
    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", _WORDS16, nibbles, inputs)
    # 8 · 2 · 15 · 127 < 2^15: eight of them fit before they must be widened
    tile.add(row, strip, pairs)


def tile_8bit(num_rows: int, num_strips: int) -> Intrinsic:
    """As tile_4bit, for 8-bit weights and int16 rows."""

    def build(e: Emitter, args: list[Any]) -> None:
        tile = _Tile(e, num_rows, num_strips, 64, args)
        offset = e.b.mul(tile.step, ir.Constant(_I64, BYTES_8BIT))
        blocks = [e.b.add(strip, offset) for strip in tile.strips]
        tile.fetch_next(blocks, BYTES_8BIT)
        for pair in range(16):
            bytes_ = [e.load(block, _BYTES16, 16 * pair, align=16) for block in blocks]
            weights = [e.b.sext(part, _WORDS16) for part in bytes_]
            for row, x_row in enumerate(tile.x_rows):
                inputs = e.b.bitcast(e.splat(e.load(x_row, _I32, 4 * pair), 8), _WORDS16)
                for strip, part in enumerate(weights):
                    if e.has("vnni"):
                        tile.accumulate("llvm.x86.avx512.vpdpwssd.256", row, strip, part, inputs)
                    else:
                        products = e.call("llvm.x86.avx2.pmadd.wd", _INTS8, part, inputs)
                        tile.add(row, strip, products)
        tile.end([_halves(e, b, 256) for b in blocks], [])

    return Intrinsic(lambda builder, values: build(Emitter(builder), values), (I64,) * 9)
