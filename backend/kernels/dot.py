"""The matrix product that the kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter keeps bfloat16 as bare 16-bit words and would multiply those; it is given fp32,
# in which products of bfloat16 are exact.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32; fp32 operands are not rounded to tf32."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")
