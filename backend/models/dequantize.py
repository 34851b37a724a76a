"""GGUF blocks to floats, bit-equal to the `gguf` package, which the tests compare with.

Every function takes the blocks of one tensor as uint8 [num_blocks, bytes of a block] and returns
float32 [num_blocks, elements of a block]. Layouts: ggml's block structs (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...registry.formats.gguf import TENSOR_TYPES
from .config import UnsupportedModel

BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


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
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((raw.unsqueeze(-1) >> shifts) & 1).reshape(len(raw), 32) << 4


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
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = (b[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _k_blocks(b, low | (high << 4))


def _q6_k(b: Tensor) -> Tensor:
    low = b[:, :128].reshape(-1, 2, 64)
    high = b[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    quants = _nibbles(low).reshape(-1, 2, 4, 32) | (((high >> shifts) & 3) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8)
    factor = (_half(b[:, 208:]) * scales).unsqueeze(-1)
    return (factor * (quants.to(torch.int8) - 32).reshape(-1, 16, 16)).reshape(len(b), 256)


_DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
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
    return _DEQUANTIZERS[type](raw.view(-1, BLOCK_BYTES[type])).to(dtype).reshape(-1)


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
    """The stored integers as they are, for types that are such groups; None for all others."""
    if type not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    b = raw.view(num_outputs, -1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type])
    scale = b[..., :2].contiguous().view(torch.float16).squeeze(-1)
    if type == "Q8_0":
        return QuantBlocks(8, b[..., 2:].contiguous().view(torch.int8), scale)
    if type == "Q4_0":
        return QuantBlocks(4, _nibbles(b[..., 2:]), scale, scale * -8)
    return QuantBlocks(
        4, _nibbles(b[..., 4:]), scale, b[..., 2:4].contiguous().view(torch.float16).squeeze(-1)
    )
