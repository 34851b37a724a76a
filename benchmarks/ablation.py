"""What each idea of the scheduler is worth: one trace, one engine, four ways to hold memory.

    static    a batch is filled, runs to its last token, then the next; a reservation for each
    orca      a slot is refilled as soon as it is free (Yu et al., OSDI 2022); the same reservation
    paged     blocks as tokens come (Kwon et al., SOSP 2023)
    shared    paged, and equal prefixes are held and computed once

The Scheduler, the BlockPool and the Engine are the real ones. A reservation, of the longest
sequence there may be, is a gate before the engine: as many sequences as whole reservations fit.
Without `shared` every sequence has a cache salt of its own.

Lengths are log-normal with the means that the paper gives for ShareGPT (161 in, 338 out), arrivals
Poisson. Trace "system" puts one of eight system prompts before each prompt, of 341 tokens as the
paper's five-shot prefix; "plain" does not.

    simulated   the model is a clock (simulator.py) at the paper's sizes; a rate is *sustained* if
                the mean normalised latency (seconds from arrival to last token, per output token)
                stays within the bound
    --real      a real model on this CPU, lengths a quarter as long, all at once: requests per
                second at saturation. A clock is fitted to the steps of one of the four runs, and
                says beforehand what the other three will do. With --cpu-time one thread runs and
                its processor's seconds are counted, which other programs disturb less. With
                --paper-lengths they are as long as the paper's, in memory for four reservations

    python -m llmd.benchmarks.ablation --out benchmarks/results/ablation-simulator.md
    python -m llmd.benchmarks.ablation --real MODEL.gguf --out benchmarks/results/ablation-cpu.md
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..backend.engine.batch import Batch, Runner, StepResult
from ..backend.engine.engine import Engine
from ..backend.engine.scheduler import Scheduler, SchedulerConfig
from ..backend.engine.sequence import EngineRequest
from ..backend.protocol import SamplingParams
from .simulator import Fitted, Machine, Observation, Roofline, SimulatedRunner, num_kv_tokens

POLICIES = ("static", "orca", "paged", "shared")
LATENCY_BOUND_S = 0.2  # per output token; beyond the knee of every curve


@dataclass(frozen=True, slots=True)
class Setting:
    """How much memory there is, and how long the sequences are."""

    kv_slots: int  # tokens
    reserved: int  # tokens: the longest sequence
    block_size: int
    mean_prompt: int
    mean_output: int
    system_prompt: int
    max_num_seqs: int = 256

    @property
    def longest(self) -> int:
        """Of one prompt, and of one output."""
        return (self.reserved - self.system_prompt) // 2


# 13B parameters in 16 bit; 40 layers of 5120: 0.8 MB of KV per token. The A100 has 40 GB of which
# 12 hold KV (the paper's table 1); the H200 has 141 GB, about 100 of them for KV.
MACHINES = {
    "a100": (Roofline("A100 40 GB, 13B", 26e9, 1.4e12, 156e12, 26e9, 0.82e6), 15_700),
    "h200": (Roofline("H200 141 GB, 13B", 26e9, 4.3e12, 500e12, 26e9, 0.82e6), 122_000),
}
PAPER = {"reserved": 2048, "block_size": 16, "mean_prompt": 161, "mean_output": 338}
CPU = Setting(4096, 512, 32, 40, 84, 85, 64)
CPU_PAPER_LENGTHS = Setting(
    kv_slots=8192, system_prompt=341, max_num_seqs=64, **PAPER | {"block_size": CPU.block_size}
)


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
    requests_per_s: float
    tokens_per_s: float


class TimedRunner(Protocol):
    """A runner that knows how much time its steps have taken; waiting takes none."""

    now: float

    def execute(self, batch: Batch) -> StepResult: ...


class MeasuredRunner:
    """A real runner; its clock adds up what its steps took."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self.now = 0.0
        self.steps: list[Observation] = []

    def execute(self, batch: Batch) -> StepResult:
        began = self._clock()
        result = self._runner.execute(batch)
        seconds = self._clock() - began
        self.now += seconds
        self.steps.append(Observation(batch.num_tokens, num_kv_tokens(batch), seconds))
        return result


def make_trace(
    setting: Setting, seed: int, count: int, rate: float, has_system_prompt: bool
) -> list[Arrival]:
    """The same lengths for every rate; only the arrivals are closer together."""
    rng = random.Random(seed)
    heads = [_ids(rng, setting.system_prompt) for _ in range(8)]
    trace: list[Arrival] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0) / rate
        prompt = _ids(rng, _length(rng, setting.mean_prompt, setting.longest))
        head = rng.choice(heads)
        token_ids = (*head, *prompt) if has_system_prompt else prompt
        trace.append(Arrival(now, token_ids, _length(rng, setting.mean_output, setting.longest)))
    return trace


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 40_000) for _ in range(count))


def _length(rng: random.Random, mean: int, longest: int) -> int:
    sigma = 0.9
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(int(drawn), longest))


class Serving:
    """One policy serves one trace."""

    def __init__(
        self, runner: TimedRunner, setting: Setting, policy: str, trace: list[Arrival]
    ) -> None:
        self._runner = runner
        self._setting = setting
        config = SchedulerConfig(
            setting.kv_slots // setting.block_size, setting.block_size, setting.max_num_seqs, 2048
        )
        self._scheduler = Scheduler(config)
        self._engine = Engine(self._scheduler, runner, lambda: runner.now)
        self._policy = policy
        self._reserves = policy in ("static", "orca")
        self._gate = setting.kv_slots // setting.reserved if self._reserves else len(trace)
        self._arrivals = deque(enumerate(trace))
        self._queue: deque[tuple[int, Arrival]] = deque()
        self._live: dict[str, Arrival] = {}

    def run(self) -> Outcome:
        """Serve all of it."""
        latencies: list[float] = []
        num_tokens = 0
        held = real = 0.0
        while self._arrivals or self._queue or self._live:
            self._let_in()
            outputs = self._engine.step()
            if self._queue or self._scheduler.num_waiting:
                slots, tokens = self._memory()
                held += slots
                real += tokens
            for output in outputs:
                num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    arrival = self._live.pop(output.id)
                    latencies.append((self._runner.now - arrival.at) / arrival.num_outputs)
        return Outcome(
            latency_s=sum(latencies) / len(latencies),
            real_share=real / held if held else 0.0,
            preemptions=self._engine.stats().preemptions,
            requests_per_s=len(latencies) / self._runner.now,
            tokens_per_s=num_tokens / self._runner.now,
        )

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
            self._engine.add(
                EngineRequest(
                    id,
                    arrival.token_ids,
                    len(arrival.token_ids),
                    arrival.num_outputs,
                    SamplingParams(temperature=0),
                    cache_salt="" if self._policy == "shared" else id,
                )
            )

    def _memory(self) -> tuple[int, int]:
        """Slots that are held, and those of them with a token inside."""
        in_use = self._scheduler.pool.num_in_use * self._setting.block_size
        real = in_use - self._scheduler.num_unused_slots
        held = len(self._live) * self._setting.reserved if self._reserves else in_use
        return held, real


# ----------------------------------------------------------------------- simulated


def sustained_rate(
    machine: Machine, setting: Setting, policy: str, seed: int, count: int, has_system_prompt: bool
) -> tuple[float, Outcome]:
    """The highest rate within the bound, to 8 %, and the outcome at one and a half times it."""

    def outcome(rate: float) -> Outcome:
        trace = make_trace(setting, seed, count, rate, has_system_prompt)
        return Serving(SimulatedRunner(machine), setting, policy, trace).run()

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


def simulated_table(
    machine: Machine, setting: Setting, seed: int, count: int, has_system_prompt: bool
) -> str:
    """One table in Markdown."""
    lines = [
        f"### {machine.name}, trace {'system' if has_system_prompt else 'plain'}",
        "",
        "| policy | sustained req/s | × static | × orca | KV held that is real | preemptions |",
        "|---|---|---|---|---|---|",
    ]
    rates: dict[str, float] = {}
    for policy in POLICIES:
        rate, full = sustained_rate(machine, setting, policy, seed, count, has_system_prompt)
        rates[policy] = rate
        against = [f"{rate / rates[base]:.1f}" if base in rates else "" for base in POLICIES[:2]]
        lines.append(
            f"| {policy} | {rate:.2f} | {' | '.join(against)} | {full.real_share:.1%} "
            f"| {full.preemptions} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def simulate(options: argparse.Namespace) -> str:
    machine, kv_slots = MACHINES[options.machine]
    setting = Setting(kv_slots=kv_slots, system_prompt=341, **PAPER)
    tables = [
        simulated_table(machine, setting, options.seed, options.requests, has_system_prompt)
        for has_system_prompt in (False, True)
    ]
    return (
        f"# Ablation, simulated\n\n`python -m llmd.benchmarks.ablation --machine "
        f"{options.machine} --requests {options.requests} --seed {options.seed}`. Mean "
        f"normalised latency ≤ {LATENCY_BOUND_S} s per output token; memory and preemptions "
        "at 1.5 times the sustained rate. The step times are those of a cost model of the "
        "machine's data sheet; how near such a model comes to a real machine: ablation-cpu.md."
        "\n\n" + "\n\n".join(tables) + "\n"
    )


# ------------------------------------------------------------------------ measured


def measured_table(
    runner: Runner,
    clock: Callable[[], float],
    setting: Setting,
    seed: int,
    count: int,
    has_system_prompt: bool,
) -> str:
    """All policies on the real runner, and what the clock fitted to the paged run says of them."""
    trace = make_trace(setting, seed, count, 1e6, has_system_prompt)
    outcomes: dict[str, Outcome] = {}
    steps: list[Observation] = []
    for policy in ("paged", "static", "orca", "shared"):
        measured = MeasuredRunner(runner, clock)
        outcomes[policy] = Serving(measured, setting, policy, trace).run()
        if policy == "paged":
            steps = measured.steps
        print(policy, outcomes[policy], flush=True)
    machine = Fitted.from_steps("this CPU", steps)
    lines = [
        f"### Trace {'system' if has_system_prompt else 'plain'}",
        "",
        "| policy | req/s | tok/s | × static | × orca | KV held that is real | preemptions "
        "| req/s, simulated | off by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        real = outcomes[policy]
        told = Serving(SimulatedRunner(machine), setting, policy, trace).run()
        against = [real.requests_per_s / outcomes[base].requests_per_s for base in POLICIES[:2]]
        off = told.requests_per_s / real.requests_per_s - 1
        fitted = " (fitted to it)" if policy == "paged" else ""
        lines.append(
            f"| {policy} | {real.requests_per_s:.2f} | {real.tokens_per_s:.0f} "
            f"| {against[0]:.2f} | {against[1]:.2f} | {real.real_share:.1%} | {real.preemptions} "
            f"| {told.requests_per_s:.2f} | {off:+.1%}{fitted} |"
        )
        print(lines[-1], flush=True)
    lines.append(
        f"\nThe fitted step: {machine.fixed_s * 1e3:.2f} ms, {machine.token_s * 1e6:.0f} µs per "
        f"token, {machine.kv_token_s * 1e9:.0f} ns per token of KV."
    )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> str:
    # Only here: the simulator needs no torch.
    from ..backend.models.checkpoint import open_checkpoint
    from ..backend.protocol import Load, ModelFile
    from ..backend.runner.model_runner import ModelRunner

    files = [ModelFile(options.real.name, "weights", str(options.real))]
    clock = time.process_time if options.cpu_time else time.perf_counter
    num_threads = int(options.cpu_time)
    setting = CPU_PAPER_LENGTHS if options.paper_lengths else CPU
    length = setting.reserved
    load = Load("ablation", "ablation", files, context_length=length, num_threads=num_threads)
    runner = ModelRunner(open_checkpoint(files), load, lambda share, stage: None)
    warm = make_trace(CPU, 99, 8, 1e6, False)
    Serving(MeasuredRunner(runner, clock), CPU, "paged", warm).run()
    tables = [
        measured_table(runner, clock, setting, options.seed, options.requests, has_system_prompt)
        for has_system_prompt in (False, True)
    ]
    flags = " --cpu-time" * options.cpu_time + " --paper-lengths" * options.paper_lengths
    return (
        f"# Ablation, measured on a CPU\n\n`python -m llmd.benchmarks.ablation --real "
        f"{options.real.name} --requests {options.requests} --seed {options.seed}{flags}`: kernels "
        f"{runner.details['kernels']}, {runner.details['threads']} threads; {setting.kv_slots} "
        f"slots of KV cache, reservations of {setting.reserved}, prompts of {setting.mean_prompt} "
        f"and outputs of {setting.mean_output} tokens in the mean, all there at once; seconds are "
        f"those of the steps"
        f"{', of the processor' if options.cpu_time else ''}."
        "\n\n" + "\n\n".join(tables) + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", choices=sorted(MACHINES), default="a100")
    parser.add_argument("--real", type=Path, help="a GGUF to run on this CPU")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--paper-lengths", action="store_true")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    options.requests = options.requests or (64 if options.real else 1000)
    text = measure(options) if options.real else simulate(options)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
