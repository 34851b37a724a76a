"""Time on a device, by its own events; on a CPU by the clock, for the dry run alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clock:
    """Measures on one device."""

    device: torch.device
    warmup: int = 5
    repeats: int = 30

    def synchronize(self) -> None:
        """Nothing runs after this."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of the repeats."""
        for _ in range(self.warmup):
            run()
        times = sorted(self._once(run) for _ in range(self.repeats))
        return times[len(times) // 2]

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Deadline:
    """What is left of the time that the whole run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()
