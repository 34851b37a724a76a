"""From logits to ids: checks 36 to 43 of the sampler (issue 8).

The draws of a mixed batch (40) go through the real engine and runner on a two-layer model; the rest
asks the sampler's own functions.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmd.backend.engine.batch import Batch, Chunk, StepResult
from llmd.backend.engine.engine import Engine, EngineRequest, SequenceOutput
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.prompt import PromptBuilder, RequestRefused
from llmd.backend.protocol import Generate, Load, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner
from llmd.backend.runner.sampler import (
    UnusableLogits,
    adjusted,
    draw,
    gumbel,
    logprobs_of,
)

from . import vocabularies
from .fake_runner import FakeRunner
from .test_compiled_decoder import Checkpoint
from .test_scheduler import Clock, request

VOCABULARY = 96
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def some_logits(seed: int, size: int = VOCABULARY, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)


def one_draw(logits: np.ndarray, params: SamplingParams, seed: int = 0, position: int = 1) -> int:
    return draw(logits, params, seed, [0] * position, position, frozenset())


# --------------------------------------------------------------- 36, 37, 38: the draw


def test_36_masked_tokens_are_never_drawn_however_large_the_noise() -> None:
    noise = gumbel(7, 3, np.arange(1_000_000))
    assert np.isfinite(noise).all(), "no hash gives infinite noise"
    logits = np.full(VOCABULARY, -np.inf, np.float32)
    logits[[5, 9]] = 0.0
    drawn = {one_draw(logits, PLAIN, seed) for seed in range(200)}
    assert drawn == {5, 9}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_37_top_k_of_one_is_greedy_and_ties_go_to_the_lowest_id(temperature: float) -> None:
    logits = some_logits(1)
    logits[[70, 20, 44]] = 9.0
    params = SamplingParams(temperature=temperature, top_k=1)
    assert {one_draw(logits, params, seed) for seed in range(50)} == {20}


def test_38_top_k_of_three_stays_in_the_set_and_is_not_constant() -> None:
    logits = some_logits(2, scale=0.3)
    best = set(np.argsort(-logits)[:3].tolist())
    params = SamplingParams(temperature=1.0, top_k=3, top_p=1.0)
    drawn = {one_draw(logits, params, seed) for seed in range(64)}
    assert drawn <= best
    assert len(drawn) > 1


# ------------------------------------------------------------------- 39: penalties


def penalized_by_hand(logits: np.ndarray, p: SamplingParams, history: list[int]) -> np.ndarray:
    """One token at a time, as the definition has it."""
    scores = logits.astype(np.float64)
    window = history if p.repeat_last_n < 0 else history[-p.repeat_last_n :]
    for token_id, count in Counter(window).items():
        if 0 <= token_id < len(scores):
            x = scores[token_id]
            x = x / p.repeat_penalty if x > 0 else x * p.repeat_penalty
            scores[token_id] = x - count * p.frequency_penalty - p.presence_penalty
    return scores


@pytest.mark.parametrize("seed", range(30))
def test_39_penalties_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    params = SamplingParams(
        repeat_last_n=rng.choice([-1, 1, 7, 64]),
        repeat_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.25, -0.5]),
    )
    history = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
    logits = some_logits(seed)
    found = adjusted(logits, params, history, 1, frozenset(), None)
    np.testing.assert_allclose(found, penalized_by_hand(logits, params, history), rtol=1e-5)


@pytest.mark.parametrize("stranger", [-1, VOCABULARY, VOCABULARY + 5])
def test_39_ids_outside_the_vocabulary_touch_nobody(stranger: int) -> None:
    logits = some_logits(3)
    params = SamplingParams(frequency_penalty=1.0, repeat_last_n=-1)
    found = adjusted(logits, params, [stranger, VOCABULARY - 1], 1, frozenset(), None)
    changed = np.flatnonzero(found != logits)
    assert changed.tolist() == [VOCABULARY - 1], "and the last one of it counts, once"
    assert found[-1] == pytest.approx(logits[-1] - 1.0)


def test_39_the_logits_themselves_stay_as_they_are() -> None:
    logits = some_logits(4)
    before = logits.copy()
    params = SamplingParams(repeat_penalty=1.5, logit_bias={3: 5.0}, min_tokens=4)
    draw(logits, params, 0, [1, 2, 3], 3, frozenset([7]))
    assert (logits == before).all()


# --------------------------------------------------------------- 40: a mixed batch


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    load = Load("sampler", "sampler", [], num_threads=1, context_length=256)
    return ModelRunner(Checkpoint(), load, lambda share, stage: None)


def mixed_requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    requests = []
    for index in range(16):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20)))
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 3, 40]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.05]),
            typical_p=rng.choice([1.0, 0.8]),
            repeat_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([{}, {4: 3.0, 5: -3.0}]),
            min_tokens=rng.choice([0, 6]),
            num_logprobs=rng.choice([-1, 0, 3]),
        )
        stop_ids = frozenset(rng.sample(range(VOCABULARY), 2))
        requests.append(
            EngineRequest(
                f"r{index}", prompt, len(prompt), 10, sampling, rng.getrandbits(60), stop_ids
            )
        )
    return requests


def answers(runner: ModelRunner, requests: Sequence[EngineRequest]) -> dict[str, Any]:
    config = SchedulerConfig(runner.num_blocks, runner.block_size)
    engine = Engine(Scheduler(config), runner)
    for one in requests:
        engine.add(one)
    told: dict[str, list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.id, []).append(output)
    return {
        id: ([o.token_ids for o in outputs], [o.logprobs for o in outputs])
        for id, outputs in told.items()
    }


@pytest.mark.parametrize("seed", range(4))
def test_40_a_row_of_a_mixed_batch_draws_what_it_draws_alone(
    runner: ModelRunner, seed: int
) -> None:
    requests = mixed_requests(seed)
    together = answers(runner, requests)
    for one in requests:
        alone = answers(runner, [one])
        assert together[one.id] == alone[one.id], "ids and log-probabilities, to the bit"


# -------------------------------------------------------------- 41: the distribution

NUM_DRAWS = 20_000 if os.environ.get("LLMD_LONG_TESTS") else 6_000
# chi-squared: the value that 1 of 1,000 right samplers exceeds, by degrees of freedom
CRITICAL = {4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}
SMALL = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], np.float32)

DISTRIBUTIONS = {
    "plain": PLAIN,
    "hot": SamplingParams(temperature=2.0, top_k=0, top_p=1.0),
    "cool": SamplingParams(temperature=0.5, top_k=0, top_p=1.0),
    "top_p": SamplingParams(temperature=1.0, top_k=0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
}


def chances(params: SamplingParams) -> np.ndarray:
    """What should be drawn, from the definitions alone. SMALL is sorted."""
    logits = SMALL.astype(np.float64)
    plain = np.exp(logits) / np.exp(logits).sum()
    before = np.cumsum(plain) - plain
    kept = (before < params.top_p) & (plain >= params.min_p * plain.max())
    shaped = np.where(kept, np.exp(logits / params.temperature), 0.0)
    result: np.ndarray = shaped / shaped.sum()
    return result


def chi_squared(counts: Counter[int], expected: np.ndarray) -> tuple[float, int]:
    assert all(expected[id] > 0 for id in counts), "something impossible was drawn"
    cells = np.flatnonzero(expected)
    total = sum(counts.values())
    observed = np.array([counts[int(cell)] for cell in cells])
    wanted = expected[cells] * total
    return float(((observed - wanted) ** 2 / wanted).sum()), len(cells) - 1


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_41_draws_follow_the_softmax(name: str) -> None:
    params = DISTRIBUTIONS[name]
    counts = Counter(one_draw(SMALL, params, seed % 200, seed // 200) for seed in range(NUM_DRAWS))
    value, freedom = chi_squared(counts, chances(params))
    assert value < CRITICAL[freedom]


class Memoryless(FakeRunner):
    """Draws every token from the same logits, with the sampler's noise; drafts are verified."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_accepted = 0

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        self.num_accepted += sum(max(len(ids) - 1, 0) for ids in result.token_ids)
        return result

    def _run(self, chunk: Chunk, written: set[int]) -> tuple[int, ...]:
        self.seed = chunk.row
        return super()._run(chunk, written)

    def next_id(self, token_ids: Sequence[int]) -> int:
        return draw(SMALL, PLAIN, self.seed, token_ids, 1, frozenset())


def test_41_draws_follow_the_softmax_with_speculation_on() -> None:
    runner = Memoryless(4096, 16)
    config = SchedulerConfig(4096, 16, max_drafts=8, max_draft_rows=64)
    engine = Engine(Scheduler(config), runner, Clock())
    for row in range(8):
        engine.add(request(f"s{row}", [row], NUM_DRAWS // 12))
    counts: Counter[int] = Counter()
    while engine.has_work:
        for output in engine.step():
            counts.update(output.token_ids)
    assert sum(counts.values()) == 8 * (NUM_DRAWS // 12)
    assert runner.num_accepted > 100, "drafts were really accepted"
    value, freedom = chi_squared(counts, chances(PLAIN))
    assert value < CRITICAL[freedom]


def test_41_the_test_would_notice_a_wrong_temperature() -> None:
    params = SamplingParams(temperature=1.2, top_k=0, top_p=1.0)
    counts = Counter(one_draw(SMALL, params, seed % 200, seed // 200) for seed in range(NUM_DRAWS))
    value, freedom = chi_squared(counts, chances(PLAIN))
    assert value > CRITICAL[freedom]


# ---------------------------------------------------------------- 42: all is masked


def test_42_a_row_without_a_usable_token_fails_alone() -> None:
    for hopeless in (np.full(8, -np.inf, np.float32), np.full(8, np.nan, np.float32)):
        with pytest.raises(UnusableLogits):
            one_draw(hopeless, PLAIN)
    nothing = np.zeros(8, bool)
    with pytest.raises(UnusableLogits):
        draw(SMALL, PLAIN, 0, [0], 1, frozenset(), nothing)


@pytest.mark.parametrize("field", ["logit_bias", "context_ids"])
def test_42_ids_outside_the_vocabulary_are_refused_by_name(field: str) -> None:
    tokenizer = vocabularies.byte_level()
    prompts = PromptBuilder(tokenizer, None, "llama", 64)
    alien = tokenizer.vocab_size
    bias = SamplingParams(logit_bias={alien: 1.0} if field == "logit_bias" else {})
    context = [alien] if field == "context_ids" else []
    request = Generate("a", prompt="hi", sampling=bias, context_ids=context)
    with pytest.raises(RequestRefused, match=f"token id {alien} is outside the vocabulary") as told:
        prompts.build(request)
    assert told.value.code == "bad_request", "status 400"


def test_42_a_hopeless_request_leaves_the_others_alone(runner: ModelRunner) -> None:
    bias = dict.fromkeys(range(VOCABULARY), float("-inf"))
    hopeless = SamplingParams(logit_bias=bias)
    config = SchedulerConfig(runner.num_blocks, runner.block_size)
    engine = Engine(Scheduler(config), runner)
    engine.add(EngineRequest("bad", (1, 2, 3), 3, 5, hopeless))
    engine.add(EngineRequest("good", (1, 2, 3, 4), 4, 5, SamplingParams(temperature=0)))
    ends: dict[str, SequenceOutput] = {}
    while engine.has_work:
        ends.update({o.id: o for o in engine.step() if o.finish_reason})
    assert (ends["bad"].finish_reason, ends["good"].finish_reason) == ("error", "length")
    assert "not finite" in ends["bad"].error


# ---------------------------------------------------------------- 43: log-probabilities


@pytest.mark.parametrize("seed", range(5))
def test_43_log_probabilities_are_those_of_the_whole_vocabulary(seed: int) -> None:
    logits = some_logits(seed)
    found = logprobs_of(logits, token_id=11, num_top=VOCABULARY)
    assert np.exp(found.top).sum() == pytest.approx(1.0, abs=1e-9)
    assert found.top_ids[0] == int(logits.argmax())
    assert list(found.top) == sorted(found.top, reverse=True)
    assert found.chosen == found.top[found.top_ids.index(11)]


def test_43_the_chosen_token_is_told_even_if_it_is_none_of_the_likely(runner: ModelRunner) -> None:
    unlikely = {3: -50.0}
    sampling = SamplingParams(temperature=0, num_logprobs=2, logit_bias={7: 100.0, **unlikely})
    told = answers(runner, [EngineRequest("a", (1, 2), 2, 4, sampling)])
    ids, logprobs = told["a"]
    assert [id for step in ids for id in step] == [7, 7, 7, 7], "the bias decides"
    for entry in (entry for step in logprobs for entry in step):
        assert len(entry.top_ids) == 2
        assert entry.chosen <= entry.top[0], "of the unmodified logits"
