"""ModelManager: a name to a running worker, leased to the caller.

    lease(name) ──loaded?──yes──────────────────────────▶ Lease
                     │no
                     ▼
                  _load: make room (placement) ──▶ spawn ──▶ ready ──▶ Lease for all who wait

A request for a ready model takes the upper path and waits for nothing. Loads of different models
run side by side; a load that has to wait for a busy model lets smaller ones pass, but not for ever.
Two who ask for the same model share one load, and one who leaves does not end it for the other. A
busy model may get more workers, on GPUs of their own (replicas.py).

The memory for KV caches is shared out by `broker`, each time a worker tells new figures: a load, or
a model with work, first takes the idle prefixes of the others, then (placement) their room.

A worker that dies is forgotten at once: the next lease loads again, and who was being answered goes
on there (failover.py). A model that keeps dying is held off for a while (holdoff.py). A model whose
load failed is tried again by the next request, but not by a crowd at the same moment.

An entry leaves in two parts: `_leave` marks it, within the tick that found it idle, and only then
is anything awaited. So nobody can be given a worker that was chosen to go.

Owner: the event loop's thread. State: `_entries`, the KeepAlive and the running requests; nobody
else changes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

from ..backend.protocol import Generate, Load
from ..registry.manifest import Manifest
from ..registry.names import ModelName
from ..registry.store import ModelStore
from .bell import Bell
from .devices import Device, Inventory
from .entry import Entry, weights_bytes
from .errors import DiedInLoad, NoMemory, ServerBusy, ShuttingDown
from .holdoff import HoldOff
from .keepalive import KeepAlive
from .lease import Lease
from .loading import NUM_SEQS, load_message
from .memory import MemoryShares
from .model_size import num_layers_of
from .placement import (
    KV_FLOOR_BYTES,
    NO_WISH,
    Need,
    Resident,
    Room,
    Verdict,
    Wish,
    estimate_bytes,
    place,
)
from .remembered import Remembered
from .replicas import (
    LOOK_PERIOD_S,
    free_number,
    is_for_a_replica,
    least_busy,
    untaken,
    wants_another,
)
from .running import RunningRequest, RunningRequests
from .settings import Settings
from .snapshots import HistoryEntry, LoadedModel, LoadingModel, snapshot_of
from .spare_worker import SpareWorker, worker_command
from .worker_process import Progress, State, WorkerProcess

log = logging.getLogger("llmd.manager")

HISTORY_LENGTH = 100  # loads and unloads that `history` remembers
PATIENCE_S = 10.0  # a load that waits for memory lets others pass it for so long

Spawn = Callable[[Load, Progress | None], Awaitable[WorkerProcess]]


class ModelManager:
    """The loaded models."""

    def __init__(
        self,
        settings: Settings,
        store: ModelStore,
        spawn: Spawn | None = None,
        clock: Callable[[], float] = time.monotonic,
        inventory: Inventory | None = None,
        spare: SpareWorker | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._spawn = spawn or self._spawn_worker
        self._clock = clock
        self._inventory = inventory or Inventory(settings.devices)
        self._spare = spare or SpareWorker()
        # All the mutable state.
        self._entries: dict[str, Entry] = {}
        self._keep_alive = KeepAlive(settings.keep_alive_s)
        self._hold_off = HoldOff()
        self._remembered = Remembered(store.root / "derived")
        self._queue: list[Entry] = []  # loads that wait for room, in order of arrival
        self._room = Bell()  # a model left, a lease ended, or memory came back: look again
        self._requests = RunningRequests()
        self._counters = dict.fromkeys(("loads", "unloads", "evictions", "worker_deaths"), 0)
        self._replicated_at = -math.inf  # when a card for a replica was looked for
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._history: deque[HistoryEntry] = deque(maxlen=HISTORY_LENGTH)
        self._is_closing = False
        self._memory = MemoryShares(
            self._entries,
            self._inventory,
            settings.memory_limit_bytes,
            clock,
            self._keep_alive.last_used,
            self._start,
            self._relieve,
        )

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
        wish: Wish = NO_WISH,
    ) -> AsyncIterator[Lease]:
        """The only way to a worker.

        keep_alive_s: None leaves the model's duration as it is, math.inf is forever. `wish` counts
        if this loads the model. Raises ModelNotFound, ServerBusy, NoMemory, LoadFailed.
        """
        manifest = self._store.get(name)
        began = self._clock()
        entry = least_busy(self._entries_of(manifest.digest))
        if entry is None:
            worker = await self._wait_for(manifest, on_loading, wish)
            entry = self._entries.get(manifest.digest)
        elif entry.num_leases >= NUM_SEQS + self._settings.max_queue:
            raise ServerBusy
        else:
            assert entry.worker is not None
            worker = entry.worker
        key = entry.key if entry is not None else manifest.digest
        self._keep_alive.acquire(key, self._clock(), keep_alive_s)
        if entry is not None:
            entry.num_leases += 1
            self._replicate(manifest)
        try:
            yield Lease(self, manifest, worker, self._clock() - began)
        finally:
            if entry is not None:
                entry.num_leases -= 1
            self._release(key)

    async def worker_for(self, manifest: Manifest) -> WorkerProcess:
        """A ready worker for someone who holds a lease already. Loads if need be."""
        return self._ready_worker(manifest) or await self._wait_for(manifest, None, NO_WISH)

    def _ready_worker(self, manifest: Manifest) -> WorkerProcess | None:
        entry = least_busy(self._entries_of(manifest.digest))
        return entry.worker if entry is not None else None

    def _entries_of(self, digest: str) -> list[Entry]:
        """The model's workers, nearly always one or none."""
        found = [self._entries[digest]] if digest in self._entries else []
        if self._settings.replicas > 1:
            others = (entry for entry in self._entries.values() if entry.number)
            found += [entry for entry in others if entry.manifest.digest == digest]
        return found

    async def _wait_for(
        self, manifest: Manifest, on_loading: Progress | None, wish: Wish
    ) -> WorkerProcess:
        """Join the model's load, or begin it."""
        while True:
            entry = self._entries.get(manifest.digest)
            if entry is None:
                entry = self._begin_load(manifest, wish)
            elif entry.num_waiting >= self._settings.max_queue:
                raise ServerBusy
            elif entry.is_leaving or (entry.worker and entry.worker.state is State.DEAD):
                await self._until_left(entry)
                continue
            return await self._join(entry, on_loading)

    async def _until_left(self, entry: Entry) -> None:
        entry.num_waiting += 1
        try:
            await entry.has_left.wait()
        finally:
            entry.num_waiting -= 1

    def _begin_load(self, manifest: Manifest, wish: Wish) -> Entry:
        if self._is_closing:
            raise ShuttingDown
        now = self._clock()
        self._hold_off.raise_if_held(manifest.digest, manifest.name.display, now)
        entry = Entry(manifest, self._estimate(manifest), wish, now)
        self._begin(entry)
        return entry

    def _replicate(self, manifest: Manifest) -> None:
        """One more worker of a busy model in the background, if a GPU is free for it now."""
        entries = self._entries_of(manifest.digest)
        now = self._clock()
        is_early = now - self._replicated_at < LOOK_PERIOD_S
        if self._is_closing or is_early or not wants_another(entries, self._settings.replicas):
            return
        self._replicated_at = now
        if self._hold_off.held_s(manifest.digest, now) > 0:
            return
        number = free_number(entries)
        entry = Entry(manifest, self._estimate(manifest), entries[0].wish, now, number)
        verdict = self._verdict(entry)
        if is_for_a_replica(verdict):
            self._settle(entry, verdict)
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        manifest = entry.manifest
        entry.task = asyncio.create_task(self._load(entry), name=f"load {manifest.name.display}")
        # Before the load's first step runs: two who come in the same tick share it.
        self._entries[entry.key] = entry
        entry.task.add_done_callback(lambda task: self._load_ended(entry, task))

    def _load_ended(self, entry: Entry, task: asyncio.Task[WorkerProcess]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._forget(entry)

    async def _join(self, entry: Entry, on_loading: Progress | None) -> WorkerProcess:
        assert entry.task is not None
        if on_loading is not None:
            entry.listeners.append(on_loading)
            on_loading(*entry.progress)
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.task.cancelled() and self._is_closing:
                raise ShuttingDown from None
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
        self._room.ring()
        self._expire()

    # ---------------------------------------------------------------- requests

    def running_request(self, lease: Lease, request: Generate) -> RunningRequest:
        """The record of a sequence that is about to begin: it lists itself while it runs."""
        return RunningRequest(
            request.id,
            lease.manifest.name.display,
            request.client,
            self._clock(),
            self._requests,
            lambda: lease.cancel(request.id),
            lambda: self._hold_off.worked(lease.manifest.digest),
        )

    def requests(self) -> list[tuple[RunningRequest, float]]:
        """What is being answered, and for how many seconds."""
        now = self._clock()
        return [(request, now - request.began_at) for request in self._requests.list()]

    def cancel(self, beginning: str) -> str | None:
        """End the request whose id begins so, and return the id; its client gets a proper end.

        None if there is no such request, or more than one.
        """
        request = self._requests.cancel(beginning)
        return request.id if request is not None else None

    # -------------------------------------------------------------------- load

    async def _load(self, entry: Entry) -> WorkerProcess:
        try:
            if not entry.has_room:
                await self._make_room(entry)
            capacity = 0 if entry.on_devices else self._kv_capacity(entry)
            load = load_message(entry, self._store, self._settings, capacity)
            entry.tell(0.0, "starting")
            worker = await self._spawn(load, entry.tell)
        except Exception as error:
            self._note(entry, "failed", str(error))
            if isinstance(error, DiedInLoad):  # not in words: the next one may well die too
                self._hold_off.died(entry.manifest.digest, self._clock(), str(error))
            raise
        if entry.is_leaving:  # cancelled in the moment in which it was ready
            await worker.kill()
            raise asyncio.CancelledError
        entry.worker = worker
        self._memory.follow(entry)
        self._measure(entry)
        self._counters["loads"] += 1
        self._note(entry, "loaded", f"{_gb(entry.size_bytes)} on {', '.join(entry.devices)}")
        self._start(self._bury(entry, worker))
        # Whoever asked for it acquires it now; if they all left, the default duration runs.
        self._keep_alive.acquire(entry.key, self._clock(), None)
        self._keep_alive.release(entry.key, self._clock())
        self._schedule_expiry()
        return worker

    async def _make_room(self, entry: Entry) -> None:
        """Return when the model fits. Evicts idle models; waits for busy ones."""
        self._queue.append(entry)
        try:
            while True:
                if not self._may_decide(entry):
                    await self._room.wait()
                    continue
                verdict = self._verdict(entry)
                if verdict.fits and not verdict.evict:
                    self._settle(entry, verdict)
                    break
                if verdict.fits:
                    # One, then look again: while it goes, another may have found work.
                    victim = self._entries.get(verdict.evict[0])
                    if victim is not None and self._is_idle(victim.key):
                        self._counters["evictions"] += 1
                        reason = f"least recently used, to make room for {entry.name}"
                        await self._unload(victim, reason, drain_s=0)
                    continue
                if not verdict.must_wait:
                    if self._settings_wish(entry.wish).require_gpu:
                        raise NoMemory(
                            f"{entry.name} does not fit on the GPUs as they are, and a GPU is "
                            "required; free their memory, or allow the CPU"
                        )
                    raise NoMemory(
                        f"{entry.name} needs about {_gb(verdict.needed_bytes)} and llmd may use "
                        f"{_gb(verdict.available_bytes)}; raise LLMD_MEMORY_LIMIT or take a "
                        "smaller model"
                    )
                await self._room.wait()
        finally:
            self._queue.remove(entry)
            self._room.ring()
        await self._memory.reclaim()

    def _settle(self, entry: Entry, verdict: Verdict) -> None:
        """It goes there, and counts there from now on."""
        entry.parts = verdict.parts
        entry.on_devices = entry.wanted_on_devices()
        entry.has_room = True

    def _may_decide(self, entry: Entry) -> bool:
        """A load that has waited long is not passed any more."""
        first = self._queue[0]
        return first is entry or self._clock() - first.asked_at < PATIENCE_S

    def _verdict(self, entry: Entry) -> Verdict:
        """Whether the entry fits now, as far as that can be told. Idle prefixes give way."""
        found = self._free_for_a_load()
        others = [
            other for other in self._entries.values() if other is not entry and other.has_room
        ]
        residents = []
        for other in others:
            self._measure(other)
            residents.append(Resident(other.key, other.kept_bytes, other.on_devices))
        used = sum(resident.size_bytes for resident in residents)
        # A load that is under way has not taken yet what it will take.
        coming: dict[str, int] = {}
        for other in others:
            if other.worker is None:
                for device, size in other.on_devices.items():
                    coming[device] = coming.get(device, 0) + size
        gpus = tuple(
            dataclasses.replace(device, free_bytes=device.free_bytes - coming.get(device.id, 0))
            for device in found
            if device.is_gpu
        )
        siblings = [other for other in others if other.manifest.digest == entry.manifest.digest]
        gpus = untaken(gpus, siblings)
        return place(
            self._need(entry, bool(gpus)),
            Room(self._memory.limit(found) - used, gpus),
            residents,
            [key for key in self._keep_alive.by_age() if self._is_idle(key)],
            self._settings.max_loaded_models,
            self._settings_wish(entry.wish),
        )

    def _free_for_a_load(self) -> tuple[Device, ...]:
        """The devices. What the spare worker holds is free for the load that takes it over."""
        spare_bytes = self._spare.private_bytes
        return tuple(
            device
            if device.is_gpu or not spare_bytes
            else dataclasses.replace(device, free_bytes=device.free_bytes + spare_bytes)
            for device in self._inventory.probe()
        )

    def _settings_wish(self, wish: Wish) -> Wish:
        """With what holds for all loads."""
        return dataclasses.replace(
            wish,
            require_gpu=wish.require_gpu or self._settings.require_gpu,
            spread=wish.spread or self._settings.spread,
            gpu_overhead_bytes=self._settings.gpu_overhead_bytes,
        )

    def _is_idle(self, key: str) -> bool:
        """Loaded, and neither leased nor about to be."""
        entry = self._entries.get(key)
        return (
            entry is not None
            and entry.worker is not None
            and entry.num_waiting == 0
            and self._keep_alive.num_leases(key) == 0
        )

    def _kv_capacity(self, entry: Entry) -> int:
        return max(self._memory.limit_bytes - entry.kept_bytes, KV_FLOOR_BYTES)

    async def _spawn_worker(self, load: Load, on_loading: Progress | None) -> WorkerProcess:
        command = self._settings.worker_command or worker_command()
        timeout_s, spare = self._settings.load_timeout_s, self._spare.take()
        return await WorkerProcess.start(load, command, on_loading, timeout_s, spare=spare)

    def _estimate(self, manifest: Manifest) -> int:
        """What a load has to find: what it took the last time and some KV, or a guess."""
        base = self._remembered.get(manifest.digest, self._settings.dtype)
        if base is not None:
            return base + KV_FLOOR_BYTES
        dtype_bytes = 4 if self._settings.dtype in ("auto", "float32") else 2
        if manifest.format == "gguf" and self._settings.dtype == "auto":
            dtype_bytes = 0
        return estimate_bytes(weights_bytes(manifest), manifest.parameter_count or 0, dtype_bytes)

    def _need(self, entry: Entry, has_gpus: bool) -> Need:
        num_layers = num_layers_of(self._store, entry.manifest) if has_gpus else 1
        return Need(entry.weights_bytes, num_layers, entry.size_bytes)

    def _measure(self, entry: Entry) -> None:
        """What it takes now; remembered, as soon as the worker has told it."""
        if entry.worker is not None and entry.worker.ready is not None:
            entry.size_bytes = entry.resident_bytes
            if not entry.on_devices and entry.worker.stats.rss_bytes:
                base = entry.resident_bytes - entry.kv_bytes
                digest = entry.manifest.digest
                self._remembered.put(digest, self._settings.dtype, base)

    def _relieve(self, free_bytes: int) -> bool:
        """The least recently used idle model leaves for other programs' sake, if there is one."""
        idle = [key for key in self._keep_alive.by_age() if self._is_idle(key)]
        if idle:
            self._counters["evictions"] += 1
            reason = f"other programs need memory: {_gb(free_bytes)} are free"
            self._leave(self._entries[idle[0]], reason, drain_s=0)
        return bool(idle)

    # ------------------------------------------------------------------ unload

    async def unload(self, name: ModelName, reason: str = "asked to stop") -> None:
        """Unload as soon as it is idle; at once if it is now. Not loaded: nothing happens."""
        manifest = self._store.get(name)
        for entry in self._entries_of(manifest.digest):
            self._keep_alive.expire_now(entry.key)
            if self._is_idle(entry.key):
                await self._unload(entry, reason, drain_s=0)

    async def tidy(self, digest: str) -> None:
        """Remove what was derived from a model that is no longer installed: its saved prefixes are
        its user's conversations. While it is loaded, nothing; the end of its worker comes here."""
        if self._entries_of(digest) or any(m.digest == digest for m in self._store.list()):
            return
        folder = self._store.root / "derived" / digest
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def shutdown(self) -> None:
        """End every worker; running answers may go on for `drain_s`."""
        self._is_closing = True
        self._memory.close()
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

    async def _unload(self, entry: Entry, reason: str, drain_s: float) -> None:
        self._leave(entry, reason, drain_s)
        await entry.has_left.wait()

    def _leave(self, entry: Entry, reason: str, drain_s: float) -> None:
        """From now on nobody is given this worker. `has_left` tells when it is gone."""
        if entry.is_leaving or entry.worker is None:
            return
        entry.is_leaving = True
        self._measure(entry)
        self._counters["unloads"] += 1
        self._note(entry, "unloaded", reason)
        self._start(entry.worker.stop(drain_s))

    async def _bury(self, entry: Entry, worker: WorkerProcess) -> None:
        """When the worker is gone, however that came, so is the entry."""
        await worker.wait_dead()
        if not entry.is_leaving:
            why = str(worker.death())
            self._counters["worker_deaths"] += 1
            self._note(entry, "died", why)
            self._hold_off.died(entry.manifest.digest, self._clock(), why)
        self._forget(entry)
        await worker.kill()  # reaps its tasks

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if self._keep_alive.num_leases(entry.key) == 0:
            self._keep_alive.forget(entry.key)
        entry.has_left.set()
        self._start(self.tidy(entry.manifest.digest))
        self._room.ring()
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
            snapshot_of(
                entry,
                self._keep_alive.expires_at(entry.key, now) - now,
                self._keep_alive.num_leases(entry.key),
            )
            for entry in self._entries.values()
            if entry.worker is not None and not entry.is_leaving
        ]
        far = datetime.max.replace(tzinfo=UTC)
        return sorted(snapshots, key=lambda model: model.expires_at or far, reverse=True)

    def loading(self) -> list[LoadingModel]:
        """The models on their way in, the first to be asked for first."""
        return [
            LoadingModel(entry.manifest, entry.size_bytes, *entry.progress, entry.num_waiting)
            for entry in self._entries.values()
            if entry.worker is None and not entry.is_leaving
        ]

    def devices(self) -> tuple[Device, ...]:
        """What there is to compute on, looked at now."""
        return self._inventory.probe()

    def counters(self) -> dict[str, int]:
        """Totals since the start."""
        return dict(self._counters)

    def history(self) -> list[HistoryEntry]:
        """The last loads and unloads, the newest last."""
        return list(self._history)

    def _note(self, entry: Entry, event: str, reason: str) -> None:
        log.info("%s %s: %s", entry.name, event, reason)
        self._history.append(HistoryEntry(datetime.now(UTC), entry.name, event, reason))

    def check(self) -> None:
        """Assert the invariants."""
        self._keep_alive.check()
        assert all(entry in self._entries.values() for entry in self._queue)
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.task is not None, f"{key} has neither a load nor a worker"
            assert entry.worker is None or entry.has_room, f"{key} is loaded without room"
            assert entry.num_waiting >= 0, f"{key}: {entry.num_waiting} wait"
            if entry.worker is not None:
                entry.worker.check()


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
