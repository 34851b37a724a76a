"""What there is to compute on, and how much memory of it is free, without torch.

    NVIDIA   NVML, the driver's own library: no CUDA context, no memory of the card is taken
    AMD      the kernel's files under /sys/class/drm
    Apple    the unified memory
    CPU      the machine's memory or the control group's, whichever is smaller: in a container the
             kernel kills at the group's limit, not at the machine's

An inventory is probed again before each load: a card may have appeared, gone to sleep, or be full
of another program's data. `LLMD_DEVICES` names a JSON file that is read instead, at each probe:

    [{"id": "cuda:0", "name": "Card", "total_bytes": 24e9, "free_bytes": 20e9}]

Sources: NVML API reference; the kernel's documentation of amdgpu's mem_info_vram_* files; CUDA C
Programming Guide, "CUDA environment variables" (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

log = logging.getLogger("llmd.devices")

DEFAULT_SHARE = 0.85  # of all memory, for all models together; the rest is the person's
APPLE_SHARE = 0.75  # of the unified memory, which is what Metal lets one process use
AMD_VENDOR = "0x1002"
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
DRM = Path("/sys/class/drm")


@dataclass(frozen=True, slots=True)
class Device:
    """One place where layers can live."""

    id: str  # as torch names it: "cuda:0", "mps", "cpu"
    name: str
    total_bytes: int
    free_bytes: int
    kind: str = ""  # "cuda", "rocm", "mps", "cpu"
    uuid: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.id != "cpu"


class Inventory:
    """How this machine is looked at; `script` is read instead, if it is given."""

    def __init__(self, script: Path | None = None) -> None:
        self._script = script

    def probe(self) -> tuple[Device, ...]:
        """The GPUs in torch's order, then the CPU."""
        if self._script is not None:
            return scripted(self._script)
        return (*gpus(os.environ), cpu())

    def host(self) -> Device:
        """The CPU alone: cheap enough for once a second."""
        if self._script is not None:
            return next(device for device in scripted(self._script) if not device.is_gpu)
        return cpu()


def scripted(path: Path) -> tuple[Device, ...]:
    """The devices that a file lists. Without a "cpu" among them, this machine's is added."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        devices = tuple(
            Device(
                id=str(row["id"]),
                name=str(row.get("name", row["id"])),
                total_bytes=int(row["total_bytes"]),
                free_bytes=int(row.get("free_bytes", row["total_bytes"])),
                kind=str(row.get("kind", str(row["id"]).partition(":")[0])),
            )
            for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the list of devices %s cannot be read: %s", path, error)
        return (cpu(),)
    return devices if any(not device.is_gpu for device in devices) else (*devices, cpu())


def gpus(environ: Mapping[str, str]) -> list[Device]:
    """All GPUs that this process may use. None is an answer, not an error."""
    found = nvidia()
    if found:
        return visible(found, environ.get("CUDA_VISIBLE_DEVICES"))
    return amd() or apple()


# --------------------------------------------------------------------------------- GPUs


def nvidia() -> list[Device]:
    """By NVML, opened and closed again: what it knew before a suspend is not trusted after it."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("no NVIDIA driver: %s", error)
        return []
    try:
        return [_nvidia_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.warning("the NVIDIA driver does not answer: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


def _nvidia_card(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        id=f"cuda:{index}",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        kind="cuda",
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def visible(cards: list[Device], wanted: str | None) -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES lets through, numbered as torch will number them.

    Numbers and beginnings of UUIDs; the first entry that names no card ends the list.
    """
    if wanted is None:
        return cards
    chosen: list[Device] = []
    for entry in filter(None, (part.strip() for part in wanted.split(","))):
        if entry.isdigit():
            matches = cards[int(entry) : int(entry) + 1]
        else:
            matches = [card for card in cards if card.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return [
        Device(f"cuda:{number}", card.name, card.total_bytes, card.free_bytes, card.kind, card.uuid)
        for number, card in enumerate(chosen)
    ]


def amd(root: Path = DRM) -> list[Device]:
    """From the files of the amdgpu driver. torch calls these cards cuda too."""
    cards: list[Device] = []
    for folder in sorted(root.glob("card[0-9]*/device")):
        if _text_in(folder / "vendor") != AMD_VENDOR:
            continue
        total = _number_in(folder / "mem_info_vram_total")
        if total:
            free = total - _number_in(folder / "mem_info_vram_used")
            name = _text_in(folder / "product_name") or "AMD GPU"
            cards.append(Device(f"cuda:{len(cards)}", name, total, free, "rocm"))
    return cards


def apple() -> list[Device]:
    """The GPU of an Apple chip shares the machine's memory."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return []
    memory = psutil.virtual_memory()
    total = int(memory.total * APPLE_SHARE)
    return [Device("mps", "Apple GPU", total, min(total, int(memory.available)), "mps")]


# --------------------------------------------------------------------------------- CPU


def cpu() -> Device:
    """The processor and the memory that this process may use."""
    return Device("cpu", cpu_name(), total_memory_bytes(), available_memory_bytes(), "cpu")


@functools.cache
def cpu_name() -> str:
    """As the system calls it."""
    for line in _text_in(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def total_memory_bytes(groups: tuple[Path, ...] | None = None) -> int:
    """What this process may use at most."""
    total = int(psutil.virtual_memory().total)
    limits = [_limit_of(group) for group in (control_groups() if groups is None else groups)]
    return min([total, *(limit for limit in limits if limit)])


def available_memory_bytes(groups: tuple[Path, ...] | None = None) -> int:
    """What could be allocated now without pushing others out, in the machine and its groups."""
    rooms = [int(psutil.virtual_memory().available)]
    for group in control_groups() if groups is None else groups:
        limit = _limit_of(group)
        if limit:
            rooms.append(limit - _usage_of(group))
    return max(min(rooms), 0)


def default_limit_bytes() -> int:
    """The memory limit where none is set."""
    return int(total_memory_bytes() * DEFAULT_SHARE)


def control_groups(own: Path = OWN_CGROUPS, root: Path = CGROUP_ROOT) -> tuple[Path, ...]:
    """The folders of the memory groups that this process is in, from its own to the root.

    In a container the path that /proc tells is the host's, and what is mounted is the own group.
    """
    found: list[Path] = []
    for line in _text_in(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers if controllers else root
        folder = top / path.lstrip("/")
        found += [step for step in (folder, *folder.parents) if step.is_relative_to(top)]
    return tuple(dict.fromkeys(step for step in found if step.is_dir()))


def _limit_of(group: Path) -> int:
    """0: none. Version 1 says "none" by a number near 2^63."""
    limit = _number_in(group / "memory.max") or _number_in(group / "memory.limit_in_bytes")
    return limit if limit < 2**60 else 0


def _usage_of(group: Path) -> int:
    """What the group holds and cannot be taken from it: not the cold part of the file cache."""
    usage = _number_in(group / "memory.current") or _number_in(group / "memory.usage_in_bytes")
    for line in _text_in(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return max(usage - int(value), 0)
    return usage


def _text_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # not on this system


def _number_in(path: Path) -> int:
    text = _text_in(path)
    return int(text) if text.isdigit() else 0


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
