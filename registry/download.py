"""Downloader: the running downloads of one store; who asks for the same file shares one.

    fetch ──▶ blob is here: done
          ──▶ someone fetches it: listen too
          ──▶ a Transfer in a thread of its own ──▶ the blob, moved among the others

A listener that is cancelled leaves; the last one to leave stops the transfer, whose parts stay on
the disk for the next time.

Owner: the event loop. The threads only run `Transfer.run` and moves of files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from .errors import DigestMismatch, NotEnoughSpace, SourceUnavailable
from .settings import PullSettings
from .store import ModelStore
from .transfer import Budget, Busy, Cancelled, CheckStart, RemoteFile, Transfer, raise_for_status
from .web import NETWORK_ERRORS, Session, origin_of

log = logging.getLogger("llmd.registry.download")

PROGRESS_PERIOD_S = 0.08  # fast enough for a smooth bar
SMALL_FILE_BYTES = 64 << 20  # fetched in one piece and kept in memory meanwhile
_T = TypeVar("_T")
OnBytes = Callable[[int, str], None]  # bytes there, and the stage: "pulling" or "verifying"


class _Shared:
    """One transfer and how many wait for it."""

    def __init__(self, transfer: Transfer, task: asyncio.Task[str]) -> None:
        self.transfer = transfer
        self.task = task
        self.num_listeners = 0


class Downloader:
    """Fetches files into a store. One per store and process."""

    def __init__(self, store: ModelStore, settings: PullSettings | None = None) -> None:
        self.store = store
        self.settings = settings or PullSettings()
        self._budget = Budget(self.settings.rate_limit)
        self._running: dict[str, _Shared] = {}  # by the key of the file; each has a listener

    def __repr__(self) -> str:
        return f"<Downloader {len(self._running)} running>"

    async def fetch(
        self,
        file: RemoteFile,
        on_bytes: OnBytes,
        settings: PullSettings,
        check: CheckStart | None = None,
    ) -> str:
        """Have the file among the blobs; returns its sha256. `check` may refuse its beginning.

        Raises a RegistryError. If cancelled, what has arrived is kept.
        """
        if file.sha256 is not None and self.store.has_blob(file.sha256):
            on_bytes(file.size, "pulling")
            return file.sha256
        if file.git_sha1 is not None and file.sha256 is None:
            content = await in_thread(lambda: fetch_small(file, settings))
            on_bytes(len(content), "pulling")
            return await in_thread(lambda: self.store.add_bytes(content))
        shared = self._running.get(file.key) or self._start(file, settings, check)
        return await self._listen(file.key, shared, on_bytes)

    def check_space(self, files: Iterable[RemoteFile], settings: PullSettings) -> None:
        """Raises NotEnoughSpace if what is still to come does not fit on the store's disk."""
        missing = sum(self._missing_bytes(file) for file in files)
        ensure_space(self.store.root, missing, settings.reserve_bytes)

    def _missing_bytes(self, file: RemoteFile) -> int:
        if file.sha256 is not None and self.store.has_blob(file.sha256):
            return 0
        data = self.store.partial_path(file.key).with_suffix(".data")
        there = data.stat().st_blocks * 512 if data.exists() else 0
        return max(0, file.size - there)

    def _start(self, file: RemoteFile, settings: PullSettings, check: CheckStart | None) -> _Shared:
        stem = self.store.partial_path(file.key)
        transfer = Transfer(file, stem, settings, self._budget, check)

        def run() -> str:
            with transfer.its_turn():
                if file.sha256 is not None and self.store.has_blob(file.sha256):
                    return file.sha256  # another process has brought it
                path, digest = transfer.run()
                return self.store.add_blob(path, digest, is_verified=True)

        shared = _Shared(transfer, asyncio.create_task(in_thread(run)))
        self._running[file.key] = shared
        shared.task.add_done_callback(lambda _: self._running.pop(file.key, None))
        return shared

    async def _listen(self, key: str, shared: _Shared, on_bytes: OnBytes) -> str:
        shared.num_listeners += 1
        try:
            while not shared.task.done():
                await asyncio.wait({shared.task}, timeout=PROGRESS_PERIOD_S)
                on_bytes(shared.transfer.completed, shared.transfer.stage)
            return shared.task.result()
        except Cancelled:
            raise asyncio.CancelledError from None
        finally:
            shared.num_listeners -= 1
            if not shared.num_listeners and not shared.task.done():
                self._running.pop(key, None)
                shared.transfer.cancel()
                await _settled(shared.task)


async def _settled(task: asyncio.Task[str]) -> None:
    """Wait until the journal is written, even while being cancelled ourselves."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue  # the threads end within one read; leaving now would race with a new pull
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("transfer ended", extra={"reason": repr(error)})


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run it in a thread of its own. Not asyncio.to_thread: its few shared threads would all be
    taken by a handful of long downloads, and the daemon needs them."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: _T | None = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name="registry", daemon=True).start()
    return await future


def fetch_small(file: RemoteFile, settings: PullSettings) -> bytes:
    """The content of a small file, checked. Blocking."""
    failure: Exception | None = None
    for attempt in range(3):
        try:
            with Session(settings) as session:
                reply = session.get(file.url, file.headers)
                raise_for_status(reply, file.name)
                content = reply.read(SMALL_FILE_BYTES)
        except (*NETWORK_ERRORS, SourceUnavailable) as error:
            failure = error
            pause = error.delay_s if isinstance(error, Busy) else settings.backoff_s * 2**attempt
            threading.Event().wait(min(pause, settings.max_retry_after_s))
            continue
        _check_content(file, content)
        return content
    raise SourceUnavailable(f"{origin_of(file.url)} did not serve {file.name}: {failure}")


def _check_content(file: RemoteFile, content: bytes) -> None:
    if file.git_sha1 is not None:
        header = f"blob {len(content)}\0".encode()
        found = hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
        if found != file.git_sha1:
            raise SourceUnavailable(
                f"{file.name} arrived damaged: its git hash should be {file.git_sha1}, is {found}"
            )
    if file.sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != file.sha256:
        raise DigestMismatch(file.sha256, found, file.name)


def ensure_space(folder: Path, needed: int, reserve: int) -> None:
    """Raises NotEnoughSpace if `needed` bytes and the reserve are not free in the folder."""
    free = shutil.disk_usage(folder).free
    if needed and needed + reserve > free:
        raise NotEnoughSpace(needed + reserve, free, str(folder))
