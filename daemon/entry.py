"""One model that is loading or loaded, as the manager keeps it, and what it takes of the memory.

Owner: ModelManager, on the event loop.
"""

from __future__ import annotations

import asyncio

from ..backend.protocol import DevicePart
from ..registry.manifest import Manifest
from .placement import GPU_CONTEXT_BYTES, KV_FLOOR_BYTES, Wish
from .worker_process import Progress, WorkerProcess


class Entry:
    """From the first who asks for the model to the end of its worker."""

    def __init__(
        self, manifest: Manifest, size_bytes: int, wish: Wish, now: float, number: int = 0
    ) -> None:
        self.manifest = manifest
        self.number = number  # 0: the model's first worker; else one of its replicas
        self.size_bytes = size_bytes  # estimate while loading, then what the worker has
        self.wish = wish
        self.asked_at = now
        self.parts: tuple[DevicePart, ...] = ()  # where it goes; empty: the CPU
        self.on_devices: dict[str, int] = {}  # of each GPU's memory
        self.kv_budget_bytes = 0  # told last
        self.figures: tuple[int, ...] = ()  # that the last sharing out was made of
        self.task: asyncio.Task[WorkerProcess] | None = None  # the load
        self.worker: WorkerProcess | None = None
        self.num_waiting = 0
        self.num_leases = 0
        self.listeners: list[Progress] = []
        self.progress = (0.0, "waiting for memory")
        self.has_room = False  # counts against the memory: it was decided that it fits
        self.is_leaving = False  # being unloaded: whoever comes now waits, then loads afresh
        self.has_left = asyncio.Event()

    @property
    def key(self) -> str:
        return key_of(self.manifest, self.number)

    @property
    def folder(self) -> str:
        """Of its derived files, below the model's: two workers write none of the same."""
        return f"replica-{self.number}" if self.number else ""

    @property
    def name(self) -> str:
        return self.manifest.name.display

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(part.device for part in self.parts) or ("cpu",)

    def tell(self, fraction: float, stage: str) -> None:
        """The load has got so far."""
        self.progress = (fraction, stage)
        for listener in list(self.listeners):
            listener(fraction, stage)

    # ------------------------------------------------------------------ memory

    @property
    def resident_bytes(self) -> int:
        """Of the machine's memory, as the worker tells it; 0 without one."""
        if self.worker is None or self.worker.ready is None:
            return 0
        ready = self.worker.ready
        return self.worker.stats.rss_bytes or ready.weights_bytes - ready.weights_vram_bytes

    @property
    def gpu_share(self) -> float:
        """Of its layers, and so of its KV memory: the part that is on GPUs."""
        num_layers = sum(part.num_layers for part in self.parts)
        on_gpus = sum(part.num_layers for part in self.parts if part.device != "cpu")
        return on_gpus / num_layers if num_layers else 0.0

    @property
    def kv_bytes(self) -> int:
        """KV memory of the machine that it holds now. A model on GPUs has its KV there, and its
        worker alone knows how much of it there may be."""
        if self.worker is None or self.on_devices:
            return 0
        return self.worker.stats.kv_bytes

    @property
    def in_use_bytes(self) -> int:
        """The part of it that sequences hold."""
        if self.worker is None or self.worker.ready is None or self.on_devices:
            return 0
        return self.worker.stats.blocks_in_use * self.worker.ready.block_bytes

    @property
    def kept_bytes(self) -> int:
        """What it cannot give back: all but the prefixes that nobody holds. Of a load: all that it
        will take."""
        if self.worker is None:
            return self.size_bytes
        return self.resident_bytes - max(self.kv_bytes - self.in_use_bytes, 0)

    @property
    def weights_bytes(self) -> int:
        """Of its files."""
        return weights_bytes(self.manifest)

    def wanted_on_devices(self) -> dict[str, int]:
        """What it will take of each GPU, by the parts it was given."""
        num_layers = sum(part.num_layers for part in self.parts) or 1
        return {
            part.device: GPU_CONTEXT_BYTES
            + (self.weights_bytes + KV_FLOOR_BYTES) * part.num_layers // num_layers
            for part in self.parts
            if part.device != "cpu"
        }


def key_of(manifest: Manifest, number: int = 0) -> str:
    """What the manager finds a worker of this model by."""
    return f"{manifest.digest}+{number}" if number else manifest.digest


def weights_bytes(manifest: Manifest) -> int:
    """Of a model's files."""
    return sum(file.size for file in manifest.files if file.role == "weights")
