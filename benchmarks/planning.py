"""What the engine itself costs: a step of N decoding sequences on a runner that takes no time.

    python -m llmd.benchmarks.planning

Told: microseconds of the processor for a step in all, and for its planning (`schedule`), which is
what a pipelined runner hides behind the step before.
"""

from __future__ import annotations

import statistics
import time

from ..backend.engine.batch import Batch, StepResult
from ..backend.engine.engine import Engine
from ..backend.engine.scheduler import Scheduler, SchedulerConfig
from ..backend.engine.sequence import EngineRequest

NUM_STEPS = 300


class Instant:
    """Draws an id for each chunk that wants one."""

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(batch.step, tuple((7,) if c.samples else () for c in batch.chunks))


class Watched(Scheduler):
    """Notes how long planning took."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.seconds: list[float] = []

    def schedule(self, now: float) -> Batch | None:
        began = time.process_time()
        batch = super().schedule(now)
        self.seconds.append(time.process_time() - began)
        return batch


def main() -> None:
    """Print a table."""
    print("| sequences | step | of it planning |\n|---|---|---|")
    for count in (1, 4, 16, 64, 256):
        scheduler = Watched(SchedulerConfig(65_536, 32, 256))
        engine = Engine(scheduler, Instant())
        for index in range(count):
            prompt = tuple(range(index, index + 160))
            engine.add(EngineRequest(f"s{index}", prompt, 160, 2000))
        for _ in range(30):
            engine.step()
        scheduler.seconds.clear()
        steps = []
        for _ in range(NUM_STEPS):
            began = time.process_time()
            engine.step()
            steps.append(time.process_time() - began)
        step, plan = statistics.median(steps), statistics.median(scheduler.seconds)
        print(f"| {count} | {step * 1e6:.0f} µs | {plan * 1e6:.0f} µs |", flush=True)


if __name__ == "__main__":
    main()
