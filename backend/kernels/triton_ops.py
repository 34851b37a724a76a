"""The Triton kernels under the names that `select.Kernels` lists. Importing this imports Triton."""

from .activation import gelu_mul, silu_mul
from .mask import apply_token_mask
from .matmul import quantized_matmul
from .moe import expert_matmul
from .norm import rms_norm
from .paged_attention import paged_attention
from .rotary import rotary, rotary_store
from .sampling import sample
from .store_kv import store_kv

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
