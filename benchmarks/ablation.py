"""What each idea of the scheduler is worth: one trace, one engine, four ways to hold memory.

    static    a batch is filled, runs to its last token, then the next; 2,048 slots reserved each
    orca      a slot is refilled as soon as it is free (Yu et al., OSDI 2022); the same reservation
    paged     blocks as tokens come (Kwon et al., SOSP 2023)
    shared    paged, and equal prefixes are held and computed once

The Scheduler, the BlockPool and the Engine are the real ones; the model is a clock. A step takes
the longer of reading the weights and doing the arithmetic, then the reading of the KV cache, then a
fixed overhead. A reservation is a gate before the engine: as many sequences as whole reservations
fit. Without `shared` every sequence has a cache salt of its own.

Lengths are log-normal with the means that the paper gives for ShareGPT (161 in, 338 out), arrivals
Poisson. A rate is *sustained* if the mean normalised latency (seconds from arrival to last token,
per output token) stays within the bound. Trace "system" puts one of eight system prompts before
each prompt, of 341 tokens as the paper's five-shot prefix.

    python -m llmd.benchmarks.ablation --out benchmarks/results/ablation-simulator.md
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ..backend.engine.batch import Batch, StepResult
from ..backend.engine.engine import Engine
from ..backend.engine.scheduler import Scheduler, SchedulerConfig
from ..backend.engine.sequence import EngineRequest

RESERVED = 2048  # tokens: the model's longest sequence
BLOCK_SIZE = 16
POLICIES = ("static", "orca", "paged", "shared")
LATENCY_BOUND_S = 0.2  # per output token; beyond the knee of every curve


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU with a model on it, as a step sees it."""

    name: str
    weights_bytes: float
    bytes_per_s: float
    flops: float  # reached, not peak
    flop_per_token: float
    kv_bytes_per_token: float
    kv_slots: int  # tokens
    overhead_s: float = 0.003

    def step_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of one step."""
        reading = self.weights_bytes / self.bytes_per_s
        computing = num_tokens * self.flop_per_token / self.flops
        kv = num_kv_tokens * self.kv_bytes_per_token / self.bytes_per_s
        return max(reading, computing) + kv + self.overhead_s


# 13B parameters in 16 bit; 40 layers of 5120: 0.8 MB of KV per token. The A100 has 40 GB of which
# 12 hold KV (the paper's table 1); the H200 has 141 GB, about 100 of them for KV.
MACHINES = {
    "a100": Machine("A100 40 GB, 13B", 26e9, 1.4e12, 156e12, 26e9, 0.82e6, 15_700),
    "h200": Machine("H200 141 GB, 13B", 26e9, 4.3e12, 500e12, 26e9, 0.82e6, 122_000),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    token_ids: tuple[int, ...]
    num_outputs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one policy at one rate."""

    latency_s: float  # mean, normalised by output tokens
    real_share: float  # of the memory held while others wait: slots with a token in them
    preemptions: int


class SimulatedRunner:
    """Draws meaningless ids and lets time pass."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def execute(self, batch: Batch) -> StepResult:
        kv = sum(chunk.start + chunk.num_tokens for chunk in batch.chunks)
        self.now += self.machine.step_s(batch.num_tokens, kv)
        ids = tuple(
            ((batch.step * 31 + chunk.row) % 50_000,) if chunk.samples else ()
            for chunk in batch.chunks
        )
        return StepResult(batch.step, ids)


def make_trace(seed: int, count: int, rate: float, has_system_prompt: bool) -> list[Arrival]:
    """The same lengths for every rate; only the arrivals are closer together."""
    rng = random.Random(seed)
    heads = [tuple(rng.randrange(50_000) for _ in range(341)) for _ in range(8)]
    trace: list[Arrival] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        prompt = tuple(rng.randrange(50_000) for _ in range(_length(rng, 161)))
        head = rng.choice(heads)
        token_ids = (*head, *prompt) if has_system_prompt else prompt
        trace.append(Arrival(now, token_ids, _length(rng, 338)))
    return trace


def _length(rng: random.Random, mean: int) -> int:
    sigma = 0.9
    return max(1, min(int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)), 1024))


class Simulation:
    """One policy serves one trace."""

    def __init__(self, machine: Machine, policy: str, trace: list[Arrival]) -> None:
        self._runner = SimulatedRunner(machine)
        self._num_blocks = machine.kv_slots // BLOCK_SIZE
        config = SchedulerConfig(self._num_blocks, BLOCK_SIZE, 256, 2048)
        self._scheduler = Scheduler(config)
        self._engine = Engine(self._scheduler, self._runner, self._runner.clock)
        self._policy = policy
        self._reserves = policy in ("static", "orca")
        self._gate = machine.kv_slots // RESERVED if self._reserves else len(trace)
        self._arrivals = deque(enumerate(trace))
        self._queue: deque[tuple[int, Arrival]] = deque()
        self._live: dict[str, Arrival] = {}

    def run(self) -> Outcome:
        """Serve all of it."""
        latencies: list[float] = []
        held = real = 0.0
        while self._arrivals or self._queue or self._live:
            self._let_in()
            outputs = self._engine.step()
            if self._queue or self._scheduler.num_waiting:
                slots, tokens = self._memory()
                held += slots
                real += tokens
            for output in outputs:
                if output.finish_reason is not None:
                    arrival = self._live.pop(output.id)
                    latencies.append((self._runner.now - arrival.at) / arrival.num_outputs)
        latency = sum(latencies) / len(latencies)
        return Outcome(latency, real / held if held else 0.0, self._engine.stats().preemptions)

    def _let_in(self) -> None:
        if not self._live and not self._queue and self._arrivals:
            self._runner.now = max(self._runner.now, self._arrivals[0][1].at)
        while self._arrivals and self._arrivals[0][1].at <= self._runner.now:
            self._queue.append(self._arrivals.popleft())
        if self._policy == "static" and self._live:
            return
        while self._queue and len(self._live) < self._gate:
            index, arrival = self._queue.popleft()
            id = str(index)
            self._live[id] = arrival
            salt = "" if self._policy == "shared" else id
            self._engine.add(
                EngineRequest(
                    id,
                    arrival.token_ids,
                    len(arrival.token_ids),
                    arrival.num_outputs,
                    cache_salt=salt,
                )
            )

    def _memory(self) -> tuple[int, int]:
        """Slots that are held, and those of them with a token inside."""
        in_use = self._scheduler.pool.num_in_use * BLOCK_SIZE
        real = in_use - self._scheduler.num_unused_slots
        return (len(self._live) * RESERVED if self._reserves else in_use), real


def sustained_rate(
    machine: Machine, policy: str, seed: int, count: int, has_system_prompt: bool
) -> tuple[float, Outcome]:
    """The highest rate within the bound, to 8 %, and the outcome at one and a half times it."""

    def outcome(rate: float) -> Outcome:
        return Simulation(machine, policy, make_trace(seed, count, rate, has_system_prompt)).run()

    low = 0.1
    while outcome(2 * low).latency_s <= LATENCY_BOUND_S:
        low *= 2
    high = 2 * low
    while high / low > 1.08:
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if outcome(middle).latency_s <= LATENCY_BOUND_S else (low, middle)
        )
    return low, outcome(1.5 * low)


def table(machine: Machine, seed: int, count: int, has_system_prompt: bool) -> str:
    """One table in Markdown."""
    name = "system" if has_system_prompt else "plain"
    lines = [
        f"### {machine.name}, trace {name}",
        "",
        "| policy | sustained req/s | × static | × orca | KV held that is real | preemptions |",
        "|---|---|---|---|---|---|",
    ]
    rates: dict[str, float] = {}
    for policy in POLICIES:
        rate, full = sustained_rate(machine, policy, seed, count, has_system_prompt)
        rates[policy] = rate
        against = [f"{rate / rates[base]:.1f}" if base in rates else "" for base in POLICIES[:2]]
        lines.append(
            f"| {policy} | {rate:.2f} | {' | '.join(against)} | {full.real_share:.1%} "
            f"| {full.preemptions} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", choices=sorted(MACHINES), default="a100")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = MACHINES[options.machine]
    tables = [table(machine, options.seed, options.requests, system) for system in (False, True)]
    if options.out:
        text = (
            f"# Ablation, simulated\n\n`python -m llmd.benchmarks.ablation --machine "
            f"{options.machine} --requests {options.requests} --seed {options.seed}`. Mean "
            f"normalised latency ≤ {LATENCY_BOUND_S} s per output token; memory and preemptions "
            "at 1.5 times the sustained rate. The step times are a cost model, not measured.\n\n"
        )
        options.out.write_text(text + "\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
