"""Helpers of the kernel tests: where they run, how close they must be, and caches full of NaN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET") else "cpu"
IS_FULL = os.environ.get("LLMD_KERNEL_TABLE") == "full"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Equal within the rounding of the tensors' dtype; `scale` for longer sums."""
    limit = TOLERANCE[expected.dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@dataclass(frozen=True)
class Pages:
    """Sequences in a paged cache. What no sequence reaches is NaN."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_tokens: int


def make_pages(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Pages:
    """Blocks in a shuffled order, entries behind a table's end point far outside the cache."""
    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = sum(needed) + 3
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    cache = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    tables = torch.full((len(kv_lens), max([*needed, 1]) + 1), 2**30, dtype=torch.int32)
    for row, (kv_len, count) in enumerate(zip(kv_lens, needed, strict=True)):
        for index in range(count):
            block = free.pop()
            tables[row, index] = block
            filled = min(block_size, kv_len - index * block_size)
            content = torch.randn(2, num_kv_heads, filled, head_dim, generator=generator)
            cache[:, block, :, :filled] = content
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    cache = cache.to(cache_dtype or dtype).to(DEVICE)
    return Pages(
        cache[0],
        cache[1],
        tables.to(DEVICE),
        starts.to(DEVICE),
        torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
        sum(query_lens),
    )
