"""A ModelManager over scripted workers, with models of given sizes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from llmd.backend.protocol import Load
from llmd.daemon.devices import Inventory
from llmd.daemon.manager import ModelManager
from llmd.daemon.settings import Settings
from llmd.daemon.worker_process import Progress, WorkerProcess
from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

from ..fakes import FakeSpawner
from .live import install

FAKE_WORKER = Path(__file__).parent.parent / "fake_worker.py"
FAKE_COMMAND = (sys.executable, str(FAKE_WORKER))
GB = 10**9


def store_of(root: Path, names: Sequence[str]) -> ModelStore:
    store = ModelStore(root)
    for name in names:
        install(store, name, ("completion",))
    return store


class VirtualStage:
    """Everything in virtual time: to be made inside a VirtualLoop."""

    def __init__(
        self,
        root: Path,
        sizes: dict[str, int],
        inventory: Inventory | None = None,
        **settings: Any,
    ) -> None:
        self.store = store_of(root, list(sizes))
        self.spawner = FakeSpawner({f"{name}:latest": size for name, size in sizes.items()})
        self.manager = ModelManager(
            Settings(**{"memory_limit_bytes": 8 * GB, "models": root, **settings}),
            self.store,
            self.spawner,
            clock=asyncio.get_running_loop().time,
            inventory=inventory,
        )

    async def use(self, name: str, work_s: float = 0.0, keep_alive_s: float | None = None) -> float:
        """Lease, work, release. Returns how long the lease was waited for."""
        async with self.manager.lease(ModelName.parse(name), keep_alive_s) as lease:
            await asyncio.sleep(work_s)
            return lease.load_s

    @property
    def loaded(self) -> set[str]:
        return {model.manifest.name.model for model in self.manager.loaded()}

    @property
    def loads(self) -> list[str]:
        return [name.removesuffix(":latest") for name in self.spawner.started]

    async def close(self) -> None:
        self.manager.check()
        await self.manager.shutdown()
        assert self.spawner.used_bytes == 0
        self.manager.check()


class RealStage:
    """Real processes of tests/fake_worker.py."""

    def __init__(self, root: Path, names: Sequence[str], silence_s: float = 30.0) -> None:
        self.workers: list[WorkerProcess] = []
        self._silence_s = silence_s
        self.manager = ModelManager(
            Settings(memory_limit_bytes=64 * GB, models=root), store_of(root, names), self._spawn
        )

    async def _spawn(self, load: Load, on_loading: Progress | None) -> WorkerProcess:
        worker = await WorkerProcess.start(load, FAKE_COMMAND, on_loading, 20.0, self._silence_s)
        self.workers.append(worker)
        return worker

    def signal(self, number: int) -> None:
        """To the newest worker."""
        os.kill(self.workers[-1].pid, number)

    async def close(self) -> None:
        self.manager.check()
        await self.manager.shutdown()
        for worker in self.workers:
            assert not psutil.pid_exists(worker.pid), f"{worker} is left"
