"""What the manager tells of itself: values, for the routes and the metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..backend.protocol import Ready, Stats
from ..registry.manifest import Manifest
from .entry import Entry


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
    kv_budget_bytes: int = 0  # what the KV cache may reach now


@dataclass(frozen=True, slots=True)
class LoadingModel:
    """A model on its way in."""

    manifest: Manifest
    size: int  # bytes, an estimate
    fraction: float  # 0..1
    stage: str  # "waiting for memory", "reading weights", ...
    num_waiting: int


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A load or an unload, and why."""

    at: datetime
    model: str
    event: str  # "loaded", "unloaded", "failed", "died"
    reason: str


def snapshot_of(entry: Entry, left_s: float, num_leases: int) -> LoadedModel:
    """Of a model that is loaded, and goes when it has been idle for so many seconds more."""
    worker = entry.worker
    assert worker is not None and worker.ready is not None
    ready, stats = worker.ready, worker.stats
    is_staying = left_s == math.inf
    expires_at = None if is_staying else datetime.now(UTC) + timedelta(seconds=max(left_s, 0.0))
    return LoadedModel(
        manifest=entry.manifest,
        expires_at=expires_at,
        size=ready.weights_bytes + stats.kv_bytes,
        size_vram=ready.weights_vram_bytes + round(stats.kv_bytes * entry.gpu_share),
        context_length=ready.context_length,
        stats=stats,
        devices=entry.devices,
        ready=ready,
        pid=worker.pid,
        num_leases=num_leases,
        kv_budget_bytes=entry.kv_budget_bytes,
    )
