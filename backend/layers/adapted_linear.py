"""A linear to which adapters add a change of low rank, each for its own rows (Hu et al. 2021).

    y = x · Wᵀ + b,   and for the rows of an adapter   y += (x · Aᵀ) · Bᵀ

One product with W serves all rows of a step, whichever adapter they asked for, as in S-LoRA (Sheng
et al. 2023). A row's result does not depend on the other rows: see Linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .linear import Linear


class ActiveAdapters:
    """Which rows of the running step asked for which adapter. Owner: whoever runs steps."""

    def __init__(self) -> None:
        self.rows: Mapping[str, Tensor] = {}  # by adapter, int64; rows of the bare model in none

    def begin(self, rows: Mapping[str, Sequence[int]]) -> None:
        """A step begins."""
        self.rows = {name: torch.tensor(found) for name, found in rows.items() if found}


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to some outputs of a linear. The scale is part of `up`."""

    first_output: int
    down: Tensor  # A [rank, in]
    up: Tensor  # B [out, rank]


class _Packed:
    """A Change in the layout of the products."""

    def __init__(self, change: Change, dtype: torch.dtype) -> None:
        self._first = change.first_output
        self._down = Linear(change.down.to(dtype))
        self._up = Linear(change.up.to(dtype))
        self.size_bytes = self._down.size_bytes + self._up.size_bytes

    def add_to(self, y: Tensor, rows: Tensor, x: Tensor) -> None:
        added = self._up(self._down(x))
        y[:, self._first : self._first + self._up.out_features].index_add_(0, rows, added)


class AdaptedLinear(Linear):
    """`changes` by the adapter's name; an adapter may leave this linear as it is."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        changes: Mapping[str, Sequence[Change]],
        active: ActiveAdapters,
    ) -> None:
        super().__init__(weight, bias)
        self._active = active
        self._changes = {
            name: [_Packed(change, weight.dtype) for change in found]
            for name, found in changes.items()
        }
        self.size_bytes += sum(part.size_bytes for each in self._changes.values() for part in each)

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        for name, rows in self._active.rows.items():
            changes = self._changes.get(name, ())
            if changes:
                own = x[rows]
                for change in changes:
                    change.add_to(y, rows, own)
        return y
