"""The paged cache on one device or several.

A block is one run of bytes on each device: the keys and values of all layers that live there, one
layer after another. So copying it is one copy, and giving it back is giving back the pages that no
other block in use lies on.

    [num_blocks, layers here × 2 × num_kv_heads × block_size × head_dim]

Owner: GpuRunner, on the engine thread. Which block holds what is the Scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.config import LayerConfig
from .gpu_memory import Memory, open_memory

OpenMemory = Callable[[int, torch.device], Memory]


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each."""

    keys: Tensor
    values: Tensor


class GpuCache:
    """`num_blocks` blocks of `block_size` token slots. Contents are undefined until written."""

    def __init__(
        self,
        layers: Sequence[LayerConfig],
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        open_memory: OpenMemory = open_memory,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._touched = bytearray(num_blocks)  # 1: the block was given to a sequence
        self._shares: list[_Share] = []
        views: dict[int, Cache] = {}
        for device in dict.fromkeys(devices):
            here = [index for index, other in enumerate(devices) if other == device]
            own = [layers[index] for index in here]
            share = _Share(own, device, dtype, num_blocks, block_size, open_memory)
            self._shares.append(share)
            views |= dict(zip(here, share.caches, strict=True))
        self.layers = [views[index] for index in range(len(layers))]
        self.block_bytes = sum(share.block_bytes for share in self._shares)

    def __repr__(self) -> str:
        return f"<GpuCache {self.num_bytes} bytes for {self.num_blocks} blocks>"

    @property
    def num_bytes(self) -> int:
        """Physical memory now."""
        return sum(share.memory.committed_bytes for share in self._shares)

    def touch(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to be written. Raises NoDeviceMemory."""
        for block_id in block_ids:
            if not self._touched[block_id]:
                for share in self._shares:
                    share.memory.commit(share.pages_of(block_id))
                self._touched[block_id] = 1

    def touched(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the ids that hold memory."""
        return [block_id for block_id in block_ids if self._touched[block_id]]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back the pages that only these blocks lie on; their content is lost. Waits for the
        steps that run: they may still write there."""
        for share in self._shares:
            if share.blocks.device.type == "cuda":
                torch.cuda.synchronize(share.blocks.device)
        freed = [block_id for block_id in block_ids if self._touched[block_id]]
        for block_id in freed:
            self._touched[block_id] = 0
        for share in self._shares:
            pages = {page for block_id in freed for page in share.pages_of(block_id)}
            share.memory.release(page for page in sorted(pages) if not self._holds(share, page))

    def view(self, block_id: int) -> memoryview:
        """A copy of the block's bytes, device after device."""
        parts = [share.bytes_of(block_id).cpu() for share in self._shares]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        return memoryview(whole.numpy().data)

    def write(self, block_id: int, content: memoryview) -> None:
        """Fill a block with what `view` gave."""
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        at = 0
        for share in self._shares:
            share.bytes_of(block_id).copy_(whole[at : at + share.block_bytes])
            at += share.block_bytes

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole block, all layers."""
        self.touch([destination])
        for share in self._shares:
            share.blocks[destination].copy_(share.blocks[source])

    def _holds(self, share: _Share, page: int) -> bool:
        return any(self._touched[block_id] for block_id in share.blocks_on(page))


class _Share:
    """What one device holds."""

    def __init__(
        self,
        layers: Sequence[LayerConfig],
        device: torch.device,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        open_memory: OpenMemory,
    ) -> None:
        sizes = [layer.num_kv_heads * block_size * layer.head_dim for layer in layers]
        self.block_bytes = 2 * sum(sizes) * dtype.itemsize
        self.memory = open_memory(num_blocks * self.block_bytes, device)
        self._num_blocks = num_blocks
        self.blocks = self.memory.data.view(dtype).view(num_blocks, 2 * sum(sizes))
        self.caches: list[Cache] = []
        at = 0
        for layer, size in zip(layers, sizes, strict=True):
            shape = (num_blocks, layer.num_kv_heads, block_size, layer.head_dim)
            keys, values = self.blocks[:, at : at + size], self.blocks[:, at + size : at + 2 * size]
            self.caches.append(Cache(keys.view(shape), values.view(shape)))
            at += 2 * size

    def bytes_of(self, block_id: int) -> Tensor:
        """uint8 [block_bytes], on the device."""
        return self.blocks[block_id].view(torch.uint8)

    def pages_of(self, block_id: int) -> range:
        """The pages that the block lies on."""
        begin, end = block_id * self.block_bytes, (block_id + 1) * self.block_bytes
        return range(begin // self.memory.page_bytes, -(-end // self.memory.page_bytes))

    def blocks_on(self, page: int) -> range:
        """The blocks that lie on the page, at least in part."""
        if not self.block_bytes:
            return range(0)
        begin, end = page * self.memory.page_bytes, (page + 1) * self.memory.page_bytes
        return range(begin // self.block_bytes, min(-(-end // self.block_bytes), self._num_blocks))
