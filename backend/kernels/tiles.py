"""The tiles that a product with a packed weight may use, and which one a weight was tuned to.

The first candidate is the shipped choice; all of them compile without spills for every supported
machine (tests/gpu/aot.py). Tuning times them once per kind of weight and keeps the place of the
fastest: the result is data, which a caller may store.

A row's bits depend on its tile. Within one process, and with a stored result from start to start, a
weight keeps its tile, so that a batch leaves every answer as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SMALL_M = 16  # rows up to which a product is bound by reading the weight


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one program's work, and how many threads and loads in flight it has."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = (
    Tile(16, 32, 128, 4, 3),
    Tile(16, 16, 128, 4, 4),
    Tile(16, 64, 128, 4, 3),
    Tile(16, 32, 256, 4, 2),
)
MANY_ROWS = (
    Tile(64, 64, 64, 4, 3),
    Tile(64, 64, 64, 8, 3),
    Tile(64, 32, 64, 4, 3),
)
MANY_WIDE_ROWS = (Tile(32, 32, 64, 4, 2),)  # fp32 operands


def candidates(num_rows: int, element_bytes: int = 2) -> tuple[Tile, ...]:
    """What may be used for so many rows; the first is the shipped choice."""
    if num_rows <= SMALL_M:
        return FEW_ROWS
    return MANY_ROWS if element_bytes <= 2 else MANY_WIDE_ROWS


@dataclass(frozen=True, slots=True)
class Tuned:
    """Places among the candidates, for few rows and for many."""

    few: int = 0
    many: int = 0

    def tile(self, num_rows: int, element_bytes: int = 2) -> Tile:
        """The one to use; a place that is not there any more is the first."""
        among = candidates(num_rows, element_bytes)
        place = self.few if num_rows <= SMALL_M else self.many
        return among[place] if place < len(among) else among[0]


def fastest(num_candidates: int, seconds: Callable[[int], float], margin: float = 0.03) -> int:
    """The place of the fastest candidate; the first, unless another is clearly faster."""
    times = [seconds(place) for place in range(num_candidates)]
    best = min(range(num_candidates), key=times.__getitem__)
    return best if times[best] < times[0] * (1 - margin) else 0
