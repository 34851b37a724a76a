"""The twins under the names that `select.Kernels` lists: the form without Triton."""

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
    "gelu_mul",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotary_store",
    "sample",
    "silu_mul",
    "store_kv",
]
