"""What every kernel computes, in plain torch: the specification that the fast forms are held to.

Clear and exact before fast: scores, softmax, norms and rotations are in fp32 whatever the inputs'
dtype, and results are rounded once, at the end. A fast form may differ in the last bits, never in
what it reads: a cache slot that no block table reaches, or that lies behind the end of its
sequence, may hold NaN.

Shapes, by letter: T tokens of the step (ragged, all sequences one after another, perhaps padded at
the end), B sequences, Hq query heads, Hkv key-value heads (Hq = Hkv * G), D head_dim.

One layer's cache is two tensors [num_blocks, Hkv, block_size, D]. Not [.., block_size, Hkv, D]: a
head's slots lie together, so that attention streams them, on the CPU and on the GPU.

Sources: blocks and tables, Kwon et al. 2023, section 4; RMSNorm, Zhang and Sennrich 2019; RoPE, Su
et al. 2021; attention sinks, the gpt-oss model card; the Gumbel-max trick, Maddison et al. 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # the largest float8_e4m3fn


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write this step's keys and values into their slots, in place.

    key, value              [T, Hkv, D], any strides
    key_cache, value_cache  [num_blocks, Hkv, block_size, D]; the inputs' dtype or float8_e4m3fn
    slot_mapping            [T] int64: block_id * block_size + offset, or -1 for a padded row
    key_scale, value_scale  what a cached fp8 number is multiplied with when it is read
    """
    real = slot_mapping >= 0  # a captured CUDA graph runs at a fixed batch size, padded
    slots = slot_mapping[real]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = _to_cache(key[real], key_cache.dtype, key_scale)
    value_cache[blocks, :, offsets] = _to_cache(value[real], value_cache.dtype, value_scale)


def _to_cache(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    *,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of this step's tokens to all cached tokens of their own sequence.

    query         [T, Hq, D]; rows behind query_start[-1] are padding, and give zeros
    key_cache     [num_blocks, Hkv, block_size, D], this step's keys already stored; so value_cache
    block_tables  [B, max_blocks] int32; entries behind a sequence's last block are never read
    query_start   [B + 1] int32: sequence b owns the rows query_start[b] to query_start[b + 1]
    seq_lens      [B] int32: tokens of the sequence, this step's included; 0 for a padded sequence
    window        a key is visible iff query_position - window < key_position <= query_position
    softcap       scores become softcap * tanh(score / softcap)
    sinks         [Hq]: one more logit per head, in the softmax's denominator alone

    The i-th of a sequence's n rows has the position seq_len - n + i. Returns [T, Hq, D]. The last
    three arguments are of use to a fast form alone.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    out = torch.zeros_like(query)
    for b, seq_len in enumerate(seq_lens.tolist()):
        first, last = int(query_start[b]), int(query_start[b + 1])
        if first == last or seq_len == 0:
            continue
        positions = torch.arange(seq_len - (last - first), seq_len, device=query.device)
        begin = 0 if window is None else max(int(positions[0]) - window + 1, 0)
        keys = torch.arange(begin, seq_len, device=query.device)
        blocks = block_tables[b].long()[keys // block_size]
        k = key_cache[blocks, :, keys % block_size].float() * key_scale  # [keys, Hkv, D]
        v = value_cache[blocks, :, keys % block_size].float() * value_scale
        q = query[first:last].float().view(last - first, num_kv_heads, -1, head_dim)

        scores = torch.einsum("qhgd,khd->hgqk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = keys <= positions[:, None]
        if window is not None:
            visible &= keys > positions[:, None] - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, last - first, 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        attended = torch.einsum("hgqk,khd->qhgd", weights, v)
        out[first:last] = attended.reshape(last - first, num_heads, head_dim).to(out.dtype)
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; [T, H], weight [H].

    With a residual, x + residual is what is normalised, and comes back beside the result: it is
    rounded to x's dtype first, as if it had been stored in between.
    """
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), x)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of each head by the angle of the token's position.

    q, k      [T, Hq, D], [T, Hkv, D]
    cos, sin  [T, R / 2] fp32, of this step's positions; dimensions R to D pass through

    The i-th pair is (i, i + R / 2), or with `interleaved` (2 i, 2 i + 1).
    """
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotated_dim = 2 * cos.shape[-1]
    turned, passed = x[..., :rotated_dim].float(), x[..., rotated_dim:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), passed], dim=-1)


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
    """All that lies between the QKV projection and attention, in one pass.

    q and k are normalised per head where weights [D] are given (qk-norm), then rotated; k and v go
    into the cache. Returns the rotated q [T, Hq, D]. Arguments as in `rotary` and `store_kv`.
    The norm's result stays in fp32 for the rotation: one pass rounds once.
    """
    wide_q = _head_norm(q.float(), q_weight, eps)
    wide_k = _head_norm(k.float(), k_weight, eps)
    rotated_q, rotated_k = rotary(wide_q, wide_k, cos, sin, interleaved)
    store_kv(rotated_k, v, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return rotated_q.to(q.dtype)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a packed projection: [T, 2 I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu, as Gemma has it: [T, 2 I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def apply_token_mask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Forbid tokens, in place.

    logits   [B, V]
    bitmask  [M, ceil(V / 32)] int32, as llguidance fills it: bit t % 32 of word t // 32 allows t
    rows     [M] int32: the row of logits that each mask is for
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = bitmask[:, token_ids // 32]
    allowed = (words >> (token_ids % 32).to(torch.int32)) & 1 != 0
    index = rows.long()
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))
