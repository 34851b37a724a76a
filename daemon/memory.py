"""The machine's memory as the models share it: how much there is, and who may hold what for KV.

    a worker tells new figures ──▶ `changed` ──▶ share out (broker.grants) ──▶ SetKVBudget to each
    a load begins              ──▶ `reclaim` ──▶ the same, and wait until it was given back

Between two tellings of a budget the workers together never hold more than the limit: one that may
hold less is told at once, one that may hold more gets what is free now, and the rest when it is.

Owner: ModelManager, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from .bell import Bell
from .broker import Holding, grants
from .devices import Device, Inventory, default_limit_bytes
from .entry import Entry

RECLAIM_S = 5.0  # for workers to give idle prefixes back before a load begins all the same
PRESSURE_SHARE = 0.04  # of the machine's memory: with less free, idle models leave
PRESSURE_PERIOD_S = 5.0  # one model at a time; memory needs a moment to come back
LOOK_PERIOD_S = 3.0  # how often the memory that other programs leave is looked at
BUDGET_STEP = 16 * 10**6  # smaller changes of a budget are not told
BUDGET_PART = 16  # ... nor those of less than this part of a large one


class MemoryShares:
    """`entries` are the manager's own; `limit_bytes` 0: what the machine and others leave."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        inventory: Inventory,
        limit_bytes: int,
        clock: Callable[[], float],
        last_used: Callable[[str], float],
        start: Callable[[Awaitable[None]], None],
        relieve: Callable[[int], bool],
    ) -> None:
        """`start` runs something in the background; `relieve` makes an idle model leave, because
        only so much memory is free, and says whether there was one."""
        self._entries = entries
        self._inventory = inventory
        self._set_limit_bytes = limit_bytes
        self.limit_bytes = limit_bytes or default_limit_bytes()
        self._clock = clock
        self._last_used = last_used
        self._start = start
        self._relieve = relieve
        # All the mutable state.
        self.changes = Bell()  # figures came, or a budget was told
        self._handle: asyncio.TimerHandle | None = None
        self._shared_at = -math.inf
        self._relieved_at = -math.inf

    # ------------------------------------------------------------------- limit

    def limit(self, found: Sequence[Device]) -> int:
        """What the models may use together: other programs' memory is not ours to take, unless
        the person has set the limit."""
        if self._set_limit_bytes:
            return self.limit_bytes
        free = sum(device.free_bytes for device in found if not device.is_gpu)
        used = sum(entry.resident_bytes for entry in self._entries.values())
        return min(self.limit_bytes, used + free)

    # ----------------------------------------------------------------- figures

    def follow(self, entry: Entry) -> None:
        """A worker is ready: from now on its figures count."""
        worker = entry.worker
        assert worker is not None and worker.ready is not None
        entry.kv_budget_bytes = worker.ready.num_blocks * worker.ready.block_bytes
        worker.on_stats = lambda: self._figures_came(entry)
        self.changed()

    def _figures_came(self, entry: Entry) -> None:
        """Most figures say what the ones before them said: an idle daemon does next to nothing."""
        assert entry.worker is not None
        stats = entry.worker.stats
        figures = (
            stats.blocks_in_use,
            stats.blocks_cached,
            stats.kv_bytes,
            stats.kv_wanted_bytes,
            stats.rss_bytes // BUDGET_STEP,
        )
        if figures != entry.figures or self._clock() - self._shared_at > LOOK_PERIOD_S:
            entry.figures = figures
            self.changed()

    def changed(self) -> None:
        """Share out soon: once for all that change in the same tick."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(0.0, self.share_out)

    def close(self) -> None:
        """No more budgets."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_later(0.0, lambda: None)

    # --------------------------------------------------------------- share out

    def share_out(self) -> None:
        """Tell each worker what it may hold, and notice if other programs need memory."""
        self._handle = None
        self._shared_at = self._clock()
        loaded = [entry for entry in self._entries.values() if entry.worker is not None]
        if not loaded:
            return
        holders = [entry for entry in loaded if not entry.on_devices]
        on_gpus = sum(entry.resident_bytes for entry in loaded if entry.on_devices)
        host = self._inventory.host()
        self._watch(host)
        coming = sum(
            entry.size_bytes
            for entry in self._entries.values()
            if entry.has_room and entry.worker is None
        )
        limit = self.limit([host]) - coming - on_gpus
        room = max(limit - sum(entry.resident_bytes for entry in holders), 0)
        budgets = grants(limit, [self._holding(entry) for entry in holders])
        for entry in holders:
            self._tell(entry, min(budgets[entry.key], entry.kv_bytes + room))
        self.changes.ring()

    def _tell(self, entry: Entry, budget: int) -> None:
        assert entry.worker is not None
        stats = entry.worker.stats
        is_tight = budget < stats.kv_bytes or entry.kv_budget_bytes < stats.kv_wanted_bytes
        step = 1 if is_tight else max(BUDGET_STEP, entry.kv_budget_bytes // BUDGET_PART)
        if abs(budget - entry.kv_budget_bytes) < step:
            return
        entry.kv_budget_bytes = budget
        self._start(entry.worker.set_kv_budget(budget))

    def _holding(self, entry: Entry) -> Holding:
        assert entry.worker is not None and entry.worker.ready is not None
        stats, ready = entry.worker.stats, entry.worker.ready
        return Holding(
            key=entry.key,
            base_bytes=entry.resident_bytes - stats.kv_bytes,
            in_use_bytes=entry.in_use_bytes,
            cached_bytes=stats.blocks_cached * ready.block_bytes,
            wanted_bytes=stats.kv_wanted_bytes,
            capacity_bytes=ready.num_blocks * ready.block_bytes,
            is_busy=entry.num_leases > 0,
            last_used=self._last_used(entry.key),
        )

    async def reclaim(self) -> None:
        """Have idle prefixes given back before a load takes the memory; not longer than a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECLAIM_S):
                self.share_out()
                while self._overdrawn_bytes() > 0:
                    await self.changes.wait()

    def _overdrawn_bytes(self) -> int:
        """By how much workers hold more than they were told to, beyond what they must."""
        return sum(
            max(entry.kv_bytes - max(entry.kv_budget_bytes, entry.in_use_bytes), 0)
            for entry in self._entries.values()
            if not entry.is_leaving
        )

    def _watch(self, host: Device) -> None:
        """Other programs need the memory: an idle model leaves, one at a time."""
        now = self._clock()
        is_plenty = host.free_bytes > PRESSURE_SHARE * host.total_bytes
        if self._set_limit_bytes or is_plenty or now - self._relieved_at < PRESSURE_PERIOD_S:
            return
        if self._relieve(host.free_bytes):
            self._relieved_at = now
