"""Drawing the next token, in plain torch: the specification of the sampling kernel.

argmax(logit / temperature + noise) with Gumbel noise draws from the softmax (Maddison et al. 2014),
and needs no normalised probabilities. The noise is a stateless hash of (seed, position, token id):
the same seed gives the same token in any batch, after a preemption and on another device. It is
the definition of `runner.sampler`, which draws on the CPU: splitmix64 (Steele et al. 2014), chained
over the three; float64 from there on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix(value: Tensor) -> Tensor:
    """A step of splitmix64 on 64-bit words held in int64."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(value: Tensor, count: int) -> Tensor:
    """To the right, zeros coming in."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [B, V], of seeds [B], positions [B] (int64), token_ids [V]."""
    base = mix(mix(seeds) + positions)
    bits = mix(base[:, None] + token_ids)
    # 53 bits and a half: strictly between 0 and 1, so that no logarithm below is infinite.
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
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
    kept = filter_logits(logits.double(), top_k, top_p, min_p)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(seeds, positions, token_ids)
    hot = temperature > 0
    scaled = kept / torch.where(hot, temperature, 1.0).double()[:, None] + noise * hot[:, None]
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
