"""Paged attention in Triton: prefill, decode and mixed batches; twin: `reference.paged_attention`.

    sequence's rows ≤ rows of a small tile ──▶ split:  one program per (sequence, kv head, segment
    (decode, verified drafts)                          of SEGMENT keys), then one merge
    more                                   ──▶ whole:  one program per (tile of queries, kv head)

A tile's rows are query tokens × the G query heads that share a kv head, so that a decode step of a
grouped model fills the matrix unit's 16 rows instead of one. Both launches walk the keys in tiles
aligned to absolute positions, with a running maximum and sum in fp32.

**A row's result does not depend on the batch.** Which launch takes a sequence is decided by its own
number of rows; segments have a fixed *size*, so their number depends on the sequence's own length;
a tile that a row cannot see changes neither its maximum nor its sums. With `deterministic`, the
split launch takes every sequence: then prefill, decode and recomputation agree too, for the price
of the partial results' memory.

Nothing behind a sequence's end is loaded: blocks are not zeroed, and 0 · NaN is NaN.

Sources: FlashAttention, Dao et al. 2022, and its online softmax, Milakov and Gimelshein 2018;
splitting the keys of a decode, Dao et al. 2023 (Flash-Decoding); packing the heads of a group,
Shazeer 2019 and Ainslie et al. 2023 for what a group is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dot import capability_of, dot

LOG2E = tl.constexpr(1.4426950408889634)
SEGMENT = 512  # keys; the partial results then cost 3 % of the keys' and values' own traffic
MERGE_TILE = 8  # segments that the merge adds up at once


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes of one launch; the shipped ones are checked for spills (tests/gpu)."""

    block_m: int  # rows: query tokens × padded group
    tile: int  # keys
    num_warps: int
    num_stages: int


def config_for(
    head_dim: int, is_split: bool, element_bytes: int = 2, capability: int = 0
) -> Config:
    """The shipped configuration. fp32 takes half the tile: shared memory is in bytes.

    The many rows' launch takes the long tile where operands and, from sm_100 on, results stay out
    of the registers (90 and 100); elsewhere it would spill.
    """
    wide = head_dim > 128 or element_bytes > 2
    if is_split:
        return Config(16, 32 if wide else 64, 4, 2)
    has_room = capability in (90, 100) and not wide
    return Config(64, 64 if has_room else 32, 8 if wide else 4, 2)


@triton.jit
def attend(
    q,
    key_cache_ptr,
    value_cache_ptr,
    table_ptr,
    kv_head,
    begin,
    end,
    seq_len,
    positions,
    scale,
    softcap,
    key_scale,
    window,
    cache_stride_b,
    cache_stride_h,
    cache_stride_s,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Unnormalised attention of the rows q [BLOCK_M, DIM_P2] to the keys [begin, end).

    Returns (acc, running maximum in units of log2, sum); a row that sees nothing has -inf and 0.
    """
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_P2], tl.float32)
    dims = tl.arange(0, DIM_P2)
    tile_keys = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        keys = start + tile_keys
        real = keys < seq_len
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        place = block * cache_stride_b + kv_head * cache_stride_h
        place += (keys % BLOCK_SIZE) * cache_stride_s
        in_cache = place[:, None] + dims[None, :]
        loadable = real[:, None] & (dims[None, :] < HEAD_DIM)

        k = tl.load(key_cache_ptr + in_cache, mask=loadable, other=0.0).to(q.dtype)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, TILE], tl.float32)) * (scale * key_scale)
        if HAS_SOFTCAP:
            # tanh by way of exp stays finite: exp overflows to inf, and 2 / inf is 0.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        visible = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores * LOG2E, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite_max[:, None])
        shrink = tl.exp2(row_max - finite_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        v = tl.load(value_cache_ptr + in_cache, mask=loadable, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None]
        acc = dot(weights.to(q.dtype), v, acc)
    return acc, row_max, row_sum


@triton.jit
def with_sink(acc, row_max, row_sum, sink):
    """One more logit in the denominator."""
    sink = sink * LOG2E
    new_max = tl.maximum(row_max, sink)
    shrink = tl.exp2(row_max - new_max)
    return acc * shrink[:, None], row_sum * shrink + tl.exp2(sink - new_max)


@triton.jit
def sequence_of_tile(query_start_ptr, tile_id, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that a tile of queries belongs to, by bisection.

    Sequence b's tiles begin at query_start[b] // BLOCK_Q + b; that leaves room for the ragged end
    of each without a table, and some tiles in between belong to no one.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= tile_id:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def paged_attention_kernel(
    out_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    num_seqs,
    scale,
    softcap,
    key_scale,
    value_scale,
    window,
    max_split_rows,
    scratch_rows,
    num_segments,
    table_stride,
    query_stride_t,
    query_stride_h,
    out_stride_t,
    out_stride_h,
    cache_stride_b,
    cache_stride_h,
    cache_stride_s,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
):
    """Sequences of at most max_split_rows rows are the split launch's, the others the whole's."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_P2
    tile_id = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = sequence_of_tile(query_start_ptr, tile_id, num_seqs, BLOCK_Q)
    first = tl.load(query_start_ptr + seq)
    num_rows = tl.load(query_start_ptr + seq + 1) - first
    seq_len = tl.load(seq_lens_ptr + seq)
    first_row = (tile_id - (first // BLOCK_Q + seq)) * BLOCK_Q
    if first_row >= num_rows or seq_len == 0:
        return
    if (num_rows <= max_split_rows) != IS_SPLIT:
        return

    lanes = tl.arange(0, BLOCK_M)
    rows = first_row + lanes // GROUP_P2
    heads = kv_head * GROUP + lanes % GROUP_P2
    real = (rows < num_rows) & (lanes % GROUP_P2 < GROUP)
    positions = seq_len - num_rows + rows
    tokens = (first + rows).to(tl.int64)
    dims = tl.arange(0, DIM_P2)
    real_dims = real[:, None] & (dims[None, :] < HEAD_DIM)

    first_position = seq_len - num_rows + first_row
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    if IS_SPLIT:
        segment = tl.program_id(2)
        begin = tl.maximum(begin, segment * SEGMENT_KEYS)
        end = tl.minimum(end, (segment + 1) * SEGMENT_KEYS)
        if begin >= end:
            return

    q = tl.load(
        query_ptr + tokens[:, None] * query_stride_t + heads[:, None] * query_stride_h + dims,
        mask=real_dims,
        other=0.0,
    )
    acc, row_max, row_sum = attend(
        q,
        key_cache_ptr,
        value_cache_ptr,
        block_tables_ptr + seq.to(tl.int64) * table_stride,
        kv_head,
        begin,
        end,
        seq_len,
        positions,
        scale,
        softcap,
        key_scale,
        window,
        cache_stride_b,
        cache_stride_h,
        cache_stride_s,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HEAD_DIM,
        DIM_P2,
        BLOCK_SIZE,
        BLOCK_M,
        TILE,
    )
    if IS_SPLIT:
        scratch = tokens
        if scratch_rows > 0:
            scratch = (seq * scratch_rows + rows).to(tl.int64)
        place = (scratch * NUM_HEADS + heads) * num_segments + tl.program_id(2)
        tl.store(partial_max_ptr + place, row_max, mask=real)
        tl.store(partial_sum_ptr + place, row_sum, mask=real)
        tl.store(partial_ptr + place[:, None] * DIM_P2 + dims[None, :], acc, mask=real[:, None])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads, mask=real, other=0.0).to(tl.float32)
            acc, row_sum = with_sink(acc, row_max, row_sum, sink)
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
        out = acc * (value_scale / row_sum)[:, None]
        tl.store(
            out_ptr + tokens[:, None] * out_stride_t + heads[:, None] * out_stride_h + dims,
            out.to(out_ptr.dtype.element_ty),
            mask=real_dims,
        )


@triton.jit
def merge_kernel(
    out_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    num_seqs,
    value_scale,
    window,
    max_split_rows,
    scratch_rows,
    num_segments,
    out_stride_t,
    out_stride_h,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Add up one row's segments, SEGMENTS at a time in their order, whatever the batch holds."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    seq = low
    first = tl.load(query_start_ptr + seq)
    num_rows = tl.load(query_start_ptr + seq + 1) - first
    seq_len = tl.load(seq_lens_ptr + seq)
    if token - first >= num_rows or seq_len == 0 or num_rows > max_split_rows:
        return

    # The segments that the row's tile wrote: its bounds are those of the tile's rows together.
    first_row = (token - first) // BLOCK_Q * BLOCK_Q
    first_position = seq_len - num_rows + first_row
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    last_segment = (end - 1) // SEGMENT_KEYS
    first_segment = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        first_segment = begin // SEGMENT_KEYS

    dims = tl.arange(0, DIM_P2)
    scratch_row = token if scratch_rows == 0 else seq * scratch_rows + token - first
    base = (scratch_row.to(tl.int64) * NUM_HEADS + head) * num_segments
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIM_P2], tl.float32)
    for start in range(first_segment // SEGMENTS * SEGMENTS, last_segment + 1, SEGMENTS):
        segments = start + tl.arange(0, SEGMENTS)
        written = (segments >= first_segment) & (segments <= last_segment)
        place = base + segments
        maxima = tl.load(partial_max_ptr + place, mask=written, other=float("-inf"))
        sums = tl.load(partial_sum_ptr + place, mask=written, other=0.0)
        partial = tl.load(
            partial_ptr + place[:, None] * DIM_P2 + dims[None, :], mask=written[:, None], other=0.0
        )
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(maxima - finite_max)
        shrink = tl.exp2(row_max - finite_max)
        row_sum = row_sum * shrink + tl.sum(sums * weights, 0)
        acc = acc * shrink[:, None] + tl.sum(partial * weights[:, None], 0)[None, :]
        row_max = new_max
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        acc, row_sum = with_sink(acc, row_max, row_sum, sink)
    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    out = acc * (value_scale / row_sum)[:, None]
    place = token.to(tl.int64) * out_stride_t + head * out_stride_h
    real = (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + place + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=real)


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
    """As `reference.paged_attention`.

    max_query_len, max_seq_len  bounds that the host knows; without them the device is asked, which
                                waits for it, and a captured graph must not. They may be too large.
    """
    if max_query_len is None:
        max_query_len = int((query_start[1:] - query_start[:-1]).max())
    if max_seq_len is None:
        max_seq_len = int(seq_lens.max())
    out = torch.zeros_like(query)
    if query.shape[0] == 0 or max_query_len == 0 or max_seq_len == 0:
        return out

    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    num_seqs = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    group_p2, dim_p2 = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    assert query.stride(-1) == 1
    assert key_cache.stride() == value_cache.stride()
    capability, element_bytes = capability_of(query.device), query.element_size()
    small = config_for(head_dim, True, element_bytes, capability)
    large = config_for(head_dim, False, element_bytes, capability)
    small_m = max(small.block_m, group_p2)
    small_q = small_m // group_p2
    max_split_rows = max_query_len if deterministic else small_q
    num_segments = triton.cdiv(max_seq_len, SEGMENT)

    # Partial results lie by (sequence, row of it), or by token where that is less.
    scratch_rows = min(max_query_len, max_split_rows)
    num_scratch = num_seqs * scratch_rows
    if num_scratch > num_tokens:
        num_scratch, scratch_rows = num_tokens, 0

    def scratch(*tail: int) -> Tensor:
        rows = num_scratch * num_heads * num_segments
        return torch.empty(rows, *tail, dtype=torch.float32, device=query.device)

    def launch(
        config: Config, block_m: int, is_split: bool, partial: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        num_tiles = num_tokens // (block_m // group_p2) + num_seqs
        paged_attention_kernel[(num_tiles, num_kv_heads, num_segments if is_split else 1)](
            out,
            *partial,
            query,
            key_cache,
            value_cache,
            block_tables,
            query_start,
            seq_lens,
            query if sinks is None else sinks,
            num_seqs,
            scale,
            softcap or 0.0,
            key_scale,
            value_scale,
            window or 0,
            max_split_rows,
            scratch_rows,
            num_segments,
            block_tables.stride(0),
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            *key_cache.stride()[:3],
            IS_SPLIT=is_split,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            NUM_HEADS=num_heads,
            GROUP=group,
            GROUP_P2=group_p2,
            HEAD_DIM=head_dim,
            DIM_P2=dim_p2,
            BLOCK_SIZE=block_size,
            BLOCK_M=block_m,
            TILE=config.tile,
            SEGMENT_KEYS=SEGMENT,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    if max_query_len > max_split_rows:
        launch(large, max(large.block_m, group_p2), False, (out, out, out))
    partial = (scratch(dim_p2), scratch(), scratch())
    launch(small, small_m, True, partial)
    merge_kernel[(num_tokens, num_heads)](
        out,
        *partial,
        query_start,
        seq_lens,
        query if sinks is None else sinks,
        num_seqs,
        value_scale,
        window or 0,
        max_split_rows,
        scratch_rows,
        num_segments,
        out.stride(0),
        out.stride(1),
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_P2=dim_p2,
        BLOCK_Q=small_q,
        TILE=small.tile,
        SEGMENT_KEYS=SEGMENT,
        SEGMENTS=MERGE_TILE,
        num_warps=1,
    )
    return out
