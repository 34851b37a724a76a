"""ModelManager: a name to a running worker, leased to the caller.

    lease(name) ──loaded?──yes──────────────────────────▶ Lease
                     │no
                     ▼
                  _load: make room (placement) ──▶ spawn ──▶ ready ──▶ Lease for all who wait

A request for a ready model takes the upper path and waits for nothing. Loads of different models
run side by side; only the decision who fits is made one at a time. Two who ask for the same model
share one load, and one who leaves does not end it for the other.

A worker that dies is forgotten at once: the next lease loads again, and who was being answered goes
on there (failover.py). A model that keeps dying is held off for a while (holdoff.py). A model whose
load failed is tried again by the next request, but not by a crowd at the same moment.

An entry leaves in two parts: `_leave` marks it, within the tick that found it idle, and only then
is anything awaited. So nobody can be given a worker that was chosen to go.

Owner: the event loop's thread. State: `_entries` and the KeepAlive; nobody else changes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..backend.protocol import (
    Delta,
    Embed,
    Embedded,
    Generate,
    Load,
    ModelFile,
    Ready,
    Started,
    Stats,
    Tokenize,
    Tokenized,
)
from ..registry.manifest import Manifest
from ..registry.names import ModelName
from ..registry.store import ModelStore
from . import devices
from .errors import DaemonError, NoMemory, ServerBusy
from .failover import resumed, retried
from .holdoff import HoldOff
from .keepalive import KeepAlive
from .placement import Resident, Verdict, estimate_bytes, place
from .settings import Settings
from .worker_process import Progress, State, WorkerProcess, worker_command

log = logging.getLogger("llmd.manager")

HISTORY_LENGTH = 100  # loads and unloads that `history` remembers

Spawn = Callable[[Load, Progress | None], Awaitable[WorkerProcess]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A snapshot of one loaded model."""

    manifest: Manifest
    expires_at: datetime | None  # None: never
    size: int  # bytes, weights and KV as they are allocated now
    size_vram: int
    context_length: int
    stats: Stats
    devices: tuple[str, ...]
    ready: Ready
    pid: int
    num_leases: int


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A load or an unload, and why."""

    at: datetime
    model: str
    event: str  # "loaded", "unloaded", "failed", "died"
    reason: str


class _Entry:
    """One model that is loading or loaded."""

    def __init__(self, manifest: Manifest, size_bytes: int) -> None:
        self.manifest = manifest
        self.size_bytes = size_bytes  # estimate while loading, then what the worker has
        self.task: asyncio.Task[WorkerProcess] | None = None  # the load
        self.worker: WorkerProcess | None = None
        self.num_waiting = 0
        self.listeners: list[Progress] = []
        self.has_room = False  # counts against the memory: it was decided that it fits
        self.is_leaving = False  # being unloaded: whoever comes now waits, then loads afresh
        self.has_left = asyncio.Event()

    @property
    def key(self) -> str:
        return self.manifest.digest

    def tell(self, fraction: float, stage: str) -> None:
        for listener in list(self.listeners):
            listener(fraction, stage)


class Lease:
    """A promise that the model stays loaded while it is held."""

    def __init__(
        self,
        manager: ModelManager,
        manifest: Manifest,
        worker: WorkerProcess,
        load_s: float,
    ) -> None:
        assert worker.ready is not None
        self.manifest = manifest
        self.ready = worker.ready
        self.load_s = load_s
        self.worker = worker
        self._manager = manager

    async def generate(self, request: Generate) -> AsyncGenerator[Started | Delta, None]:
        """Started, then Deltas up to the one with `finished`. Closing it cancels the sequence.

        If the worker dies meanwhile, a fresh one goes on at the exact token, once. Raises
        RequestFailed, WorkerDied.
        """
        stream = resumed(self.worker, request, self._replacement)
        async with contextlib.aclosing(stream):
            async for answer in stream:
                yield answer

    async def _replacement(self) -> WorkerProcess:
        self.worker = await self._manager.worker_for(self.manifest)
        return self.worker

    async def embed(self, request: Embed) -> Embedded:
        """Raises RequestFailed, WorkerDied."""
        return await retried(self.worker, lambda worker: worker.embed(request), self._replacement)

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Raises RequestFailed, WorkerDied."""
        return await retried(
            self.worker, lambda worker: worker.tokenize(request), self._replacement
        )


class ModelManager:
    """The loaded models."""

    def __init__(
        self,
        settings: Settings,
        store: ModelStore,
        spawn: Spawn | None = None,
        clock: Callable[[], float] = time.monotonic,
        available_bytes: Callable[[], int] = devices.available_memory_bytes,
    ) -> None:
        self._settings = settings
        self._store = store
        self._spawn = spawn or self._spawn_worker
        self._clock = clock
        self._available_bytes = available_bytes
        self._limit_bytes = settings.memory_limit_bytes or devices.default_limit_bytes()
        # All the mutable state.
        self._entries: dict[str, _Entry] = {}
        self._keep_alive = KeepAlive(settings.keep_alive_s)
        self._hold_off = HoldOff()
        self._measured: dict[str, int] = {}  # bytes a model took the last time, by key
        self._room_lock = asyncio.Lock()  # who fits is decided one at a time, in order of arrival
        self._room_made = asyncio.Event()  # a model left, or a lease ended: look again
        self._num_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._history: deque[HistoryEntry] = deque(maxlen=HISTORY_LENGTH)
        self._is_closing = False

    def __repr__(self) -> str:
        ready = sum(entry.worker is not None for entry in self._entries.values())
        return (
            f"<ModelManager {ready} loaded, {len(self._entries) - ready} loading | "
            f"{self._keep_alive.total_leases} leases>"
        )

    # ------------------------------------------------------------------- lease

    @contextlib.asynccontextmanager
    async def lease(
        self,
        name: ModelName,
        keep_alive_s: float | None = None,
        on_loading: Progress | None = None,
    ) -> AsyncIterator[Lease]:
        """The only way to a worker.

        keep_alive_s: None leaves the model's duration as it is, math.inf is forever. Raises
        ModelNotFound, ServerBusy, NoMemory, LoadFailed.
        """
        manifest = self._store.get(name)
        began = self._clock()
        worker = self._ready_worker(manifest)
        if worker is None:
            worker = await self._wait_for(manifest, on_loading)
        elif worker.stats.waiting >= self._settings.max_queue:
            raise ServerBusy
        key = manifest.digest
        self._keep_alive.acquire(key, self._clock(), keep_alive_s)
        try:
            yield Lease(self, manifest, worker, self._clock() - began)
        finally:
            self._release(key)

    async def worker_for(self, manifest: Manifest) -> WorkerProcess:
        """A ready worker for someone who holds a lease already. Loads if need be."""
        return self._ready_worker(manifest) or await self._wait_for(manifest, None)

    def _ready_worker(self, manifest: Manifest) -> WorkerProcess | None:
        entry = self._entries.get(manifest.digest)
        if entry is None or entry.worker is None or entry.is_leaving:
            return None
        return entry.worker if entry.worker.state is State.READY else None

    async def _wait_for(self, manifest: Manifest, on_loading: Progress | None) -> WorkerProcess:
        """Join the model's load, or begin it."""
        if self._num_waiting >= self._settings.max_queue:
            raise ServerBusy
        self._num_waiting += 1
        try:
            while True:
                entry = self._entries.get(manifest.digest)
                if entry is None:
                    entry = self._begin_load(manifest)
                elif entry.is_leaving or (entry.worker and entry.worker.state is State.DEAD):
                    await entry.has_left.wait()
                    continue
                return await self._join(entry, on_loading)
        finally:
            self._num_waiting -= 1

    def _begin_load(self, manifest: Manifest) -> _Entry:
        if self._is_closing:
            raise DaemonError("llmd is shutting down")
        self._hold_off.raise_if_held(manifest.digest, manifest.name.display, self._clock())
        entry = _Entry(manifest, self._estimate(manifest))
        entry.task = asyncio.create_task(self._load(entry), name=f"load {manifest.name.display}")
        # Before the load's first step runs: two who come in the same tick share it.
        self._entries[entry.key] = entry
        entry.task.add_done_callback(lambda task: self._load_ended(entry, task))
        return entry

    def _load_ended(self, entry: _Entry, task: asyncio.Task[WorkerProcess]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(entry)

    async def _join(self, entry: _Entry, on_loading: Progress | None) -> WorkerProcess:
        assert entry.task is not None
        if on_loading is not None:
            entry.listeners.append(on_loading)
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.task.cancelled() and self._is_closing:
                raise DaemonError("llmd is shutting down") from None
            if entry.num_waiting == 1 and not entry.task.done():
                entry.is_leaving = True  # the last who wanted it has left
                entry.task.cancel()
            raise
        finally:
            entry.num_waiting -= 1
            if on_loading is not None:
                entry.listeners.remove(on_loading)

    def _release(self, key: str) -> None:
        self._keep_alive.release(key, self._clock())
        if key not in self._entries:
            if self._keep_alive.num_leases(key) == 0:
                self._keep_alive.forget(key)  # its worker died under the lease
            return
        self._room_made.set()
        self._expire()

    # -------------------------------------------------------------------- load

    async def _load(self, entry: _Entry) -> WorkerProcess:
        try:
            await self._make_room(entry)
            load = self._load_message(entry.manifest)
            worker = await self._spawn(load, entry.tell)
        except Exception as error:
            self._note(entry, "failed", str(error))
            raise
        if entry.is_leaving:  # cancelled in the moment in which it was ready
            await worker.kill()
            raise asyncio.CancelledError
        entry.worker = worker
        self._measure(entry)
        self._note(entry, "loaded", f"{entry.size_bytes} bytes")
        self._start(self._bury(entry, worker))
        # Whoever asked for it acquires it now; if they all left, the default duration runs.
        self._keep_alive.acquire(entry.key, self._clock(), None)
        self._keep_alive.release(entry.key, self._clock())
        self._schedule_expiry()
        return worker

    async def _make_room(self, entry: _Entry) -> None:
        """Return when the model fits. Evicts idle models; waits for busy ones."""
        async with self._room_lock:
            while True:
                self._room_made.clear()
                verdict = self._verdict(entry)
                if verdict.fits and not verdict.evict:
                    entry.has_room = True
                    return
                if verdict.fits:
                    # One, then look again: while it goes, another may have found work.
                    reason = f"least recently used, to make room for {_name(entry)}"
                    await self._unload(self._entries[verdict.evict[0]], reason, drain_s=0)
                    continue
                if not verdict.must_wait:
                    raise NoMemory(
                        f"{_name(entry)} needs about {_gb(verdict.needed_bytes)} and llmd may use "
                        f"{_gb(verdict.available_bytes)}; raise LLMD_MEMORY_LIMIT or take a "
                        "smaller model"
                    )
                await self._room_made.wait()

    def _verdict(self, entry: _Entry) -> Verdict:
        """Whether the entry fits now, as far as that can be told."""
        others = [
            other for other in self._entries.values() if other is not entry and other.has_room
        ]
        for other in others:
            self._measure(other)
        return place(
            entry.size_bytes,
            self._limit(sum(other.size_bytes for other in others if other.worker is not None)),
            [Resident(other.key, other.size_bytes) for other in others],
            [key for key in self._keep_alive.by_age() if self._is_idle(key)],
            self._settings.max_loaded_models,
        )

    def _limit(self, used_bytes: int) -> int:
        """What the models may use together: other programs' memory is not ours to take, unless
        the person has set the limit."""
        if self._settings.memory_limit_bytes:
            return self._limit_bytes
        return min(self._limit_bytes, used_bytes + self._available_bytes())

    def _is_idle(self, key: str) -> bool:
        """Loaded, and neither leased nor about to be."""
        entry = self._entries.get(key)
        return (
            entry is not None
            and entry.worker is not None
            and entry.num_waiting == 0
            and self._keep_alive.num_leases(key) == 0
        )

    def _load_message(self, manifest: Manifest) -> Load:
        files = [
            ModelFile(file.name, file.role, str(self._store.path_of(file)))
            for file in manifest.files
        ]
        return Load(
            name=manifest.name.display,
            digest=manifest.digest,
            files=files,
            context_length=self._settings.context_length,
            dtype=self._settings.dtype,
            num_threads=self._settings.num_threads,
            template=manifest.template,
            cache_dir=str(self._settings.models / "derived" / manifest.digest),
        )

    async def _spawn_worker(self, load: Load, on_loading: Progress | None) -> WorkerProcess:
        command = self._settings.worker_command or worker_command()
        return await WorkerProcess.start(load, command, on_loading, self._settings.load_timeout_s)

    def _estimate(self, manifest: Manifest) -> int:
        if manifest.digest in self._measured:
            return self._measured[manifest.digest]
        weights = sum(file.size for file in manifest.files if file.role == "weights")
        dtype_bytes = 4 if self._settings.dtype in ("auto", "float32") else 2
        return estimate_bytes(weights, manifest.parameter_count or 0, dtype_bytes)

    def _measure(self, entry: _Entry) -> None:
        if entry.worker is not None and entry.worker.ready is not None:
            own = entry.worker.stats.rss_bytes or entry.worker.ready.weights_bytes
            entry.size_bytes = own
            self._measured[entry.key] = own

    # ------------------------------------------------------------------ unload

    async def unload(self, name: ModelName, reason: str = "asked to stop") -> None:
        """Unload as soon as it is idle; at once if it is now. Not loaded: nothing happens."""
        manifest = self._store.get(name)
        entry = self._entries.get(manifest.digest)
        if entry is None:
            return
        self._keep_alive.expire_now(entry.key)
        if self._is_idle(entry.key):
            await self._unload(entry, reason, drain_s=0)

    async def shutdown(self) -> None:
        """End every worker; running answers may go on for `drain_s`."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        entries = list(self._entries.values())
        for entry in entries:
            if entry.task is not None and not entry.task.done():
                entry.task.cancel()
        drain_s = self._settings.drain_s
        await asyncio.gather(
            *(
                self._unload(entry, "llmd is shutting down", drain_s)
                for entry in entries
                if entry.worker is not None
            ),
            *(entry.task for entry in entries if entry.task is not None),
            return_exceptions=True,
        )
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _unload(self, entry: _Entry, reason: str, drain_s: float) -> None:
        self._leave(entry, reason, drain_s)
        await entry.has_left.wait()

    def _leave(self, entry: _Entry, reason: str, drain_s: float) -> None:
        """From now on nobody is given this worker. `has_left` tells when it is gone."""
        if entry.is_leaving or entry.worker is None:
            return
        entry.is_leaving = True
        self._note(entry, "unloaded", reason)
        self._start(entry.worker.stop(drain_s))

    async def _bury(self, entry: _Entry, worker: WorkerProcess) -> None:
        """When the worker is gone, however that came, so is the entry."""
        await worker.wait_dead()
        if not entry.is_leaving:
            why = str(worker.death())
            self._note(entry, "died", why)
            self._hold_off.died(entry.key, self._clock(), why)
        self._forget(entry)
        await worker.kill()  # reaps its tasks

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if self._keep_alive.num_leases(entry.key) == 0:
            self._keep_alive.forget(entry.key)
        entry.has_left.set()
        self._room_made.set()
        self._schedule_expiry()

    def _expire(self) -> None:
        for key in self._keep_alive.expired(self._clock()):
            if self._is_idle(key):
                self._leave(self._entries[key], "keep_alive is over", drain_s=0)
        self._schedule_expiry()

    def _schedule_expiry(self) -> None:
        """One timer for the next expiry; none while nothing can expire: an idle daemon sleeps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self._keep_alive.next_expiry(self._is_staying)
        if expiry is not None and not self._is_closing:
            delay = max(expiry - self._clock(), 0.01)
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _is_staying(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.is_leaving

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ status

    def loaded(self) -> list[LoadedModel]:
        """Snapshots of the models that can serve, the one that expires last first."""
        now = self._clock()
        snapshots = [
            self._snapshot(entry, entry.worker, now)
            for entry in self._entries.values()
            if entry.worker is not None and not entry.is_leaving
        ]
        far = datetime.max.replace(tzinfo=UTC)
        return sorted(snapshots, key=lambda model: model.expires_at or far, reverse=True)

    def history(self) -> list[HistoryEntry]:
        """The last loads and unloads, the newest last."""
        return list(self._history)

    def _snapshot(self, entry: _Entry, worker: WorkerProcess, now: float) -> LoadedModel:
        assert worker.ready is not None
        expiry = self._keep_alive.expires_at(entry.key, now)
        left = expiry - now
        expires_at = (
            None if left == math.inf else datetime.now(UTC) + timedelta(seconds=max(left, 0.0))
        )
        return LoadedModel(
            manifest=entry.manifest,
            expires_at=expires_at,
            size=worker.ready.weights_bytes + worker.stats.kv_bytes,
            size_vram=worker.ready.weights_vram_bytes,
            context_length=worker.ready.context_length,
            stats=worker.stats,
            devices=("cpu",),
            ready=worker.ready,
            pid=worker.pid,
            num_leases=self._keep_alive.num_leases(entry.key),
        )

    def _note(self, entry: _Entry, event: str, reason: str) -> None:
        log.info("%s %s: %s", _name(entry), event, reason)
        self._history.append(HistoryEntry(datetime.now(UTC), _name(entry), event, reason))

    def check(self) -> None:
        """Assert the invariants."""
        self._keep_alive.check()
        assert self._num_waiting >= 0
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.task is not None, f"{key} has neither a load nor a worker"
            assert entry.worker is None or entry.has_room, f"{key} is loaded without room"
            assert entry.num_waiting >= 0, f"{key}: {entry.num_waiting} wait"
            if entry.worker is not None:
                entry.worker.check()


def _name(entry: _Entry) -> str:
    return entry.manifest.name.display


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
