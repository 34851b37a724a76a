"""The twins under the names that `select.Kernels` lists: the form without Triton."""

from .packed import expert_matmul, quantized_matmul
from .reference import (
    apply_token_mask,
    gelu_mul,
    paged_attention,
    rms_norm,
    rotary,
    rotary_store,
    silu_mul,
    store_kv,
)
from .sampling_reference import sample

__all__ = [
    "apply_token_mask",
    "expert_matmul",
    "gelu_mul",
    "paged_attention",
    "quantized_matmul",
    "rms_norm",
    "rotary",
    "rotary_store",
    "sample",
    "silu_mul",
    "store_kv",
]
