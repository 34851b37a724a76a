"""Products with the matrices of experts in Triton, MXFP4 or group-quantised; twin:
`packed.expert_matmul`.

The pairs of (row, expert) come sorted by expert, and a tile of pairs belongs to one expert: a
ragged batch whose segments are experts, walked as `paged_attention` walks sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .matmul import accumulate, pointers, strides
from .packed import PackedWeight
from .paged_attention import sequence_of_tile


@triton.jit
def expert_matmul_kernel(
    out_ptr,
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    row_ids_ptr,
    expert_start_ptr,
    num_experts,
    num_outputs,
    num_columns,
    x_stride,
    low_stride,
    high_stride,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Programs: (tile of outputs, tile of pairs)."""
    tile_id = tl.program_id(1)
    expert = sequence_of_tile(expert_start_ptr, tile_id, num_experts, BLOCK_M)
    first = tl.load(expert_start_ptr + expert)
    last = tl.load(expert_start_ptr + expert + 1)
    pairs = first + (tile_id - (first // BLOCK_M + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    real_pairs = pairs < last
    if tl.min(pairs, 0) >= last:
        return
    rows = tl.load(row_ids_ptr + pairs, mask=real_pairs, other=0).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_outputs = outputs < num_outputs
    weight_rows = expert.to(tl.int64) * num_outputs + tl.minimum(outputs, num_outputs - 1)
    acc = accumulate(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        x_ptr + rows * x_stride,
        real_pairs,
        low_ptr + weight_rows * low_stride,
        high_ptr + weight_rows * high_stride,
        scale_ptr + weight_rows * scale_stride,
        offset_ptr + weight_rows * scale_stride,
        0,
        num_columns,
        num_columns,
        scale_stride,
        BLOCK_N,
        BLOCK_K,
        BITS,
        ZERO,
        GROUP,
        HAS_OFFSETS,
        IS_FP4,
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_rows, mask=real_outputs, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    place = out_ptr + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    real = real_pairs[:, None] & real_outputs[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=real)


def expert_matmul(
    x: Tensor,
    weight: PackedWeight,
    row_ids: Tensor,
    expert_start: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """As `packed.expert_matmul`."""
    num_pairs, num_outputs = row_ids.shape[0], weight.num_rows
    num_experts = weight.low.shape[0]
    assert x.stride(-1) == 1 and weight.low.is_contiguous() and weight.scales.is_contiguous()
    out = x.new_zeros(num_pairs, num_outputs)
    if num_pairs == 0:
        return out
    # Few pairs per expert are the decode case, however many there are in all.
    config = weight.tuned.tile(triton.cdiv(num_pairs, num_experts), x.element_size())
    num_tiles = num_pairs // config.block_m + num_experts
    expert_matmul_kernel[(triton.cdiv(num_outputs, config.block_n), num_tiles)](
        out,
        x,
        *pointers(weight),
        x if bias is None else bias,
        row_ids,
        expert_start,
        num_experts,
        num_outputs,
        weight.num_columns,
        x.stride(0),
        *strides(weight),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BITS=weight.bits,
        ZERO=weight.zero,
        GROUP=weight.group,
        HAS_OFFSETS=weight.offsets is not None,
        IS_FP4=weight.is_fp4,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
