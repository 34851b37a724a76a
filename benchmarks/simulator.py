"""Machines that only take time: what a step costs, as a formula.

    Roofline    a GPU by its data sheet: the longer of reading the weights and doing the arithmetic,
                then the reading of the KV cache, then a fixed overhead
    Fitted      a machine that was measured: a plane through the times of its steps

`SimulatedRunner` stands where a ModelRunner stands: the engine above it is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..backend.engine.batch import Batch, StepResult


class Machine(Protocol):
    """Says how long a step takes."""

    @property
    def name(self) -> str: ...

    def step_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of a step of so many rows, which read so many tokens of KV cache."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU with a model on it."""

    name: str
    weights_bytes: float
    bytes_per_s: float
    flops: float  # reached, not peak
    flop_per_token: float
    kv_bytes_per_token: float
    overhead_s: float = 0.003

    def step_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        reading = self.weights_bytes / self.bytes_per_s
        computing = num_tokens * self.flop_per_token / self.flops
        kv = num_kv_tokens * self.kv_bytes_per_token / self.bytes_per_s
        return max(reading, computing) + kv + self.overhead_s


@dataclass(frozen=True, slots=True)
class Observation:
    """A step that was measured."""

    num_tokens: int
    num_kv_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """step_s = fixed + per token + per token of KV read; least squares."""

    name: str
    fixed_s: float
    token_s: float
    kv_token_s: float

    @classmethod
    def from_steps(cls, name: str, steps: Sequence[Observation]) -> Fitted:
        """The relative error is what is made small: short steps count as much as long ones."""
        weights = np.array([1.0 / step.seconds for step in steps])
        features = np.array([(1.0, step.num_tokens, step.num_kv_tokens) for step in steps])
        found, *_ = np.linalg.lstsq(features * weights[:, None], np.ones(len(steps)), rcond=None)
        fixed, token, kv = (max(float(value), 0.0) for value in found)
        return cls(name, fixed, token, kv)

    def step_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.token_s + num_kv_tokens * self.kv_token_s


class SimulatedRunner:
    """Draws meaningless ids and lets time pass."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0

    def execute(self, batch: Batch) -> StepResult:
        self.now += self.machine.step_s(batch.num_tokens, num_kv_tokens(batch))
        ids = tuple(
            ((batch.step * 31 + chunk.row) % 50_000,) if chunk.samples else ()
            for chunk in batch.chunks
        )
        return StepResult(batch.step, ids)


def num_kv_tokens(batch: Batch) -> int:
    """Tokens of KV cache that a step reads."""
    return sum(chunk.start + chunk.num_tokens for chunk in batch.chunks)
