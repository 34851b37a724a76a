"""RMSNorm, with or without a residual, in Triton; twin: `reference.rms_norm`.

One program per row holds the whole row: one read, one write, and a sum whose order depends on the
row's width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    out_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_P2)
    real = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=real, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=real, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + columns, x, mask=real)
    wide = x.to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=real, other=0.0).to(tl.float32)
    out = (wide * shrink * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=real)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """As `reference.rms_norm`."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    other = x if residual is None else residual
    assert x.stride(-1) == other.stride(-1) == 1
    if num_rows > 0:
        width_p2 = triton.next_power_of_2(width)
        rms_norm_kernel[(num_rows,)](
            out,
            total,
            x,
            other,
            weight,
            x.stride(0),
            other.stride(0),
            eps,
            WIDTH=width,
            WIDTH_P2=width_p2,
            HAS_RESIDUAL=residual is not None,
            num_warps=num_warps_for(width_p2),
        )
    return out if residual is None else (out, total)


def num_warps_for(width_p2: int) -> int:
    """16 values per thread: enough loads in flight, few enough registers."""
    return min(max(width_p2 // 512, 1), 16)
