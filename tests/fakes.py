"""Stand-ins for what tests of the daemon cannot wait for, or cannot have."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from llmd.backend.protocol import Load, Ready, Stats
from llmd.daemon.errors import DaemonError, WorkerDied
from llmd.daemon.worker_process import Progress, State

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, the clock is put forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits, and nothing will ever happen"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while every task waits: hours take milliseconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # Coarser than the rounding of a clock that was put forward by years.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """asyncio.run on a VirtualLoop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


class FakeWorkerProcess:
    """What ModelManager needs of a WorkerProcess, without a process."""

    def __init__(self, load: Load, rss_bytes: int) -> None:
        self.name = load.name
        self.state = State.READY
        self.ready = Ready(2048, 2048, 16, 100, 4096, rss_bytes)
        self.stats = Stats(rss_bytes=rss_bytes)
        self.pid = 1
        self.on_stats: Callable[[], None] | None = None
        self.budgets: list[int] = []
        self._died = asyncio.Event()

    async def set_kv_budget(self, budget_bytes: int) -> None:
        self.budgets.append(budget_bytes)

    def tell(self) -> None:
        """New figures, as a worker tells them each second."""
        if self.on_stats is not None:
            self.on_stats()

    def die(self) -> None:
        self.state = State.DEAD
        self._died.set()

    def death(self) -> DaemonError:
        return WorkerDied(f"the worker of {self.name} ended unexpectedly (test)")

    async def wait_dead(self) -> None:
        await self._died.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        if self.state is State.READY:
            self.state = State.DRAINING
        await asyncio.sleep(0.5)
        self.die()

    async def kill(self) -> None:
        self.die()

    def check(self) -> None:
        assert (self.state is State.DEAD) == self._died.is_set()


class FakeSpawner:
    """Starts FakeWorkerProcesses, after a time, and remembers them."""

    def __init__(self, sizes: dict[str, int], load_s: float = 2.0) -> None:
        self.sizes = sizes
        self.load_s = load_s
        self.started: list[str] = []
        self.alive: dict[str, FakeWorkerProcess] = {}
        self.failure: Exception | None = None

    async def __call__(self, load: Load, on_loading: Progress | None) -> Any:
        self.started.append(load.name)
        if on_loading is not None:
            on_loading(0.5, "reading weights")
        await asyncio.sleep(self.load_s)
        if self.failure is not None:
            raise self.failure
        worker = self.alive[load.name] = FakeWorkerProcess(load, self.sizes[load.name])
        return worker

    @property
    def used_bytes(self) -> int:
        return sum(
            worker.stats.rss_bytes
            for worker in self.alive.values()
            if worker.state is not State.DEAD
        )


async def gathered(*work: Awaitable[Any]) -> list[Any]:
    """The results, exceptions among them."""
    return list(await asyncio.gather(*work, return_exceptions=True))
