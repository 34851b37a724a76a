"""How long one step takes, without a server: python benchmarks/decode_step.py MODEL.gguf

For 1, 4, 16 and 64 sequences at a context of 160 tokens: median and best step, and tokens per
second from the median. `--dtype float32` or `bfloat16` times the torch decoder instead; `--threads
1 --cpu-time` counts the processor's seconds, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from llmd.backend.engine.batch import Batch, Chunk, RowStart
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.protocol import Load, ModelFile, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0)


def main() -> None:
    """Parse, load, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    files = [ModelFile("model.gguf", "weights", args.model)]
    load = Load("bench", "bench", files, dtype=args.dtype, num_threads=args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    began = time.perf_counter()
    runner = ModelRunner(open_checkpoint(files), load, lambda share, stage: None)
    print(f"ready after {time.perf_counter() - began:.1f} s: {runner.details}")
    print("sequences  prefill tok/s  step ms (median, best)  tok/s")
    for num_seqs in (1, 4, 16, 64):
        prefill, steps = measure(runner, num_seqs, args.context, args.steps, clock)
        median = statistics.median(steps)
        print(
            f"{num_seqs:9}  {prefill:13.0f}  {median * 1e3:11.2f} {min(steps) * 1e3:10.2f}  "
            f"{num_seqs / median:5.0f}"
        )


def measure(
    runner: ModelRunner, num_seqs: int, context: int, num_steps: int, clock: Callable[[], float]
) -> tuple[float, list[float]]:
    """Tokens per second of the prompts, and the seconds of each decode step."""
    rng = random.Random(0)
    held = -(-(context + num_steps + 2) // runner.block_size) * runner.groups.num_groups
    began = clock()
    for row in range(num_seqs):
        ids = tuple(rng.choices(range(1000, 40_000), k=context))
        blocks = tuple(range(row * held, row * held + held))
        start = RowStart(row, ids, context, GREEDY, 0, frozenset())
        chunk = Chunk(row, 0, context, new_blocks=blocks, samples=True)
        runner.execute(Batch(0, (chunk,), (start,)))
    prefill = num_seqs * context / (clock() - began)
    steps = []
    for step in range(num_steps):
        chunks = tuple(Chunk(row, context + step, 1, samples=True) for row in range(num_seqs))
        began = clock()
        runner.execute(Batch(step, chunks))
        steps.append(clock() - began)
    return prefill, steps


if __name__ == "__main__":
    main()
