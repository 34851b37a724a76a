"""One packed form for all group-quantised weights, and how the formats come into it.

    weight[n, k] = (q[n, k] - zero) * scale[n, k // group] (+ offset[n, k // group])

    low      4 bits of each q. 64 columns are 32 bytes; byte j holds column j in its low nibble and
             column 32 + j in its high one. A kernel multiplies the nibbles of a tile of bytes with
             two tiles of x, and never interleaves anything.
    high     bits 4 (and 5) of 5- and 6-bit weights, for the same 64 columns 8 (or 16) bytes
    (8 bits: `low` is q itself, int8, a byte per column; 16 bits: the weight itself, for experts
    that are not quantised)

GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and MXFP4 fit, and AWQ's, GPTQ's and
compressed-tensors' weights, without a second rounding of q. K-quants keep a scale of a scale; their
product is rounded to fp16 here, 2^-11 of it at most, less than a weight in bfloat16 loses.

Sources: the block layouts as ggml's and as the checkpoints' config keys describe them; OCP
Microscaling Formats 1.0 for MXFP4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .tiles import Tuned

CHUNK = 64  # columns that are packed together
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [N, K], or experts [E, N, K]: then every tensor has E in front.

    low      uint8 [N, K / 2] (int8 [N, K] with 8 bits), K padded to a multiple of 64; with 16 bits
             the dense matrix, not padded, and no scales count
    high     uint8 [N, K / 8] or [N, K / 4], or None
    scales   fp16 [N, K / group]; with `is_fp4` uint8, powers of two with a bias of 127
    offsets  fp16 [N, K / group], or None
    """

    low: Tensor
    high: Tensor | None
    scales: Tensor
    offsets: Tensor | None
    bits: int  # 4, 5, 6, 8 or 16
    group: int  # 16, 32, 64, 128 columns share a scale
    zero: int
    num_columns: int  # K without the padding
    is_fp4: bool = False  # q is a 4-bit float (e2m1), not an integer
    tuned: Tuned = field(default_factory=Tuned)

    @property
    def kind(self) -> str:
        """Weights of one kind have one fastest tile."""
        shape = "x".join(str(size) for size in (*self.low.shape[:-1], self.num_columns))
        form = f"{self.bits} bits{' fp4' if self.is_fp4 else ''}, groups of {self.group}"
        return f"{shape}, {form}{'' if self.offsets is None else ', offsets'}"

    @property
    def num_rows(self) -> int:
        return self.low.shape[-2]

    @property
    def size_bytes(self) -> int:
        """What a product reads at least."""
        tensors = (self.low, self.high, self.scales, self.offsets)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def expert(self, index: int) -> PackedWeight:
        """One matrix of a stack."""
        return self._each(lambda tensor: tensor[index])

    def rows(self, indices: Tensor) -> PackedWeight:
        """The matrix of these rows [n]."""
        return self._each(lambda tensor: tensor[indices])

    def to(self, device: torch.device | str) -> PackedWeight:
        """A copy on that device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        return replace(
            self,
            low=change(self.low),
            high=None if self.high is None else change(self.high),
            scales=change(self.scales),
            offsets=None if self.offsets is None else change(self.offsets),
        )


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of all, one after another. Raises ValueError if they are packed differently."""
    return _joined(parts, lambda tensors: torch.cat(list(tensors), dim=-2))


def stack(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Experts of matrices. Raises ValueError if they are packed differently."""
    return _joined(parts, lambda tensors: torch.stack(list(tensors)))


def _joined(
    parts: Sequence[PackedWeight], join: Callable[[Iterable[Tensor]], Tensor]
) -> PackedWeight:
    forms = {
        (p.bits, p.group, p.zero, p.num_columns, p.is_fp4, p.offsets is None, p.low.dtype)
        for p in parts
    }
    if len(forms) > 1:
        raise ValueError(f"matrices of different forms: {sorted(map(str, forms))}")
    first = parts[0]
    return replace(
        first,
        low=join(p.low for p in parts),
        high=None if first.high is None else join(p.high for p in parts if p.high is not None),
        scales=join(p.scales for p in parts),
        offsets=None
        if first.offsets is None
        else join(p.offsets for p in parts if p.offsets is not None),
    )


def dense(weight: Tensor) -> PackedWeight:
    """A matrix [..., N, K] that is not quantised, for the products that take stacks."""
    scales = weight.new_ones(*weight.shape[:-1], 1, dtype=torch.float16)
    return PackedWeight(weight, None, scales, None, 16, 32, 0, weight.shape[-1])


def pack(
    q: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    *,
    bits: int,
    group: int,
    zero: int = 0,
    is_fp4: bool = False,
) -> PackedWeight:
    """Pack codes q [..., K] (uint8, or int8 with 8 bits) with their scales [..., K / group]."""
    num_columns = q.shape[-1]
    padding = -num_columns % CHUNK
    if padding:
        q = torch.nn.functional.pad(q, (0, padding))
        missing = q.shape[-1] // group - scales.shape[-1]
        scales = torch.nn.functional.pad(scales, (0, missing))
        offsets = None if offsets is None else torch.nn.functional.pad(offsets, (0, missing))
    low, high = q, None
    if bits < 8:
        chunks = torch.unflatten(q, -1, (-1, 2, CHUNK // 2))
        first, second = chunks[..., 0, :], chunks[..., 1, :]
        low = ((first & 15) | ((second & 15) << 4)).flatten(-2)
        if bits > 4:
            high = _pack_high(first >> 4, second >> 4, bits - 4)
    scales = scales if is_fp4 else scales.half()
    offsets = None if offsets is None else offsets.half().contiguous()
    return PackedWeight(
        low.contiguous(), high, scales.contiguous(), offsets, bits, group, zero, num_columns, is_fp4
    )


def _pack_high(first: Tensor, second: Tensor, bits: int) -> Tensor:
    """[..., chunks, 32] pairs to [..., chunks * 8 * bits] bytes: pair j is in byte j % (8 bits)."""
    num_bytes = 8 * bits
    pairs = torch.unflatten((first | (second << bits)), -1, (-1, num_bytes))
    packed = torch.zeros_like(pairs[..., 0, :])
    for index in range(pairs.shape[-2]):
        packed = packed | (pairs[..., index, :] << (2 * bits * index))
    return packed.flatten(-2).contiguous()


def codes(weight: PackedWeight) -> Tensor:
    """The q that were packed, padding included: uint8 (int8 with 8 bits) [..., K]."""
    if weight.bits == 8:
        return weight.low
    low = torch.unflatten(weight.low, -1, (-1, CHUNK // 2))
    first, second = low & 15, low >> 4
    if weight.high is not None:
        bits = weight.bits - 4
        num_bytes, mask = 8 * bits, (1 << bits) - 1
        planes = torch.unflatten(weight.high, -1, (-1, num_bytes))
        shifts = range(0, 8, 2 * bits)
        first = first | (torch.cat([(planes >> s) & mask for s in shifts], -1) << 4)
        second = second | (torch.cat([(planes >> (s + bits)) & mask for s in shifts], -1) << 4)
    return torch.stack([first, second], dim=-2).flatten(-3)


def dequantize(weight: PackedWeight) -> Tensor:
    """The matrix itself in fp32: [..., N, K]."""
    if weight.bits == 16:
        return weight.low.float()
    q = codes(weight)
    if weight.is_fp4:
        table = torch.tensor(FP4_VALUES, device=q.device)
        values = table[(q & 7).long()] * torch.where(q > 7, -1.0, 1.0)
        scales = (weight.scales.int() << 23).view(torch.float32)  # the exponent bits themselves
    else:
        values, scales = q.float() - weight.zero, weight.scales.float()
    dense = values * scales.repeat_interleave(weight.group, dim=-1)
    if weight.offsets is not None:
        dense = dense + weight.offsets.float().repeat_interleave(weight.group, dim=-1)
    return dense[..., : weight.num_columns]


def quantized_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times the transposed weight [N, K], in fp32, rounded to x's dtype: [T, N].

    The weight is rounded to x's dtype first, since a matrix unit takes both in the same.
    """
    dense = dequantize(weight).to(x.dtype).float()
    out = x.float() @ dense.t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def expert_matmul(
    x: Tensor,
    weight: PackedWeight,
    row_ids: Tensor,
    expert_start: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Each row of x times the matrices of the experts that it was sent to.

    x             [T, K]
    weight        [E, N, K]; bias [E, N]
    row_ids       [P] int32: the row of x of each (row, expert) pair, sorted by expert
    expert_start  [E + 1] int32: expert e owns the pairs expert_start[e] to expert_start[e + 1]

    Returns [P, N], in the order of the pairs; pairs behind expert_start[-1] are padding: zeros.
    """
    out = x.new_zeros(row_ids.shape[0], weight.num_rows)
    bounds = expert_start.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first < last:
            rows = x[row_ids[first:last].long()]
            expert_bias = None if bias is None else bias[expert]
            out[first:last] = quantized_matmul(rows, weight.expert(expert), expert_bias)
    return out
