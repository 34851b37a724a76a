"""Ten thousand requests through the real engine and runner, on a two-layer model.

    python -m tests.backend.soak benchmarks/results/soak.md [REQUESTS]      (about 3 minutes)

Random lengths, priorities, clients, salts, shared prefixes, sampling, stop tokens, drafts; many are
cancelled at a random moment, others are made to give back their blocks, and the pool is small.
Every request must end exactly once, as asked; the invariants hold on the way; in the end no block
is in use; the resident memory after the first fifth is that of the end.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.protocol import Load, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

from .test_compiled_decoder import Checkpoint

NUM_REQUESTS = 10_000
NUM_BLOCKS = 26
MAX_IN_SYSTEM = 48  # running and waiting
CHECK_EVERY = 50  # steps
VOCABULARY = 96
MAX_GROWTH = 0.03  # of the resident memory; what the allocator rounds


@dataclass
class Report:
    requests: int = 0
    steps: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    blocks_leaked: int = 0
    rss_bytes: list[int] = field(default_factory=list)  # at each fifth of the requests
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """Of the resident memory, from the first fifth to the end."""
        return self.rss_bytes[-1] / self.rss_bytes[0] - 1


class Soak:
    """One run."""

    def __init__(self, num_requests: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_requests = num_requests
        load = Load("soak", "soak", [], num_threads=1, context_length=400)
        self._runner = ModelRunner(Checkpoint(), load, lambda share, stage: None)
        config = SchedulerConfig(
            min(NUM_BLOCKS, self._runner.num_blocks),
            self._runner.block_size,
            max_num_seqs=24,
            max_batch_tokens=256,
            max_drafts=4,
        )
        self._engine = Engine(Scheduler(config), self._runner)
        self._heads = [self._ids(self._rng.randint(20, 120)) for _ in range(5)]
        self._live: dict[str, EngineRequest] = {}
        self._counts: Counter[str] = Counter()
        self.report = Report()

    def run(self) -> Report:
        """Until every request has ended."""
        began = time.monotonic()
        report = self.report
        fifths = {self._num_requests * part // 5 for part in range(1, 6)}
        while report.requests < self._num_requests or self._engine.has_work:
            self._let_some_in(fifths)
            self._cancel_some()
            self._preempt_some()
            self._step()
            if report.steps % CHECK_EVERY == 0:
                self._engine.check()
        self._engine.check()
        stats = self._engine.stats()
        report.blocks_leaked = stats.blocks_in_use
        report.preemptions, report.cached_tokens = stats.preemptions, stats.cached_tokens
        report.output_tokens = stats.output_tokens
        report.errors += [f"{id} never ended" for id in self._live]
        report.seconds = time.monotonic() - began
        return report

    def _let_some_in(self, fifths: set[int]) -> None:
        for _ in range(self._rng.randint(0, 6)):
            if self.report.requests == self._num_requests or len(self._live) >= MAX_IN_SYSTEM:
                return
            request = self._request(f"r{self.report.requests}")
            self._engine.add(request)
            self._live[request.id] = request
            self.report.requests += 1
            if self.report.requests in fifths:
                gc.collect()
                self.report.rss_bytes.append(psutil.Process().memory_info().rss)

    def _request(self, id: str) -> EngineRequest:
        rng = self._rng
        head = rng.choice(self._heads) if rng.random() < 0.5 else ()
        prompt = (*head, *self._ids(1 + int(rng.expovariate(1 / 25)) % 200))
        return EngineRequest(
            id,
            prompt,
            len(prompt),
            max_tokens=1 + int(rng.expovariate(1 / 18)) % 120,
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_k=rng.choice([0, 5, 40]),
                repeat_penalty=rng.choice([1.0, 1.1]),
                num_logprobs=rng.choice([-1, -1, 2]),
            ),
            seed=rng.getrandbits(40),
            stop_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 1]))),
            priority=rng.choice([-1, 0, 0, 0, 2]),
            client=rng.choice("abc"),
            cache_salt=rng.choice(["", "", "s"]),
        )

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCABULARY) for _ in range(count))

    def _cancel_some(self) -> None:
        if self._live and self._rng.random() < 0.3:
            id = self._rng.choice(list(self._live))
            output = self._engine.cancel(id)
            if output is None:
                self.report.errors.append(f"{id} could not be cancelled")
            del self._live[id]
            self._counts.pop(id, None)
            self.report.ends["abort"] += 1

    def _preempt_some(self) -> None:
        """Besides those whom the pool is too small for."""
        if self._live and self._rng.random() < 0.1:
            self._engine.force_preempt(self._rng.choice(list(self._live)))

    def _step(self) -> None:
        self.report.steps += 1
        for output in self._engine.step():
            request = self._live.get(output.id)
            if request is None:
                self.report.errors.append(f"{output.id} spoke after its end")
                continue
            self._counts[output.id] += len(output.token_ids)
            if output.finish_reason is None:
                continue
            del self._live[output.id]
            self.report.ends[output.finish_reason] += 1
            self._judge(request, output.finish_reason, output.token_ids, output.error)

    def _judge(
        self, request: EngineRequest, reason: str, last: tuple[int, ...], error: str
    ) -> None:
        count = self._counts.pop(request.id)
        is_right = {
            "stop": bool(last) and last[-1] in request.stop_ids,
            "length": count == request.max_tokens,
        }.get(reason, False)
        if not is_right or count > request.max_tokens:
            self.report.errors.append(f"{request.id} ended by {reason} after {count} {error}")


def main() -> int:
    """Run, write the report; 1 if anything was wrong."""
    num_requests = int(sys.argv[2]) if len(sys.argv) > 2 else NUM_REQUESTS
    report = Soak(num_requests, seed=1).run()
    rss = ", ".join(f"{size / 2**20:.1f}" for size in report.rss_bytes)
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(report.ends.items()))
    rows = {
        "requests": f"{report.requests} ({ends})",
        "steps": report.steps,
        "tokens drawn / found in the cache": f"{report.output_tokens} / {report.cached_tokens}",
        "preemptions": report.preemptions,
        "errors": len(report.errors),
        "blocks leaked": report.blocks_leaked,
        "resident MiB at each fifth": rss,
        "growth from the first fifth": f"{report.growth:.2%}",
        "seconds": f"{report.seconds:.0f}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    print(table, *report.errors[:20], sep="\n")
    text = (
        "# Soak\n\n`scripts/soak`: the real engine and runner on a two-layer model, a pool of "
        f"{NUM_BLOCKS} blocks, one thread, seed 1.\n\n| | |\n|---|---|\n{table}\n"
    )
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
    return int(bool(report.errors or report.blocks_leaked or report.growth > MAX_GROWTH))


if __name__ == "__main__":
    sys.exit(main())
