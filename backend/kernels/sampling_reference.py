"""Drawing the next token, in plain torch: the specification of the sampling kernel.

argmax(logit / temperature + noise) with Gumbel noise draws from the softmax (Maddison et al. 2014),
and needs no normalised probabilities. The noise is a stateless hash of (seed, position, token id):
the same seed gives the same token in any batch, after a preemption and on another device. The hash
is two rounds of MurmurHash3's 32-bit finaliser (Appleby, public domain), in integers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_SPREAD = 0x9E3779B1  # 2^32 / golden ratio, odd: neighbouring ids land far apart


def mix(h: Tensor) -> Tensor:
    """MurmurHash3's finaliser on 32-bit words held in int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [B, V], of seeds [B], positions [B] (int64) and token_ids [V]."""
    low = mix((seeds & _WORD) ^ mix(positions & _WORD))
    high = mix(((seeds >> 32) & _WORD) ^ low ^ _SPREAD)
    h = mix(((token_ids * _SPREAD) & _WORD) ^ low[:, None])
    h = mix(h ^ high[:, None])
    # 23 bits and a half: every value is exact in fp32 and lies strictly between 0 and 1, so that
    # no logarithm below is infinite.
    uniform = ((h >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    has_filters: bool = True,
) -> Tensor:
    """One token id per row, int64 [B].

    logits       [B, V], penalties, biases and masks already applied (-inf forbids)
    temperature  [B] fp32; 0 is argmax, the lowest id among equals
    top_k        [B] int32, <= 0 is off; top_p [B] fp32, 1 is off; min_p [B] fp32, 0 is off
    seeds        [B] int64; positions [B] int64: of the token that is drawn

    has_filters  False: the host knows that no row has a filter; a fast form then saves a pass

    Filters see the softmax at temperature 1, in the order top_k, top_p, min_p; each sees what the
    one before it left, renormalised. Temperature comes last.
    """
    wide = logits.float()
    kept = filter_logits(wide, top_k, top_p, min_p)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(seeds, positions, token_ids)
    hot = temperature > 0
    scaled = kept / torch.where(hot, temperature, 1.0)[:, None] + noise * hot[:, None]
    return scaled.argmax(dim=-1)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits [B, V] with -inf for what the filters drop. Arguments as in `sample`.

    Equal logits stand in the order of their ids, and exactly k pass top_k. top_p keeps the
    smallest set whose probability reaches p, at least one token.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[1]
    rank = torch.arange(vocab_size, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab_size)
    kept = order.values.masked_fill(rank >= limit[:, None], float("-inf"))
    probs = kept.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0)
    kept = kept.masked_fill(dropped, float("-inf"))
    dropped = kept < kept[:, :1] + torch.log(min_p)[:, None]
    kept = kept.masked_fill(dropped, float("-inf"))
    return torch.empty_like(kept).scatter_(1, order.indices, kept)
