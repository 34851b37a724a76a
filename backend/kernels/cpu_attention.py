"""Attention over the paged cache on the CPU, one sequence at a time.

A loop over sequences, not one padded call: it reads each block once, copies nothing that is not
read, and keeps the arithmetic of a sequence independent of who else is in the batch. The query
heads of a group are rows of one matrix product against their shared key head; repeating the keys
instead (`enable_gqa`) is 7 to 15 times slower on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_TILE = 128  # query tokens at a time, so that the scores of a long prompt stay in the cache


@dataclass(frozen=True, slots=True)
class Span:
    """The query tokens of one sequence in a flat batch, and what they may see."""

    start: int  # first row in the query tensor
    num_tokens: int
    seq_len: int  # tokens in the cache, these included
    block_ids: Tensor  # [num_blocks] int64, covering seq_len


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    spans: Sequence[Span],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every query token to the tokens of its own sequence.

    query        [num_tokens, num_heads, head_dim]
    key_cache    [num_blocks, num_kv_heads, block_size, head_dim], any strides; value_cache likewise
    returns      [num_tokens, num_heads, head_dim]

    The i-th query of a span stands at position seq_len - num_tokens + i and sees the keys up to
    itself; with a window, only the last `window` of them. Softmax in float32. With a softcap the
    scores become softcap * tanh(score / softcap); sinks [num_heads] are one more logit per head, in
    the softmax's denominator alone.
    """
    output = torch.empty_like(query)
    shape = _Scores(scale, window, softcap, sinks)
    for span in spans:
        keys = _gather(key_cache, span)
        values = _gather(value_cache, span)
        for begin in range(0, span.num_tokens, QUERY_TILE):
            count = min(QUERY_TILE, span.num_tokens - begin)
            rows = slice(span.start + begin, span.start + begin + count)
            first = span.seq_len - span.num_tokens + begin
            output[rows] = _attend(query[rows], keys, values, first, shape)
    return output


@dataclass(frozen=True, slots=True)
class _Scores:
    """What happens to the products of queries and keys."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _gather(cache: Tensor, span: Span) -> Tensor:
    """The sequence's keys or values as [num_kv_heads, seq_len, head_dim]."""
    blocks = cache.index_select(0, span.block_ids)
    joined = blocks.transpose(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])
    return joined[:, : span.seq_len]


def _attend(query: Tensor, keys: Tensor, values: Tensor, first: int, shape: _Scores) -> Tensor:
    """query [count, num_heads, head_dim] at positions first, first + 1, ..."""
    count, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    end = first + count
    # Keys that no query of the tile sees are not multiplied.
    begin = 0 if shape.window is None else max(0, first - shape.window + 1)
    packed = query.view(count, num_kv_heads, group, head_dim).permute(1, 0, 2, 3)
    rows = packed.reshape(num_kv_heads, count * group, head_dim)
    scores = torch.bmm(rows, keys[:, begin:end].transpose(1, 2)).float() * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if count > 1:
        hidden = _hidden(first, count, begin, end, shape.window)
        tiled = scores.view(num_kv_heads, count, group, end - begin)
        tiled.masked_fill_(hidden, float("-inf"))
    weights = _softmax(scores, shape.sinks, num_kv_heads, count).to(values.dtype)
    mixed = torch.bmm(weights, values[:, begin:end]).view(num_kv_heads, count, group, head_dim)
    return mixed.permute(1, 0, 2, 3).reshape(count, num_heads, head_dim)


def _softmax(scores: Tensor, sinks: Tensor | None, num_kv_heads: int, count: int) -> Tensor:
    """scores [num_kv_heads, count * group, keys]"""
    if sinks is None:
        return scores.softmax(-1)
    per_row = sinks.float().view(num_kv_heads, 1, -1).expand(-1, count, -1)
    sink = per_row.reshape(num_kv_heads, -1, 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


def _hidden(first: int, count: int, begin: int, end: int, window: int | None) -> Tensor:
    """True where a key must not be seen: [count, 1, end - begin]."""
    positions = torch.arange(first, first + count).view(count, 1, 1)
    keys = torch.arange(begin, end)
    hidden = keys > positions
    return hidden if window is None else hidden | (keys <= positions - window)
