"""What the manager tells of itself: values, for the routes and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..backend.protocol import Ready, Stats
from ..registry.manifest import Manifest


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
