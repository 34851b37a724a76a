"""Forbidding tokens by bit masks, in Triton; twin: `reference.apply_token_mask`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def token_mask_kernel(
    logits_ptr, bitmask_ptr, rows_ptr, logits_stride, mask_stride, vocab_size, BLOCK: tl.constexpr
):
    mask_id = tl.program_id(0)
    row = tl.load(rows_ptr + mask_id).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = token_ids < vocab_size
    word = tl.load(bitmask_ptr + mask_id * mask_stride + token_ids // 32, mask=real, other=-1)
    forbidden = ((word >> (token_ids % 32)) & 1) == 0
    minus_inf = tl.full([BLOCK], float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token_ids, minus_inf, mask=real & forbidden)


def apply_token_mask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """As `reference.apply_token_mask`."""
    vocab_size = logits.shape[1]
    if rows.shape[0] > 0:
        token_mask_kernel[(rows.shape[0], triton.cdiv(vocab_size, BLOCK))](
            logits, bitmask, rows, logits.stride(0), bitmask.stride(0), vocab_size, BLOCK=BLOCK
        )
