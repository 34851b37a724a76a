"""The KV write in Triton; twin: `reference.store_kv`.

One program per token copies all its heads: a token's key is one contiguous run of the projection,
and the slot is looked up once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def to_cache(x, scale, IS_FP8: tl.constexpr):
    """Round to what the cache holds; the scale is what a reader multiplies with."""
    if IS_FP8:
        x = tl.clamp(x.to(tl.float32) / scale, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)
    return x


@triton.jit
def store_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    cache_stride_b,
    cache_stride_h,
    cache_stride_s,
    key_scale,
    value_scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_P2: tl.constexpr,
    DIM_P2: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_P2)[:, None]
        dims = tl.arange(0, DIM_P2)[None, :]
        real = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        place = (slot // BLOCK_SIZE) * cache_stride_b + (slot % BLOCK_SIZE) * cache_stride_s
        place += heads * cache_stride_h + dims
        key = tl.load(key_ptr + token * key_stride_t + heads * key_stride_h + dims, mask=real)
        tl.store(key_cache_ptr + place, to_cache(key, key_scale, IS_FP8), mask=real)
        value = tl.load(
            value_ptr + token * value_stride_t + heads * value_stride_h + dims, mask=real
        )
        tl.store(value_cache_ptr + place, to_cache(value, value_scale, IS_FP8), mask=real)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `reference.store_kv`."""
    key, value = dense_heads(key), dense_heads(value)
    num_tokens, num_heads, head_dim = key.shape
    assert key_cache.stride() == value_cache.stride()
    if num_tokens == 0:
        return
    store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        key_scale,
        value_scale,
        BLOCK_SIZE=key_cache.shape[2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_P2=triton.next_power_of_2(num_heads),
        DIM_P2=triton.next_power_of_2(head_dim),
        IS_FP8=key_cache.dtype == torch.float8_e4m3fn,
    )


def dense_heads(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, as a slice of a projection is."""
    return x if x.stride(-1) == 1 else x.contiguous()
