"""Running pulls: two who ask for the same model share one.

    pull(name) ──▶ joins a running pull, or begins one ──▶ its progress, from where it is now

A listener that is slow gets the latest state of each file, not all of them. The last one to leave
stops the pull; what has arrived stays on disk for the next time.

Owner: the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from ..registry.download import Downloader
from ..registry.manifest import Manifest
from ..registry.names import ModelName
from ..registry.pull import PullProgress, PullSettings, pull
from ..registry.store import ModelStore


class _Listener:
    """The progress that one asker has not seen yet: one entry for each thing that is told."""

    def __init__(self) -> None:
        self.unread: dict[str, PullProgress] = {}
        self.arrived = asyncio.Event()

    def put(self, progress: PullProgress) -> None:
        # A dict keeps the order of arrival; a newer state of the same file replaces the older.
        self.unread[progress.digest or progress.status] = progress
        self.arrived.set()


class _Pull:
    """One running pull."""

    def __init__(self) -> None:
        self.listeners: list[_Listener] = []
        self.latest: dict[str, PullProgress] = {}
        self.task: asyncio.Task[Manifest] | None = None

    def tell(self, progress: PullProgress) -> None:
        self.latest[progress.digest or progress.status] = progress
        for listener in self.listeners:
            listener.put(progress)

    def wake(self) -> None:
        for listener in self.listeners:
            listener.arrived.set()


class Downloads:
    """All pulls of this daemon."""

    def __init__(self, store: ModelStore, settings: PullSettings | None = None) -> None:
        self._store = store
        self._settings = settings or PullSettings()
        self._downloader = Downloader(store, self._settings)
        self._pulls: dict[str, _Pull] = {}

    def __repr__(self) -> str:
        return f"<Downloads {len(self._pulls)} running>"

    async def pull(self, name: ModelName, insecure: bool = False) -> AsyncGenerator[PullProgress]:
        """Its progress. Ends when the model is stored; raises a RegistryError."""
        running = self._pulls.get(name.display) or self._begin(name, insecure)
        listener = _Listener()
        listener.unread.update(running.latest)
        running.listeners.append(listener)
        try:
            async for progress in _told(running, listener):
                yield progress
        finally:
            running.listeners.remove(listener)
            if not running.listeners:
                await _stop(running)

    def _begin(self, name: ModelName, insecure: bool) -> _Pull:
        running = self._pulls[name.display] = _Pull()
        settings = replace(self._settings, insecure=insecure or self._settings.insecure)
        running.task = asyncio.create_task(
            pull(
                self._store,
                name,
                settings=settings,
                downloader=self._downloader,
                on_progress=running.tell,
            ),
            name=f"pull {name.display}",
        )
        running.task.add_done_callback(lambda _: self._end(name, running))
        return running

    def _end(self, name: ModelName, running: _Pull) -> None:
        if self._pulls.get(name.display) is running:
            del self._pulls[name.display]
        running.wake()

    async def shutdown(self) -> None:
        """Stop all pulls; their finished parts stay."""
        for running in list(self._pulls.values()):
            await _stop(running)

    def check(self) -> None:
        """Assert the invariants."""
        for name, running in self._pulls.items():
            assert running.task is not None and running.listeners, f"{name} runs for nobody"


async def _told(running: _Pull, listener: _Listener) -> AsyncGenerator[PullProgress]:
    assert running.task is not None
    while True:
        while listener.unread:
            yield listener.unread.pop(next(iter(listener.unread)))
        if running.task.done():
            running.task.result()  # raises what ended it
            return
        listener.arrived.clear()
        await listener.arrived.wait()


async def _stop(running: _Pull) -> None:
    assert running.task is not None
    running.task.cancel()
    await asyncio.wait([running.task])
    if not running.task.cancelled():
        running.task.exception()  # seen; there is nobody left to tell
