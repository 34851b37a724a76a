"""Samples and beams of one prompt hold it once; where they part, the last block is copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from llmd.backend.engine.engine import Engine, EngineRequest, SequenceOutput
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.protocol import Load, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

from .test_compiled_decoder import Checkpoint

PROMPT = tuple(np.random.default_rng(3).integers(0, 96, 150).tolist())  # four blocks and a part
SPANS = len(PROMPT) // 32


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    load = Load("samples", "samples", [], num_threads=1, context_length=512)
    return ModelRunner(Checkpoint(), load, lambda share, stage: None)


def make(runner: ModelRunner) -> tuple[Engine, Scheduler]:
    scheduler = Scheduler(SchedulerConfig(runner.num_blocks, runner.block_size))
    return Engine(scheduler, runner), scheduler


def sample(engine: Engine, id: str, seed: int) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    engine.add(EngineRequest(id, PROMPT, len(PROMPT), 12, sampling, seed))


def drain(engine: Engine) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.token_ids)
    return texts


@pytest.mark.parametrize("count", [2, 8])
def test_samples_read_the_prompt_once_and_hold_it_once(runner: ModelRunner, count: int) -> None:
    engine, scheduler = make(runner)
    for index in range(count):
        sample(engine, f"n{index}", seed=index)
    first = engine.step() + engine.step()
    scheduler.check()
    assert engine.stats().prompt_tokens == len(PROMPT) + (count - 1), "one token each of the rest"
    assert engine.stats().blocks_in_use == SPANS + count, "shared, and a last block each"
    texts = drain(engine)
    told: dict[str, list[int]] = {}
    for output in first:
        told.setdefault(output.id, []).extend(output.token_ids)
    for index in range(count):
        alone, _ = make(runner)
        sample(alone, "alone", seed=index)
        id = f"n{index}"
        assert [*told[id], *texts.get(id, [])] == drain(alone)["alone"]


# ---------------------------------------------------------------------------- beams

WIDTH = 3
LENGTH = 6


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...]
    score: float


def best(beams: list[Beam]) -> list[Beam]:
    return sorted(beams, key=lambda beam: (-beam.score, beam.token_ids))[:WIDTH]


def expanded(beam: Beam, output: SequenceOutput) -> list[Beam]:
    (entry,) = output.logprobs
    pairs = zip(entry.top_ids, entry.top, strict=True)
    return [Beam((*beam.token_ids, token), beam.score + logprob) for token, logprob in pairs]


def as_request(id: str, token_ids: tuple[int, ...], max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, num_logprobs=WIDTH)
    return EngineRequest(id, token_ids, len(PROMPT), max_tokens, sampling)


def beams_by_hand(runner: ModelRunner) -> list[Beam]:
    """Each beam's next tokens from an engine of its own."""
    beams = [Beam(PROMPT, 0.0)]
    for _ in range(LENGTH):
        grown: list[Beam] = []
        for beam in beams:
            engine, _ = make(runner)
            engine.add(as_request("a", beam.token_ids, len(beam.token_ids) - len(PROMPT) + 1))
            outputs: list[SequenceOutput] = []
            while engine.has_work:
                outputs += engine.step()
            grown += expanded(beam, outputs[-1])
        beams = best(grown)
    return beams


def test_beams_fork_without_reading_their_past_again(runner: ModelRunner) -> None:
    engine, scheduler = make(runner)
    beams = [Beam(PROMPT, 0.0)]
    computed = 0
    for depth in range(LENGTH):
        for index, beam in enumerate(beams):
            engine.add(as_request(f"{depth}.{index}", beam.token_ids, 99))
        outputs: dict[str, SequenceOutput] = {}
        while len(outputs) < len(beams):
            for output in engine.step():
                if output.id.startswith(f"{depth}."):
                    outputs.setdefault(output.id, output)
        for sequence in list(scheduler._running):  # those they were forked from
            if not sequence.id.startswith(f"{depth}."):
                engine.cancel(sequence.id)
        scheduler.check()
        assert engine.stats().blocks_in_use <= SPANS + WIDTH
        if depth == 0:
            computed = engine.stats().cached_tokens
        grown = [
            candidate
            for index, beam in enumerate(beams)
            for candidate in expanded(beam, outputs[f"{depth}.{index}"])
        ]
        beams = best(grown)
    assert beams == beams_by_hand(runner)
    forks = 1 + WIDTH * (LENGTH - 1)
    found = engine.stats().cached_tokens - computed
    assert found >= (forks - 1) * len(PROMPT), "each fork found all but its own last token"
