"""A model whose worker keeps dying is not started over and over. Pure: it is given the time.

The first deaths cost nothing: the next request loads again. From the third within `WINDOW_S` on,
loads are refused for a while that doubles with each death, with the last reason in the error. Each
answer that was completed takes one death back: a model that works is not one that keeps dying.

Owner: ModelManager, on the event loop. Times in seconds of a monotonic clock.
"""

from __future__ import annotations

from .errors import LoadFailed

WINDOW_S = 300.0  # deaths longer ago are forgotten
NUM_FREE = 2  # deaths within the window that have no consequence
FIRST_S = 5.0
LONGEST_S = 120.0


class HoldOff:
    """The recent deaths of each model, by key."""

    def __init__(self) -> None:
        self._deaths: dict[str, list[float]] = {}
        self._reasons: dict[str, str] = {}  # of the last death; the same keys

    def __repr__(self) -> str:
        return f"<HoldOff {sum(map(len, self._deaths.values()))} deaths>"

    def died(self, key: str, now: float, reason: str) -> None:
        """A worker of this model ended unexpectedly."""
        self._deaths[key] = [*self._recent(key, now), now]
        self._reasons[key] = reason

    def worked(self, key: str) -> None:
        """An answer of this model was completed."""
        deaths = self._deaths.get(key)
        if deaths:
            deaths.pop(0)

    def held_s(self, key: str, now: float) -> float:
        """How much longer the model is not to be loaded; 0: it may be."""
        deaths = self._recent(key, now)
        surplus = len(deaths) - NUM_FREE
        if surplus <= 0:
            return 0.0
        return max(deaths[-1] + min(FIRST_S * 2.0 ** (surplus - 1), LONGEST_S) - now, 0.0)

    def raise_if_held(self, key: str, name: str, now: float) -> None:
        """Raises LoadFailed, which says how often, how long and why."""
        held_s = self.held_s(key, now)
        if held_s > 0:
            num = len(self._recent(key, now))
            raise LoadFailed(
                f"{name} died {num} times in a row and is held off for {held_s:.0f} s; "
                f"the last time: {self._reasons[key]}"
            )

    def _recent(self, key: str, now: float) -> list[float]:
        return [at for at in self._deaths.get(key, ()) if now - at < WINDOW_S]
