"""Paged attention and the KV write in Triton equal their twins."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from llmd.backend.kernels import reference
from llmd.backend.kernels.paged_attention import SEGMENT, paged_attention
from llmd.backend.kernels.store_kv import store_kv

from .shapes import DEVICE, IS_FULL, Pages, assert_close, make_pages, randn

QUERIES = {
    "decode": ([1, 1, 1, 1], [1, 15, 17, 33]),
    "ragged": ([3, 0, 19, 1], [3, 0, 40, 16]),
    "mixed": ([1, 33, 1, 2], [70, 33, 1, 31]) if IS_FULL else ([1, 18, 1, 2], [37, 18, 1, 31]),
    "padded": ([1, 1, 0, 1], [9, 0, 0, 32]),
}
COMPACT = [
    # head_dim, group, queries, window, softcap, sinks, block_size
    (64, 1, "decode", None, None, False, 16),
    (64, 4, "mixed", 16, 30.0, True, 16),
    (80, 7, "ragged", None, None, False, 32),
    (96, 2, "mixed", None, None, False, 16),
    (128, 8, "decode", 16, None, True, 16),
    (128, 8, "mixed", None, None, False, 32),
    (128, 2, "padded", 1, 30.0, True, 16),
    (256, 4, "ragged", 4096, None, False, 16),
]
FULL = list(
    itertools.product(
        (64, 80, 96, 128, 256),
        (1, 2, 4, 7, 8),
        QUERIES,
        (None, 1, 16, 4096),
        (None, 30.0),
        (False, True),
        (16, 32, 128),
    )
)
# The full product is hours in the interpreter; each of its pairs of values appears in a few
# hundred of it, and a stride coprime to every factor walks through them evenly.
TABLE = FULL[::23] if IS_FULL else COMPACT


def run_both(
    pages: Pages,
    num_heads: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 2,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = pages.key_cache.shape[-1]
    query = randn(pages.num_tokens + padding, num_heads, head_dim, seed=5, dtype=dtype)
    arguments = (
        query,
        pages.key_cache,
        pages.value_cache,
        pages.block_tables,
        pages.query_start,
        pages.seq_lens,
        head_dim**-0.5,
    )
    deterministic = settings.pop("deterministic", False)
    fast: Any = partial(paged_attention, deterministic=deterministic)
    return fast(*arguments, **settings), reference.paged_attention(*arguments, **settings)


@pytest.mark.parametrize(
    ("head_dim", "group", "queries", "window", "softcap", "has_sinks", "block_size"), TABLE
)
def test_attention_equals_its_twin(
    head_dim: int,
    group: int,
    queries: str,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    block_size: int,
) -> None:
    num_kv_heads = 2 if group < 7 else 1
    pages = make_pages(
        *QUERIES[queries], num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    num_heads = num_kv_heads * group
    sinks = randn(num_heads, seed=8) if has_sinks else None
    actual, expected = run_both(pages, num_heads, window=window, softcap=softcap, sinks=sinks)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "queries"),
    itertools.product((torch.float16, torch.bfloat16), ("decode", "mixed"))
    if IS_FULL
    else [(torch.float16, "decode"), (torch.bfloat16, "padded")],
)
def test_attention_in_half_precision(dtype: torch.dtype, queries: str) -> None:
    pages = make_pages(*QUERIES[queries], num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    assert_close(*run_both(pages, 8, dtype=dtype))


@pytest.mark.parametrize(
    ("kv_len", "window"),
    itertools.product((SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 7, 4097), (None, 40))
    if IS_FULL
    else [(SEGMENT, None), (SEGMENT + 1, None), (2 * SEGMENT + 7, 40)],
)
def test_segments_are_merged(kv_len: int, window: int | None) -> None:
    """With the window, the earlier segments stay empty, and their memory unwritten."""
    pages = make_pages([1, 2], [kv_len, 3], num_kv_heads=1, head_dim=64, block_size=32)
    assert_close(*run_both(pages, 2, window=window, sinks=randn(2, seed=1)))


def test_both_launches_agree() -> None:
    first = 20 if IS_FULL else 5
    pages = make_pages([first, 1], [530, 20], num_kv_heads=1, head_dim=64, block_size=16)
    split, expected = run_both(pages, 2, deterministic=True)
    whole, _ = run_both(pages, 2)
    assert_close(split, expected)
    assert_close(whole, split)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    head_dim, kv_lens, count = 64, [600, 37, 1, 90], 30 if IS_FULL else 9
    pages = make_pages([1, count, 1, 1], kv_lens, num_kv_heads=1, head_dim=head_dim, block_size=16)
    query = randn(count + 3, 2, head_dim, seed=3)
    together = paged_attention(
        query,
        pages.key_cache,
        pages.value_cache,
        pages.block_tables,
        pages.query_start,
        pages.seq_lens,
        0.1,
    )
    for seq, row in ((0, 0), (2, count + 1), (3, count + 2)):
        alone = paged_attention(
            query[row : row + 1],
            pages.key_cache,
            pages.value_cache,
            pages.block_tables[seq : seq + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            pages.seq_lens[seq : seq + 1],
            0.1,
        )
        assert torch.equal(alone[0], together[row])


def test_a_cache_in_fp8_is_read_with_its_scales() -> None:
    pages = make_pages(
        *QUERIES["mixed"],
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.float16,
        cache_dtype=torch.float8_e4m3fn,
    )
    actual, expected = run_both(pages, 4, dtype=torch.float16, key_scale=0.5, value_scale=2.0)
    assert_close(actual, expected, scale=2)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_kv_write_equals_its_twin(cache_dtype: torch.dtype) -> None:
    """Keys and values are slices of one projection; a padded row writes nothing; the other layer
    of the same allocation stays as it was."""
    num_tokens, num_heads, head_dim, block_size = 5, 3, 80, 16
    # Whole numbers, which fp8 holds exactly: the interpreter rounds fp8 wrongly.
    projected = (randn(num_tokens, 3 * num_heads * head_dim, seed=1) * 2).round()
    _, key, value = (
        torch.unflatten(part, -1, (num_heads, head_dim)) for part in projected.chunk(3, dim=-1)
    )
    slots = torch.tensor([17, -1, 0, 63, 31], device=DEVICE)
    shape = (2, 2, 4, num_heads, block_size, head_dim)
    actual = torch.full(shape, 7.0, device=DEVICE).to(cache_dtype)
    expected = actual.clone()
    store_kv(key, value, actual[0, 0], actual[0, 1], slots, 0.5, 2.0)
    reference.store_kv(key, value, expected[0, 0], expected[0, 1], slots, 0.5, 2.0)
    assert torch.equal(actual.float(), expected.float())
    assert (actual[1].float() == 7.0).all()
