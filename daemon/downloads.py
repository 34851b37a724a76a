"""Running pulls, of which two who ask for the same model share one; and pushes.

    pull(what) ──▶ joins a running pull, or begins one ──▶ its progress, from where it is now

A listener that is slow gets the latest state of each file, not all of them. The last one to leave
stops the pull; what has arrived stays on disk for the next time.

Owner: the event loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from ..registry.download import Downloader, in_thread
from ..registry.manifest import Manifest
from ..registry.names import ModelName
from ..registry.pull import PullProgress, PullSettings, Reference, check_terms, pull
from ..registry.push import push
from ..registry.store import ModelStore
from .settings import Settings


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


def pull_settings(settings: Settings, environ: Mapping[str, str]) -> PullSettings:
    """The part of the daemon's settings that is about pulling; HF_... are the hub's own names."""
    return PullSettings(
        connections=settings.pull_connections,
        rate_limit=settings.pull_rate_bytes,
        allow_private=settings.pull_private,
        hub_endpoint=environ.get("HF_ENDPOINT") or None,
        hub_token=environ.get("HF_TOKEN") or None,
        registry_url=settings.registry,
        key=settings.registry_key,
        user_aliases=settings.aliases,
    )


class Downloads:
    """All pulls of this daemon."""

    def __init__(self, store: ModelStore, settings: PullSettings | None = None) -> None:
        self._store = store
        self._settings = settings or PullSettings()
        self._downloader = Downloader(store, self._settings)
        self._pulls: dict[str, _Pull] = {}

    def __repr__(self) -> str:
        return f"<Downloads {len(self._pulls)} running>"

    async def pull(
        self, what: Reference, insecure: bool = False, accepts_terms: bool = True
    ) -> AsyncGenerator[PullProgress]:
        """Its progress. Ends when the model is stored; raises a RegistryError."""
        if not accepts_terms:
            check_terms(self._store, what, self._settings)
        running = self._pulls.get(what.display) or self._begin(what, insecure)
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

    async def push(self, name: ModelName, insecure: bool = False) -> AsyncGenerator[PullProgress]:
        """Its progress. Ends when the registry has the model; closing it stops the push.

        Raises a RegistryError.
        """
        settings = replace(self._settings, insecure=insecure or self._settings.insecure)
        told, has_left = _Listener(), threading.Event()
        loop = asyncio.get_running_loop()

        def tell(progress: PullProgress) -> None:
            loop.call_soon_threadsafe(told.put, progress)

        def work() -> None:
            try:
                push(self._store, name, settings, tell, has_left.is_set)
            finally:
                loop.call_soon_threadsafe(told.arrived.set)

        pushing = asyncio.create_task(in_thread(work))
        try:
            while not pushing.done() or told.unread:
                while told.unread:
                    yield told.unread.pop(next(iter(told.unread)))
                if not pushing.done():
                    told.arrived.clear()
                    arriving = asyncio.create_task(told.arrived.wait())
                    await asyncio.wait((arriving, pushing), return_when=asyncio.FIRST_COMPLETED)
                    arriving.cancel()
            await pushing
        finally:
            has_left.set()  # the thread ends with its current piece
            if not pushing.done():
                pushing.cancel()

    def _begin(self, what: Reference, insecure: bool) -> _Pull:
        running = self._pulls[what.display] = _Pull()
        settings = replace(self._settings, insecure=insecure or self._settings.insecure)
        running.task = asyncio.create_task(
            pull(
                self._store,
                what,
                settings=settings,
                downloader=self._downloader,
                on_progress=running.tell,
            ),
            name=f"pull {what.display}",
        )
        running.task.add_done_callback(lambda _: self._end(what, running))
        return running

    def _end(self, what: Reference, running: _Pull) -> None:
        if self._pulls.get(what.display) is running:
            del self._pulls[what.display]
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
