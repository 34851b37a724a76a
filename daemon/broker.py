"""Who may hold how much KV memory. Pure: what each worker holds in, what each may hold out.

All loaded models share what the limit leaves beside their weights. In this order:

    1. what sequences hold now            never taken away
    2. what they will need next           shared evenly while there is not enough
    3. known prefixes nobody holds        the most recently used model's first
    4. the rest                           for the busy models to grow into; if none is, for all

So a model that needs memory takes it from the idle prefixes of the others before any model has to
go, and the sum is within the limit as long as the sequences of step 1 are.

Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR_BYTES = 32 * 10**6  # what an idle model may begin with, before it has to ask


@dataclass(frozen=True, slots=True)
class Holding:
    """One worker's memory."""

    key: str
    base_bytes: int  # resident, without the KV cache: weights, interpreter, buffers
    in_use_bytes: int  # KV that sequences hold
    cached_bytes: int  # KV of known prefixes that nobody holds
    wanted_bytes: int  # KV it would like to hold in all, for what runs and waits
    capacity_bytes: int  # KV it can ever hold
    is_busy: bool
    last_used: float  # a time; later is hotter

    @property
    def least_bytes(self) -> int:
        """What it cannot do without."""
        return self.base_bytes + self.in_use_bytes


def grants(limit_bytes: int, holdings: Sequence[Holding]) -> dict[str, int]:
    """The KV budget of each worker."""
    budgets = {holding.key: holding.in_use_bytes for holding in holdings}
    left = limit_bytes - sum(holding.least_bytes for holding in holdings)
    if left <= 0:
        return budgets

    def give(needs: Mapping[str, int]) -> None:
        nonlocal left
        for key, share in shared(left, needs).items():
            budgets[key] += share
            left -= share

    by_key = {holding.key: holding for holding in holdings}
    give({key: _next(holding) - budgets[key] for key, holding in by_key.items()})
    for holding in sorted(holdings, key=lambda holding: -holding.last_used):
        held = holding.in_use_bytes + holding.cached_bytes
        give({holding.key: min(held, holding.capacity_bytes) - budgets[holding.key]})
    busy = {key: holding for key, holding in by_key.items() if holding.is_busy} or by_key
    give({key: holding.capacity_bytes - budgets[key] for key, holding in busy.items()})
    return budgets


def _next(holding: Holding) -> int:
    return min(
        max(holding.wanted_bytes, holding.in_use_bytes + FLOOR_BYTES), holding.capacity_bytes
    )


def shared(amount: int, needs: Mapping[str, int]) -> dict[str, int]:
    """Split `amount` evenly, but give nobody more than it needs."""
    found: dict[str, int] = {}
    open_needs = sorted((need, key) for key, need in needs.items() if need > 0)
    for number, (need, key) in enumerate(open_needs):
        found[key] = min(need, amount // (len(open_needs) - number))
        amount -= found[key]
    return found
