"""Byte ranges on a device whose physical memory comes and goes.

    FixedMemory     one allocation, all of it committed from the start: CPU, or no driver bindings
    VirtualMemory   a reserved address range of the CUDA driver's virtual-memory API; pages are
                    created and mapped when they are committed, unmapped and freed when released

A desktop's card is then never lost to a reservation: an idle model holds the pages that its tokens
need. The bindings are NVIDIA's cuda-python (`cuda.bindings.driver`, the extra `gpu`); they are
imported when a GPU is used and not before.

Sources: CUDA driver API, "Virtual Memory Management" (cuMemAddressReserve, cuMemCreate, cuMemMap,
cuMemSetAccess).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("llmd.runner")


class NoDeviceMemory(Exception):
    """The device has no page left. The text says for how much was asked."""


class Memory(Protocol):
    """`data` may be read and written where it is committed; elsewhere the device faults."""

    data: Tensor  # uint8 [size], on the device
    page_bytes: int

    @property
    def committed_bytes(self) -> int:
        """Physical memory now."""
        ...

    def commit(self, pages: Iterable[int]) -> None:
        """Back these pages, if they are not; what they hold is undefined. May raise
        NoDeviceMemory; the pages that were backed by then stay so."""
        ...

    def release(self, pages: Iterable[int]) -> None:
        """Give these pages back, if they are backed. Nothing on the device may still use them."""
        ...


class FixedMemory:
    """All of it, from the start to the end."""

    page_bytes = 1 << 62  # one page, larger than anything

    def __init__(self, size: int, device: torch.device) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, device=device)

    def __repr__(self) -> str:
        return f"<FixedMemory {self.committed_bytes} bytes on {self.data.device}>"

    @property
    def committed_bytes(self) -> int:
        return self.data.numel()

    def commit(self, pages: Iterable[int]) -> None:
        pass

    def release(self, pages: Iterable[int]) -> None:
        pass


class DriverError(Exception):
    """A call of the driver failed. The text names the call and its result."""


class VirtualMemory:
    """A range of device `index`. `driver` is cuda.bindings.driver, or stands in for it."""

    def __init__(self, driver: Any, size: int, index: int) -> None:
        self._driver = driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.type = kind
        self._properties.location.id = index
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes: int = self._call(
            "cuMemGetAllocationGranularity", self._properties, minimum
        )
        self._size = -(-size // self.page_bytes) * self.page_bytes
        self._address = int(self._call("cuMemAddressReserve", self._size, 0, 0, 0))
        self._pages: dict[int, Any] = {}  # handles by page number
        # A tensor can be made over a range only if its first page is there.
        self.commit([0])
        self.data = self._tensor(size)

    def __repr__(self) -> str:
        return f"<VirtualMemory {self.committed_bytes} of {self._size} bytes>"

    @property
    def committed_bytes(self) -> int:
        return len(self._pages) * self.page_bytes

    def commit(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page not in self._pages:
                self._pages[page] = self._backed(page)

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != 0 and page in self._pages:
                handle = self._pages.pop(page)
                self._call("cuMemUnmap", self._place(page), self.page_bytes)
                self._call("cuMemRelease", handle)

    def close(self) -> None:
        """Give back all pages and the range; the tensor must not be used any more."""
        for page, handle in self._pages.items():
            self._call("cuMemUnmap", self._place(page), self.page_bytes)
            self._call("cuMemRelease", handle)
        self._pages.clear()
        self._call("cuMemAddressFree", self._place(0), self._size)

    def _place(self, page: int) -> Any:
        return self._driver.CUdeviceptr(self._address + page * self.page_bytes)

    def _backed(self, page: int) -> Any:
        try:
            handle = self._call("cuMemCreate", self.page_bytes, self._properties, 0)
        except DriverError as error:
            raise NoDeviceMemory(
                f"the device has no {self.page_bytes} bytes left for the KV cache ({error})"
            ) from error
        try:
            self._call("cuMemMap", self._place(page), self.page_bytes, 0, handle, 0)
            access = self._driver.CUmemAccessDesc()
            access.location = self._properties.location
            flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.flags = flags
            self._call("cuMemSetAccess", self._place(page), self.page_bytes, [access], 1)
        except DriverError:
            self._call("cuMemRelease", handle)
            raise
        return handle

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name}: {status}")
        return results[0] if results else None

    def _tensor(self, size: int) -> Tensor:
        return torch.as_tensor(
            _Range(self._address, size), device=f"cuda:{self._properties.location.id}"
        )


class _Range:
    """Device memory as the CUDA array interface describes it (Numba's, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def open_memory(size: int, device: torch.device) -> Memory:
    """Virtual where it can be had. Why not, where it cannot, is logged."""
    if device.type != "cuda" or torch.version.hip is not None:
        return FixedMemory(size, device)
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the driver's calls want a context
            return VirtualMemory(driver, size, device.index or 0)
    except (ImportError, DriverError, AttributeError, RuntimeError) as error:
        log.warning(
            "KV memory of %s is fixed at %d bytes, as it cannot be elastic: %s", device, size, error
        )
        return FixedMemory(size, device)
