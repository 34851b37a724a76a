"""GGUF blocks to floats, bit-equal to the `gguf` package, which the tests compare with.

Every function takes the blocks of one tensor as uint8 [num_blocks, bytes of a block] and returns
float32 [num_blocks, elements of a block]. Layouts: ggml's block structs (ggml-common.h).

A tensor is taken in pieces that stay in the cache, by all threads: an operation of torch on so
little memory runs in the thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ...registry.formats.gguf import TENSOR_TYPES
from .config import UnsupportedModel

BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}
BLOCK_SIZES = {name: count for name, count, _ in TENSOR_TYPES.values()}
PIECE = 1 << 18  # weights: with all that stands between, about a core's second-level cache
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(raw: Tensor) -> Tensor:
    """Two bytes each to float32 [num_blocks, 1]."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of all bytes, then the high ones."""
    # Eight bytes at a time; torch has no vector code for shifts of single bytes.
    words = packed.contiguous().view(torch.int64)
    low = words & 0x0F0F0F0F0F0F0F0F
    high = (words >> 4) & 0x0F0F0F0F0F0F0F0F
    return torch.cat((low, high), dim=-1).view(torch.uint8)


def _fifth_bits(raw: Tensor) -> Tensor:
    """The 32 bits of 4 bytes, as 0 or 16 each."""
    return ((raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(
        len(raw), 32
    ) << 4


def _q4_0(b: Tensor) -> Tensor:
    return (_nibbles(b[:, 2:]).to(torch.int8) - 8) * _half(b[:, :2])


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[:, 4:]) * _half(b[:, :2]) + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    quants = (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).to(torch.int8) - 16
    return quants * _half(b[:, :2])


def _q5_1(b: Tensor) -> Tensor:
    quants = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return quants * _half(b[:, :2]) + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8) * _half(b[:, :2])


def _planes(packed: Tensor, bits: int) -> Tensor:
    """[..., 32] bytes to [..., 8 / bits, 32]: the lowest bits of all bytes, then the next ones."""
    # Eight bytes at a time, as above: what is shifted in from the neighbour is masked away.
    words = packed.contiguous().view(torch.int64).unsqueeze(-2)
    shifts = torch.arange(0, 8, bits).unsqueeze(-1)
    mask = 0x0101010101010101 * ((1 << bits) - 1)
    return ((words >> shifts) & mask).view(torch.uint8)


def _looked_up(table: tuple[Tensor, Tensor], packed: Tensor) -> Tensor:
    """The values of all low nibbles, then of the high ones, along the last dimension."""
    index = packed.reshape(-1).to(torch.int32)
    low, high = (values.index_select(0, index).view(packed.shape) for values in table)
    return torch.cat((low, high), dim=-1)


def _nibble_tables(values: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of all 256 bytes: what the low nibble means, and the high one."""
    by_nibble = torch.tensor(values, dtype=torch.float32)
    return by_nibble.repeat(16), by_nibble.repeat_interleave(16)


_IQ4_TABLE = _nibble_tables(IQ4_VALUES)
_FP4_TABLE = _nibble_tables(FP4_DOUBLED)
_BY_TWOS = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)


def _q2_k(b: Tensor) -> Tensor:
    scales = b[:, :16]
    factor = (_half(b[:, 80:82]) * (scales & 15)).unsqueeze(-1)
    offset = (_half(b[:, 82:84]) * (scales >> 4)).unsqueeze(-1)
    quants = _planes(b[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (factor * quants - offset).reshape(len(b), 256)


def _q3_k(b: Tensor) -> Tensor:
    low = _planes(b[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    high = _planes(b[:, :32], 1)  # set: nothing is taken away
    quants = (low | (high << 2)).view(torch.int8) - 4
    raw = b[:, 96:108]
    pairs = (raw[:, 8:12].unsqueeze(1) >> _BY_TWOS) & 3
    lows = torch.cat((raw[:, :8] & 15, raw[:, :8] >> 4), dim=1)
    scales = (lows | (pairs.reshape(-1, 16) << 4)).view(torch.int8) - 32
    factor = (_half(b[:, 108:]) * scales).unsqueeze(-1)
    return (factor * quants.reshape(-1, 16, 16)).reshape(len(b), 256)


def _iq4_nl(b: Tensor) -> Tensor:
    return _looked_up(_IQ4_TABLE, b[:, 2:]) * _half(b[:, :2])


def _iq4_xs(b: Tensor) -> Tensor:
    shifts = torch.arange(0, 16, 2, dtype=torch.int32)
    high = (b[:, 2:4].contiguous().view(torch.int16).to(torch.int32) >> shifts) & 3
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=-1).reshape(-1, 8)
    factor = (_half(b[:, :2]) * ((low | (high << 4)) - 32)).unsqueeze(-1)
    return (factor * _looked_up(_IQ4_TABLE, b[:, 8:].reshape(-1, 8, 16))).reshape(len(b), 256)


def _mxfp4(b: Tensor) -> Tensor:
    # Half of 2 ** (e - 127), as the values are doubled; its bits for e < 2 are a denormal's.
    exponent = b[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _looked_up(_FP4_TABLE, b[:, 1:]) * bits.view(torch.float32)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minimums from 12 bytes."""
    low, mid, high = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minimums = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1)
    return scales, minimums


def _k_blocks(b: Tensor, quants: Tensor) -> Tensor:
    """`quants` [num_blocks, 8, 32] scaled as Q4_K and Q5_K are."""
    scales, minimums = _k_scales(b[:, 4:16])
    factor = (_half(b[:, :2]) * scales).unsqueeze(-1)
    offset = (_half(b[:, 2:4]) * minimums).unsqueeze(-1)
    return (factor * quants - offset).reshape(len(b), 256)


def _q4_k(b: Tensor) -> Tensor:
    return _k_blocks(b, _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = _planes(b[:, 16:48], 1)
    return _k_blocks(b, low | (high << 4))


def _q6_k(b: Tensor) -> Tensor:
    low = b[:, :128].reshape(-1, 2, 64)
    high = _planes(b[:, 128:192].reshape(-1, 2, 32), 2)
    quants = _nibbles(low).reshape(-1, 2, 4, 32) | (high << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8)
    factor = (_half(b[:, 208:]) * scales).unsqueeze(-1)
    return (factor * (quants.to(torch.int8) - 32).reshape(-1, 16, 16)).reshape(len(b), 256)


_DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

SUPPORTED_TYPES = (*_PLAIN, *_DEQUANTIZERS)


def dequantize(raw: Tensor, type: str, dtype: torch.dtype) -> Tensor:
    """The tensor's bytes (uint8, flat) as a flat tensor of `dtype`.

    Raises UnsupportedModel naming the type and the supported ones.
    """
    if type in _PLAIN:
        return raw.view(_PLAIN[type]).to(dtype)
    if type not in _DEQUANTIZERS:
        raise UnsupportedModel(
            f"tensor type {type} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        )
    blocks = raw.view(-1, BLOCK_BYTES[type])
    size = BLOCK_SIZES[type]
    out = torch.empty((len(blocks), size), dtype=dtype)
    convert, step = _DEQUANTIZERS[type], PIECE // size

    def fill(begin: int, end: int) -> None:
        for first in range(begin, end, step):
            last = min(first + step, end)
            out[first:last] = convert(blocks[first:last])

    _in_parallel(fill, len(blocks), step)
    return out.view(-1)


def _in_parallel(fill: Callable[[int, int], None], count: int, step: int) -> None:
    """`fill(begin, end)` over all of 0..count, shared between torch's number of threads."""
    threads = min(torch.get_num_threads(), count // (4 * step))
    if threads < 2:
        fill(0, count)
        return
    bounds = [count * index // threads for index in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(fill, *bounds[i : i + 2]) for i in range(threads)]:
            done.result()


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A matrix [N, K] in groups of 32 inputs, as integers: w = scale · q + offset.

    bits 4: quants uint8 of 0..15; bits 8: int8 of -128..127 and no offset. scale, offset float16.
    """

    bits: int
    quants: Tensor  # [N, K / 32, 32]
    scale: Tensor  # [N, K / 32]
    offset: Tensor | None = None

    def rows(self, order: Callable[[Tensor], Tensor]) -> QuantBlocks:
        """With another order of the outputs."""
        offset = None if self.offset is None else order(self.offset)
        return QuantBlocks(self.bits, order(self.quants), order(self.scale), offset)


def quant_blocks(raw: Tensor, type: str, num_outputs: int) -> QuantBlocks | None:
    """The stored integers as they are, for types that are such groups; None for all others.

    The scale of a scale (Q4_K) and a power of two (MXFP4) become one float16: the former loses
    2 ** -11 of it at most, the latter nothing, or else there are no such integers.
    """
    if type not in _INTEGERS:
        return None
    found = _INTEGERS[type](raw.view(num_outputs, -1, BLOCK_BYTES[type]))
    is_sound = torch.isfinite(found.scale).all()
    return found if is_sound else None


def _integers_q4_0(b: Tensor) -> QuantBlocks:
    scale = _half_of(b, 0)
    return QuantBlocks(4, _nibbles(b[..., 2:]), scale, scale * -8)


def _integers_q4_1(b: Tensor) -> QuantBlocks:
    return QuantBlocks(4, _nibbles(b[..., 4:]), _half_of(b, 0), _half_of(b, 2))


def _integers_q5_0(b: Tensor) -> QuantBlocks:
    fifth = _fifth_bits(b[..., 2:6].reshape(-1, 4)).view(*b.shape[:2], 32)
    quants = (_nibbles(b[..., 6:]) | fifth).view(torch.int8) - 16
    return QuantBlocks(8, quants, _half_of(b, 0))


def _integers_q8_0(b: Tensor) -> QuantBlocks:
    return QuantBlocks(8, b[..., 2:].contiguous().view(torch.int8), _half_of(b, 0))


def _integers_q4_k(b: Tensor) -> QuantBlocks:
    rows, num_blocks, _ = b.shape
    flat = b.reshape(rows * num_blocks, -1)
    scales, minimums = _k_scales(flat[:, 4:16])
    scale = (_half(flat[:, :2]) * scales).half().view(rows, num_blocks * 8)
    offset = (_half(flat[:, 2:4]) * minimums).neg_().half().view(rows, num_blocks * 8)
    quants = _nibbles(flat[:, 16:].reshape(-1, 4, 32)).view(rows, num_blocks * 8, 32)
    return QuantBlocks(4, quants, scale, offset)


def _integers_iq4_nl(b: Tensor) -> QuantBlocks:
    return QuantBlocks(8, _looked_up_bytes(IQ4_VALUES, b[..., 2:]), _half_of(b, 0))


def _integers_mxfp4(b: Tensor) -> QuantBlocks:
    # Half of 2 ** (e - 127), as the values are doubled: a float16 has it from 2 ** -24 on.
    exponent = b[..., 0].to(torch.int32) - 128
    scale = torch.where(exponent >= -24, torch.exp2(exponent.float()), float("inf")).half()
    return QuantBlocks(8, _looked_up_bytes(FP4_DOUBLED, b[..., 1:]), scale)


def _half_of(b: Tensor, at: int) -> Tensor:
    """The float16 at this byte of each block: [rows, blocks]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _looked_up_bytes(values: tuple[int, ...], packed: Tensor) -> Tensor:
    """The int8 of all low nibbles, then of the high ones, along the last dimension."""
    by_nibble = torch.tensor(values, dtype=torch.int8)
    index = packed.reshape(-1).to(torch.int32)
    low = by_nibble.repeat(16).index_select(0, index).view(packed.shape)
    high = by_nibble.repeat_interleave(16).index_select(0, index).view(packed.shape)
    return torch.cat((low, high), dim=-1)


_INTEGERS: dict[str, Callable[[Tensor], QuantBlocks]] = {
    "Q4_0": _integers_q4_0,
    "Q4_1": _integers_q4_1,
    "Q5_0": _integers_q5_0,
    "Q8_0": _integers_q8_0,
    "Q4_K": _integers_q4_k,
    "IQ4_NL": _integers_iq4_nl,
    "MXFP4": _integers_mxfp4,
}
INTEGER_TYPES = tuple(_INTEGERS)  # computed with as they are stored; others are rounded to 8 bit


def integer_bits(type: str) -> int:
    """Of the integers that `quant_blocks` finds in this type; 0 if it finds none."""
    if type not in _INTEGERS:
        return 0
    return 4 if type in ("Q4_0", "Q4_1", "Q4_K") else 8
