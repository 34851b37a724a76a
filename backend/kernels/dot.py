"""The matrix product that the kernels share, and which machine it runs on."""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

# The interpreter keeps bfloat16 as bare 16-bit words and would multiply those; it is given fp32,
# in which products of bfloat16 are exact.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@cache
def capability_of(device: torch.device) -> int:
    """90 for sm_90; 0 where there is no such thing."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32; fp32 operands are not rounded to tf32."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")
