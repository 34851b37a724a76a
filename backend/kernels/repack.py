"""From the formats of files to the packed form; each function takes one matrix as it lies there.

Run once, while loading, on the device that will hold the weight. Tests compare with the `gguf`
package's own numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .packed import PackedWeight, pack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies in its int32


def from_gguf(blocks: Tensor, type_name: str) -> PackedWeight:
    """blocks [..., row_bytes] uint8 of a GGUF tensor of that type, for example "Q4_K".

    Raises KeyError for a type that has no packed form; `GGUF_TYPES` lists those that have.
    """
    return GGUF_TYPES[type_name](blocks)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """fp16 numbers inside blocks [..., num_blocks, block_bytes], as fp32."""
    return blocks[..., start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Low nibbles, then high ones: 16 bytes are 32 codes, as ggml has it."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _q4_0(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 18))
    q = _nibbles(blocks[..., 2:]).flatten(-2)
    return pack(q, _half(blocks, 0).flatten(-2), None, bits=4, group=32, zero=8)


def _q4_1(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 20))
    q = _nibbles(blocks[..., 4:]).flatten(-2)
    return pack(q, _half(blocks, 0).flatten(-2), _half(blocks, 2).flatten(-2), bits=4, group=32)


def _fifth_bits(data: Tensor) -> Tensor:
    """4 bytes are the fifth bits of 32 codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (((data[..., None] >> shifts) & 1) << 4).flatten(-2)


def _q5_0(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 22))
    q = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return pack(q.flatten(-2), _half(blocks, 0).flatten(-2), None, bits=5, group=32, zero=16)


def _q5_1(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 24))
    q = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    scales, offsets = _half(blocks, 0).flatten(-2), _half(blocks, 2).flatten(-2)
    return pack(q.flatten(-2), scales, offsets, bits=5, group=32)


def _q8_0(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 34))
    q = blocks[..., 2:].contiguous().view(torch.int8).flatten(-2)
    return pack(q, _half(blocks, 0).flatten(-2), None, bits=8, group=32)


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes are 8 scales and 8 minima of 6 bits each."""
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales.float(), minima.float()


def _k_codes(data: Tensor) -> Tensor:
    """128 bytes are 256 codes: each 32 bytes hold 32 in their low nibbles and the next 32."""
    return _nibbles(torch.unflatten(data, -1, (4, 32))).flatten(-2)


def _q4_k(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 144))
    scales, minima = _k_scales(blocks[..., 4:16])
    q = _k_codes(blocks[..., 16:]).flatten(-2)
    scales = (_half(blocks, 0) * scales).flatten(-2)
    offsets = -(_half(blocks, 2) * minima).flatten(-2)
    return pack(q, scales, offsets, bits=4, group=32)


def _q5_k(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 176))
    scales, minima = _k_scales(blocks[..., 4:16])
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    fifth = ((blocks[..., 16:48][..., None, :] >> shifts) & 1).flatten(-2)  # bit g of byte j
    q = (_k_codes(blocks[..., 48:]) | (fifth << 4)).flatten(-2)
    scales = (_half(blocks, 0) * scales).flatten(-2)
    offsets = -(_half(blocks, 2) * minima).flatten(-2)
    return pack(q, scales, offsets, bits=5, group=32)


def _q6_k(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 210))
    # Two halves of 128 codes: 64 bytes of low nibbles, 32 of pairs of high bits.
    low = _nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64)))
    pairs = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)[:, None]
    high = ((pairs >> shifts) & 3).flatten(-2)
    q = (low | (high << 4)).flatten(-3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (_half(blocks, 208) * scales).flatten(-2)
    return pack(q, scales, None, bits=6, group=16, zero=32)


def _mxfp4(data: Tensor) -> PackedWeight:
    blocks = torch.unflatten(data, -1, (-1, 17))
    q = _nibbles(blocks[..., 1:]).flatten(-2)
    return pack(q, blocks[..., 0], None, bits=4, group=32, is_fp4=True)


GGUF_TYPES: dict[str, Callable[[Tensor], PackedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def from_mxfp4(blocks: Tensor, scales: Tensor) -> PackedWeight:
    """gpt-oss's experts: blocks [..., K / 32, 16] uint8, neighbours in one byte, the first one low;
    scales [..., K / 32] uint8."""
    q = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3)
    return pack(q, scales, None, bits=4, group=32, is_fp4=True)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> PackedWeight:
    """4 bits: qweight int32 [K, N / 8], qzeros int32 [K / group, N / 8], scales [K / group, N]."""
    q, zeros = (_unpack(t, AWQ_ORDER).t() for t in (qweight, qzeros))
    steps = scales.t().float()
    return pack(q.contiguous(), steps, -zeros.float() * steps, bits=4, group=group)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, bits: int, *, is_v2: bool
) -> PackedWeight:
    """qweight int32 [K * bits / 32, N], packed along K; qzeros int32 [K / group, N * bits / 32].

    Version 1 stores each zero less one. A permuted checkpoint (desc_act) is sorted by its g_idx
    first, and x's columns with it.
    """
    q = _unpack(qweight.t().contiguous(), range(32 // bits), bits)
    zeros = (
        _unpack(qzeros, range(32 // bits), bits).t().to(torch.int16) + (0 if is_v2 else 1)
    ).float()
    steps = scales.t().float()
    if bits == 8:
        q = (q.to(torch.int16) - 128).to(torch.int8)
        zeros = zeros - 128
    return pack(q, steps, -zeros * steps, bits=bits, group=group)


def from_compressed_tensors(
    weight_packed: Tensor, weight_scale: Tensor, zero_point: Tensor | None, group: int, bits: int
) -> PackedWeight:
    """weight_packed int32 [N, K * bits / 32] of codes + 2^(bits - 1); weight_scale [N, K / group];
    zero_point [N, K / group] already unpacked, unsigned, or None."""
    q = _unpack(weight_packed, range(32 // bits), bits)
    middle = 1 << (bits - 1)
    if bits == 8:
        q = (q.to(torch.int16) - middle).to(torch.int8)
    shift = 0 if bits == 8 else middle
    if zero_point is None:
        return pack(q, weight_scale, None, bits=bits, group=group, zero=shift)
    zeros = zero_point.float() - (middle - shift)
    return pack(q, weight_scale, -zeros * weight_scale.float(), bits=bits, group=group)


def _unpack(words: Tensor, order: range | tuple[int, ...], bits: int = 4) -> Tensor:
    """int32 [..., n] to uint8 [..., n * 32 / bits]; order[i] is where code i lies in its word."""
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
