"""qk-norm, RoPE and the KV write in one pass, in Triton; twins: `reference.rotary_store`, `rotary`.

One program per (token, head). A head is held as three pieces: the first and the second partners of
the rotated pairs, and the dimensions that pass through; so the split-halves and the interleaved
form differ in two addresses, and no data moves between lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .store_kv import dense_heads, to_cache


@triton.jit
def rotary_kernel(
    q_out_ptr,
    k_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    value_cache_ptr,
    slot_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    q_out_stride_t,
    k_out_stride_t,
    cache_stride_b,
    cache_stride_h,
    cache_stride_s,
    cos_stride,
    eps,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_STORE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """k_out_ptr is the key cache with IS_STORE, else a tensor like q_out's."""
    Q_DTYPE: tl.constexpr = q_out_ptr.dtype.element_ty
    K_DTYPE: tl.constexpr = k_out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pairs = tl.arange(0, HALF_P2)
    is_pair = pairs < HALF
    rest = 2 * HALF + tl.arange(0, REST_P2)
    is_rest = rest < HEAD_DIM
    first_dims = pairs
    second_dims = pairs + HALF
    if IS_INTERLEAVED:
        first_dims = 2 * pairs
        second_dims = 2 * pairs + 1

    is_key = head >= NUM_HEADS
    source = q_ptr + token * q_stride_t + head * q_stride_h
    weight_ptr = q_weight_ptr
    if is_key:
        source = k_ptr + token * k_stride_t + (head - NUM_HEADS) * k_stride_h
        weight_ptr = k_weight_ptr
    first = tl.load(source + first_dims, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + second_dims, mask=is_pair, other=0.0).to(tl.float32)
    passed = tl.load(source + rest, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        squares += tl.sum(passed * passed, 0)
        shrink = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        first *= shrink * tl.load(weight_ptr + first_dims, mask=is_pair, other=0.0).to(tl.float32)
        second *= shrink * tl.load(weight_ptr + second_dims, mask=is_pair, other=0.0).to(tl.float32)
        passed *= shrink * tl.load(weight_ptr + rest, mask=is_rest, other=0.0).to(tl.float32)

    cos = tl.load(cos_ptr + token * cos_stride + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * cos_stride + pairs, mask=is_pair, other=0.0)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if is_key:
        if IS_STORE:
            slot = tl.load(slot_ptr + token)
            if slot >= 0:
                place = (slot // BLOCK_SIZE) * cache_stride_b
                place += (slot % BLOCK_SIZE) * cache_stride_s + (head - NUM_HEADS) * cache_stride_h
                first_key = to_cache(turned_first, key_scale, IS_FP8).to(K_DTYPE)
                second_key = to_cache(turned_second, key_scale, IS_FP8).to(K_DTYPE)
                passed_key = to_cache(passed, key_scale, IS_FP8).to(K_DTYPE)
                tl.store(k_out_ptr + place + first_dims, first_key, mask=is_pair)
                tl.store(k_out_ptr + place + second_dims, second_key, mask=is_pair)
                tl.store(k_out_ptr + place + rest, passed_key, mask=is_rest)
                dims = tl.arange(0, DIM_P2)
                real = dims < HEAD_DIM
                value_head = v_ptr + token * v_stride_t + (head - NUM_HEADS) * v_stride_h
                value = tl.load(value_head + dims, mask=real, other=0.0)
                value = to_cache(value, value_scale, IS_FP8)
                tl.store(value_cache_ptr + place + dims, value, mask=real)
        else:
            place = k_out_ptr + token * k_out_stride_t + (head - NUM_HEADS) * HEAD_DIM
            tl.store(place + first_dims, turned_first.to(K_DTYPE), mask=is_pair)
            tl.store(place + second_dims, turned_second.to(K_DTYPE), mask=is_pair)
            tl.store(place + rest, passed.to(K_DTYPE), mask=is_rest)
    else:
        place = q_out_ptr + token * q_out_stride_t + head * HEAD_DIM
        tl.store(place + first_dims, turned_first.to(Q_DTYPE), mask=is_pair)
        tl.store(place + second_dims, turned_second.to(Q_DTYPE), mask=is_pair)
        tl.store(place + rest, passed.to(Q_DTYPE), mask=is_rest)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As `reference.rotary`."""
    q_out, k_out = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )
    _launch(q, k, None, cos, sin, q_out, k_out, None, None, interleaved, None, None, 0.0, 1.0, 1.0)
    return q_out, k_out


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """As `reference.rotary_store`. Both norms or none."""
    assert (q_weight is None) == (k_weight is None)
    assert key_cache.stride() == value_cache.stride()
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(
        q,
        k,
        dense_heads(v),
        cos,
        sin,
        q_out,
        key_cache,
        value_cache,
        slot_mapping,
        interleaved,
        q_weight,
        k_weight,
        eps,
        key_scale,
        value_scale,
    )
    return q_out


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor | None,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    key_scale: float,
    value_scale: float,
) -> None:
    q, k = dense_heads(q), dense_heads(k)
    num_tokens, num_heads, head_dim = q.shape
    half = cos.shape[1]
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    if num_tokens == 0:
        return
    is_store = value_cache is not None
    values = k if v is None else v
    rotary_kernel[(num_tokens, num_heads + k.shape[1])](
        q_out,
        k_out,
        q,
        k,
        values,
        cos,
        sin,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        k_out if value_cache is None else value_cache,
        cos if slot_mapping is None else slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        values.stride(0),
        values.stride(1),
        q_out.stride(0),
        k_out.stride(0),
        *(k_out.stride()[:3] if is_store else (0, 0, 0)),
        cos.stride(0),
        eps,
        key_scale,
        value_scale,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_P2=triton.next_power_of_2(half),
        REST_P2=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        DIM_P2=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k_out.shape[2] if is_store else 1,
        IS_INTERLEAVED=interleaved,
        HAS_NORM=q_weight is not None,
        IS_STORE=is_store,
        IS_FP8=k_out.dtype == torch.float8_e4m3fn,
        num_warps=1,
    )
