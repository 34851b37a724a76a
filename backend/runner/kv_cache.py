"""The tensors of the paged cache, and how many blocks fit.

On the CPU the pool is one anonymous mapping, as large as the budget allows and physically empty:
the system gives a page when it is first written, and `release` gives the pages of a block back
(`madvise`). Keys and values of a group of layers, which is all of them unless some have windows
(kv_layout), lie together in a block, so that giving back one is one call:

    [num_blocks, layers of a group × 2 × num_kv_heads × block_size × head_dim]

Owner: ModelRunner, on the engine thread. Which block holds what is the Scheduler's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.config import ModelConfig
from ..models.decoder import LayerCache
from .kv_layout import KVLayout, layout_of


class KVCache:
    """`num_blocks` blocks of `block_size` token slots. Contents are undefined until written."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        layout: KVLayout | None = None,
    ) -> None:
        layout = layout or layout_of(config, context_length=0)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = layout.block_bytes(block_size, dtype)
        self._memory = _anonymous(num_blocks * self.block_bytes)
        self._touched = bytearray(num_blocks)  # 1: some page of the block was written
        blocks = torch.frombuffer(self._memory, dtype=dtype).view(num_blocks, -1)
        self._blocks: Tensor = blocks
        self.layers = _layer_views(blocks, config, block_size, layout)

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

    def write(self, block_id: int, content: memoryview) -> None:
        """Fill a block with what `view` gave."""
        self.view(block_id)[:] = content

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


def _layer_views(
    blocks: Tensor, config: ModelConfig, block_size: int, layout: KVLayout
) -> list[LayerCache]:
    """Each layer's keys and values. Layers may differ in size, and layers of different groups lie
    at the same place: of different blocks."""
    views: list[LayerCache] = []
    for layer, place in zip(config.layers, layout.places, strict=True):
        shape = (len(blocks), layer.num_kv_heads, block_size, layer.head_dim)
        size = shape[1] * shape[2] * shape[3]
        begin = place.offset * block_size
        keys = blocks[:, begin : begin + size]
        values = blocks[:, begin + size : begin + 2 * size]
        views.append(LayerCache(keys.view(shape), values.view(shape), place.group))
    return views
