"""The tensors of the paged cache, and how many blocks fit.

On the CPU the pool is one anonymous mapping, as large as the budget allows and physically empty:
the system gives a page when it is first written, and `release` gives the pages of a block back
(`madvise`). Keys and values of all layers lie together in a block, so that giving back one is
one call:

    [num_blocks, layers × 2 × num_kv_heads × block_size × head_dim]

Owner: ModelRunner, on the engine thread. Which block holds what is the Scheduler's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.config import ModelConfig
from ..models.decoder import LayerCache, kv_bytes_per_token


class KVCache:
    """`num_blocks` blocks of `block_size` token slots. Contents are undefined until written."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, num_blocks: int, block_size: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_size * kv_bytes_per_token(config, dtype)
        self._memory = _anonymous(num_blocks * self.block_bytes)
        self._touched = bytearray(num_blocks)  # 1: some page of the block was written
        blocks = torch.frombuffer(self._memory, dtype=dtype).view(num_blocks, -1)
        self._blocks: Tensor = blocks
        self.layers = _layer_views(blocks, config, block_size)

    def __repr__(self) -> str:
        return f"<KVCache {self.num_bytes} bytes in {self.num_blocks} blocks>"

    @property
    def num_bytes(self) -> int:
        """Physical memory, up to the pages at the edges of blocks."""
        return self._touched.count(1) * self.block_bytes

    def touch(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to be written."""
        for block_id in block_ids:
            self._touched[block_id] = 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give the memory of these blocks back to the system; their content is lost."""
        for block_id in block_ids:
            if self._touched[block_id]:
                self._advise_away(block_id)
                self._touched[block_id] = 0

    def touched(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the ids that hold memory."""
        return [block_id for block_id in block_ids if self._touched[block_id]]

    def view(self, block_id: int) -> memoryview:
        """The bytes of a block, as they lie in memory."""
        start = block_id * self.block_bytes
        return memoryview(self._memory)[start : start + self.block_bytes]

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole block, all layers."""
        self.touch([destination])
        self._blocks[destination].copy_(self._blocks[source])

    def _advise_away(self, block_id: int) -> None:
        page = mmap.PAGESIZE
        begin = -(-block_id * self.block_bytes // page) * page
        end = (block_id + 1) * self.block_bytes // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _anonymous(size: int) -> mmap.mmap:
    """Memory that is nobody's file. Private, not mmap's default: what is shared belongs to the
    system's page cache, and giving it back there frees nothing."""
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(-1, size, flags=flags)
    return mmap.mmap(-1, size)


def _layer_views(blocks: Tensor, config: ModelConfig, block_size: int) -> list[LayerCache]:
    """Each layer's keys and values. Layers may differ in size, and have none or another's."""
    views: list[LayerCache] = []
    at = 0
    for layer in config.layers:
        if layer.shares_kv_of is not None:
            views.append(views[layer.shares_kv_of])
            continue
        shape = (len(blocks), layer.num_kv_heads, block_size, layer.head_dim)
        size = shape[1] * shape[2] * shape[3]
        keys, values = blocks[:, at : at + size], blocks[:, at + size : at + 2 * size]
        views.append(LayerCache(keys.view(shape), values.view(shape)))
        at += 2 * size
    return views
