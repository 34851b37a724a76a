"""Elastic KV memory: the driver's calls on a stand-in that refuses what the driver would refuse."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmd.backend.models.config import LayerConfig
from llmd.backend.runner.gpu_cache import GpuCache
from llmd.backend.runner.gpu_memory import (
    FixedMemory,
    NoDeviceMemory,
    VirtualMemory,
    open_memory,
)

PAGE = 4096
CPU = torch.device("cpu")


class FakeDriver:
    """Reserved ranges, handles and mappings of one device with `room` bytes. A call that the CUDA
    driver would refuse fails an assertion; running out of memory is a status, as there."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")
    CUdeviceptr = int

    def __init__(self, room: int) -> None:
        self.room = room
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # address to handle
        self.accessible: set[int] = set()
        self._next = 1

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=None, flags=None)

    def cuMemGetAllocationGranularity(self, properties: Any, which: str) -> tuple[int, int]:
        assert (properties.type, properties.location.type) == ("pinned", "device")
        return 0, PAGE

    def cuMemAddressReserve(self, size: int, align: int, near: int, flags: int) -> tuple[int, int]:
        assert size % PAGE == 0
        address = 1 << 40
        self.reserved[address] = size
        return 0, address

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int | None]:
        assert size % PAGE == 0
        if (len(self.handles) + 1) * PAGE > self.room:
            return 2, None  # CUDA_ERROR_OUT_OF_MEMORY
        self._next += 1
        self.handles.add(self._next)
        return 0, self._next

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        (base,) = self.reserved
        assert base <= address < base + self.reserved[base] and address % PAGE == 0
        assert handle in self.handles and address not in self.mapped and offset == 0
        self.mapped[address] = handle
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, wanted: list[Any], count: int) -> tuple[int]:
        assert address in self.mapped and count == len(wanted) == 1
        assert wanted[0].flags == "rw" and wanted[0].location.id == 3
        self.accessible.add(address)
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        del self.mapped[address]
        self.accessible.discard(address)
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        assert handle not in self.mapped.values()
        self.handles.remove(handle)
        return (0,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert not self.mapped and self.reserved.pop(address) == size
        return (0,)


class HostRange(VirtualMemory):
    """The range, with a tensor of the host in the place of the device's."""

    def _tensor(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


def layers(count: int = 2) -> list[LayerConfig]:
    return [LayerConfig(num_kv_heads=2, head_dim=8, rope=None) for _ in range(count)]


def make_cache(driver: FakeDriver, num_blocks: int = 12) -> GpuCache:
    """Blocks of 2 layers × 2 × 2 heads × 4 slots × 8 × 4 bytes = 1024: four to a page."""
    opened = lambda size, device: HostRange(driver, size, 3)  # noqa: E731
    return GpuCache(layers(), [CPU, CPU], torch.float32, num_blocks, 4, opened)


def test_pages_are_backed_when_their_blocks_are_used() -> None:
    driver = FakeDriver(room=10 * PAGE)
    cache = make_cache(driver)
    assert cache.block_bytes == 1024
    assert cache.num_bytes == PAGE  # the first page stays, so that a tensor can be made over it
    cache.touch([5])
    assert cache.num_bytes == 2 * PAGE
    assert driver.accessible == {1 << 40, (1 << 40) + PAGE}
    cache.touch([4, 6, 0])
    assert cache.num_bytes == 2 * PAGE


def test_a_page_goes_when_the_last_block_on_it_does() -> None:
    driver = FakeDriver(room=10 * PAGE)
    cache = make_cache(driver)
    cache.touch(range(4, 12))
    cache.release([4, 5, 6])
    assert cache.num_bytes == 3 * PAGE
    cache.release([7])
    assert cache.num_bytes == 2 * PAGE
    assert len(driver.handles) == 2
    cache.release([0])  # was never touched
    assert cache.touched(range(12)) == [8, 9, 10, 11]


def test_out_of_memory_names_what_was_asked_and_leaves_no_handle() -> None:
    driver = FakeDriver(room=2 * PAGE)
    cache = make_cache(driver)
    cache.touch([4])
    with pytest.raises(NoDeviceMemory, match="no 4096 bytes left"):
        cache.touch([8])
    assert len(driver.handles) == len(driver.mapped) == 2
    cache.release([4])
    cache.touch([8])


def test_all_is_given_back_at_the_end() -> None:
    driver = FakeDriver(room=10 * PAGE)
    memory = HostRange(driver, 5 * PAGE - 100, 3)
    memory.commit(range(5))
    memory.close()
    assert not driver.handles and not driver.mapped and not driver.reserved


@pytest.mark.parametrize("seed", range(5))
def test_what_is_touched_is_always_backed(seed: int) -> None:
    chance = random.Random(seed)
    driver = FakeDriver(room=100 * PAGE)
    cache = make_cache(driver, num_blocks=30)
    held: set[int] = set()
    for _ in range(200):
        ids = chance.sample(range(30), 4)
        if chance.random() < 0.5:
            cache.touch(ids)
            held.update(ids)
        else:
            cache.release(ids)
            held.difference_update(ids)
        pages = {block * 1024 // PAGE for block in held} | {0}
        assert {(address - (1 << 40)) // PAGE for address in driver.accessible} == pages


def test_a_block_is_copied_and_saved_with_all_its_layers() -> None:
    devices = [CPU, torch.device("cpu:0")]
    cache = GpuCache(layers(), devices, torch.float32, 6, 4)
    for number, layer in enumerate(cache.layers):
        layer.keys[2], layer.values[2] = number + 1.0, -number - 1.0
    cache.copy(2, 4)
    saved = bytes(cache.view(4))
    assert len(saved) == cache.block_bytes == 1024
    cache.write(5, memoryview(saved))
    for number, layer in enumerate(cache.layers):
        assert (layer.keys[5] == number + 1.0).all() and (layer.values[5] == -number - 1.0).all()


def test_layers_of_different_shapes_lie_beside_each_other() -> None:
    mixed = [LayerConfig(2, 8, None), LayerConfig(1, 16, None), LayerConfig(4, 8, None)]
    cache = GpuCache(mixed, [CPU] * 3, torch.bfloat16, 3, 4)
    for number, layer in enumerate(cache.layers):
        layer.keys.fill_(number)
        layer.values.fill_(number)
    assert [int(layer.keys.float().mean()) for layer in cache.layers] == [0, 1, 2]
    assert cache.layers[1].keys.shape == (3, 1, 4, 16)
    assert cache.layers[1].keys.stride() == cache.layers[1].values.stride()


def test_without_a_gpu_the_memory_is_fixed() -> None:
    memory = open_memory(1000, CPU)
    assert isinstance(memory, FixedMemory)
    assert memory.committed_bytes == 1000
