"""Who holds a model, and until when an idle one stays. Pure: every method is given the time.

    acquire ──▶ held by 1, 2, … leases ──last release──▶ idle until now + keep_alive_s ──▶ expired
                       ▲                                          │
                       └───────────────acquire────────────────────┘

`keep_alive_s` is the model's own and stays until a request sets another; math.inf is forever, 0 is
"unload as soon as it is idle". Nothing here unloads: `expired` and `by_age` name, the caller acts.

Owner: ModelManager, on the event loop. Times in seconds of a monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Hold:
    keep_alive_s: float
    num_leases: int = 0
    last_used: float = 0.0
    expires_at: float = math.inf  # meaningful while num_leases is 0


class KeepAlive:
    """Leases and expiry of the loaded models, by key."""

    def __init__(self, default_keep_alive_s: float) -> None:
        self._default = default_keep_alive_s
        # A model is idle exactly when its num_leases is 0; only then expires_at counts.
        self._holds: dict[str, _Hold] = {}

    def __repr__(self) -> str:
        leases = sum(hold.num_leases for hold in self._holds.values())
        return f"<KeepAlive {len(self._holds)} models, {leases} leases>"

    def acquire(self, key: str, now: float, keep_alive_s: float | None) -> None:
        """One more lease. None leaves the model's duration as it is."""
        hold = self._holds.setdefault(key, _Hold(self._default))
        if keep_alive_s is not None:
            hold.keep_alive_s = keep_alive_s
        hold.num_leases += 1
        hold.last_used = now

    def release(self, key: str, now: float) -> None:
        """One lease less. With the last one the duration begins to run."""
        hold = self._holds[key]
        assert hold.num_leases > 0, f"{key} was released more often than it was acquired"
        hold.num_leases -= 1
        hold.last_used = now
        hold.expires_at = now + hold.keep_alive_s

    def expire_now(self, key: str) -> None:
        """It goes as soon as it is idle."""
        if key in self._holds:
            self._holds[key].keep_alive_s = 0.0
            self._holds[key].expires_at = -math.inf

    def forget(self, key: str) -> None:
        """The model is unloaded."""
        self._holds.pop(key, None)

    def num_leases(self, key: str) -> int:
        """0 for a model that is idle or not known."""
        return self._holds[key].num_leases if key in self._holds else 0

    def last_used(self, key: str) -> float:
        """When it was last acquired or released; -inf for a model that is not known."""
        return self._holds[key].last_used if key in self._holds else -math.inf

    @property
    def total_leases(self) -> int:
        return sum(hold.num_leases for hold in self._holds.values())

    def expires_at(self, key: str, now: float) -> float:
        """When it would be unloaded if nobody came any more; math.inf: never."""
        hold = self._holds[key]
        return now + hold.keep_alive_s if hold.num_leases else hold.expires_at

    def expired(self, now: float) -> list[str]:
        """Idle models whose time is up."""
        return [key for key, hold in self._idle() if hold.expires_at <= now]

    def next_expiry(self, counts: Callable[[str], bool] = lambda key: True) -> float | None:
        """When `expired` will next name one for which `counts` holds; None: not unless something
        happens."""
        times = [
            hold.expires_at
            for key, hold in self._idle()
            if hold.expires_at < math.inf and counts(key)
        ]
        return min(times, default=None)

    def by_age(self) -> list[str]:
        """Idle models in the order in which they should give way: the least recently used first,
        and those that are to stay forever last of all."""
        idle = sorted(
            self._idle(), key=lambda item: (item[1].keep_alive_s == math.inf, item[1].last_used)
        )
        return [key for key, _ in idle]

    def _idle(self) -> list[tuple[str, _Hold]]:
        return [(key, hold) for key, hold in self._holds.items() if hold.num_leases == 0]

    def check(self) -> None:
        """Assert the invariants."""
        for key, hold in self._holds.items():
            assert hold.num_leases >= 0, f"{key}: {hold}"
            assert hold.keep_alive_s >= 0, f"{key}: {hold}"
