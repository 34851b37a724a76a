"""Gated activations of a packed gate-up projection, in Triton; twins: `reference.silu_mul`,
`reference.gelu_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def gated_kernel(
    out_ptr, gate_up_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + WIDTH + columns, mask=real, other=0.0).to(tl.float32)
    if IS_GELU:
        # 0.5 (1 + tanh(y)) is 1 / (1 + exp(-2 y)), which stays finite.
        y = SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * y))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    out = (gate * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    return _gated(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.gelu_mul`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(-1) == 1
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        gated_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK, IS_GELU=is_gelu
        )
    return out
