"""Chunk sizes from predicted step times."""

from __future__ import annotations

import random

import pytest

from llmd.backend.engine.batch import Batch, StepResult
from llmd.backend.engine.engine import Engine
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.engine.step_time import (
    FIRST_CHUNK,
    FIRST_CROWD,
    FIRST_DRAFT_COST,
    LONGEST_STEP_S,
    MIN_CHUNK,
    STALE_STEPS,
    StepTime,
)

from .fake_runner import FakeRunner
from .test_scheduler import request

BASE_S, ROW_S, PROMPT_S = 0.010, 0.0005, 0.001  # of the machine below


class TimedMachine(FakeRunner):
    """A fake runner whose steps take time: a base, more per decode, most per prompt token."""

    def __init__(self, num_blocks: int, block_size: int, seed: int, row_s: float = ROW_S) -> None:
        super().__init__(num_blocks, block_size)
        self.now = 0.0
        self._row_s = row_s
        self._noise = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def execute(self, batch: Batch) -> StepResult:
        decodes = sum(chunk.samples and chunk.num_tokens == 1 for chunk in batch.chunks)
        seconds = BASE_S + self._row_s * decodes + PROMPT_S * (batch.num_tokens - decodes)
        self.now += seconds * self._noise.uniform(0.9, 1.1)
        return super().execute(batch)


def gaps_while_a_prompt_arrives(ratio: float) -> tuple[float, float, float]:
    """Median and 99th percentile of eight streams' gaps, and the newcomer's wait, in seconds."""
    machine = TimedMachine(4096, 16, seed=1)
    config = SchedulerConfig(4096, 16, max_batch_tokens=2048, max_gap_ratio=ratio)
    engine = Engine(Scheduler(config), machine, machine.clock)
    for index in range(8):
        engine.add(request(f"s{index}", [index] * 20, max_tokens=800))
    last: dict[str, float] = {}
    gaps: list[float] = []
    asked_at = first_at = 0.0
    for step in range(700):
        if step == 100:
            engine.add(request("long", [9] * 4000, max_tokens=2))
            asked_at = machine.now
        for output in engine.step():
            if output.id == "long" and not first_at:
                first_at = machine.now
            elif output.id in last and not first_at:
                gaps.append(machine.now - last[output.id])
            last[output.id] = machine.now
    gaps.sort()
    usual = BASE_S + 8 * ROW_S
    return usual, gaps[int(0.99 * len(gaps))], first_at - asked_at


def test_a_long_prompt_delays_running_streams_by_a_bounded_amount() -> None:
    usual, p99, wait = gaps_while_a_prompt_arrives(ratio=2.0)
    assert p99 <= 2.5 * usual
    assert wait <= 2.5 * 4000 * PROMPT_S, "and the prompt still gets half of the machine"


def test_without_the_rule_the_delay_is_long() -> None:
    usual, p99, _ = gaps_while_a_prompt_arrives(ratio=0.0)
    assert p99 > 20 * usual


def test_nothing_is_limited_while_nobody_decodes_or_nothing_is_known() -> None:
    assert StepTime().max_prompt_tokens(8, 2.0) is None
    model = StepTime()
    model.observe(4, 0, 0.010)
    assert model.max_prompt_tokens(0, 2.0) is None
    assert model.max_prompt_tokens(4, 2.0) == FIRST_CHUNK


@pytest.mark.parametrize(("token_s", "tokens"), [(0.0001, 100), (0.5, MIN_CHUNK)])
def test_a_chunk_adds_one_decode_step_at_a_ratio_of_two(token_s: float, tokens: int) -> None:
    model = StepTime()
    for _ in range(100):
        model.observe(4, 0, 0.010)
        model.observe(4, 32, 0.010 + 32 * token_s)
    assert model.max_prompt_tokens(4, 2.0) == pytest.approx(tokens, abs=1)


def test_prompts_that_outnumber_the_streams_count_as_many_streams() -> None:
    model = StepTime()
    for _ in range(100):
        model.observe(4, 0, 0.010)
        model.observe(4, 32, 0.010 + 32 * 0.001)
    assert model.max_prompt_tokens(4, 2.0, num_prompts=4) == pytest.approx(10, abs=1)
    assert model.max_prompt_tokens(4, 2.0, num_prompts=12) == pytest.approx(30, abs=1)
    most = (LONGEST_STEP_S - 0.010) / 0.001
    assert model.max_prompt_tokens(4, 2.0, num_prompts=400) == pytest.approx(most, abs=1)


def steps_while_fifteen_prompts_arrive(client: str) -> tuple[float, float]:
    """Beside one stream of "mine": its longest gap, and until all of the others have a token."""
    machine = TimedMachine(4096, 16, seed=2)
    engine = Engine(Scheduler(SchedulerConfig(4096, 16)), machine, machine.clock)
    engine.add(request("mine", [1] * 20, max_tokens=4000, client="mine"))
    for _ in range(50):
        engine.step()
    for index in range(15):
        engine.add(request(f"o{index}", [index + 2] * 90, max_tokens=4000, client=client))
    asked_at = last = machine.now
    longest, seen = 0.0, {"mine"}
    while len(seen) < 16:
        for output in engine.step():
            seen.add(output.id)
            if output.id == "mine":
                longest, last = max(longest, machine.now - last), machine.now
    return longest, machine.now - asked_at


def test_many_prompts_of_a_client_are_not_kept_waiting_for_its_one_stream() -> None:
    longest, wait = steps_while_fifteen_prompts_arrive("mine")
    _, wait_of_two = steps_while_fifteen_prompts_arrive("others")
    assert longest <= 1.5 * LONGEST_STEP_S
    assert wait <= 0.9 * wait_of_two


def test_another_clients_stream_is_slowed_down_by_one_prompt_at_most() -> None:
    longest, _ = steps_while_fifteen_prompts_arrive("others")
    assert longest <= 2.5 * (BASE_S + 16 * ROW_S)


def test_decoding_is_measured_alone_again_while_a_long_prompt_is_read() -> None:
    """Else the growth of the streams' own contexts counts as the prompt's, and it starves."""
    model = StepTime()
    model.observe(8, 0, 0.010)
    for _ in range(STALE_STEPS):
        assert model.max_prompt_tokens(8, 2.0) != 0
        model.observe(8, 10, 0.030 + 10 * 0.001)  # decoding takes three times as long by now
    starved = int(0.010 / 0.003)
    assert model.max_prompt_tokens(8, 2.0) == 0
    for _ in range(6):
        model.observe(8, 0, 0.030)
        for _ in range(STALE_STEPS):
            model.observe(8, 10, 0.030 + 10 * 0.001)
    model.observe(8, 0, 0.030)
    tokens = model.max_prompt_tokens(8, 2.0)
    assert tokens is not None
    assert tokens > 6 * starved


def test_streams_that_draft_in_every_step_do_not_keep_a_prompt_out() -> None:
    model = StepTime()
    model.observe(1, 0, 0.010)
    for _ in range(STALE_STEPS):
        model.observe(1, 10, 0.020)
    assert model.max_prompt_tokens(1, 2.0) == 0
    model.observe(1, 0, 0.030, num_drafts=8)
    assert model.max_prompt_tokens(1, 2.0) != 0


def test_steps_are_as_long_as_people_bear_and_no_more_are_let_in() -> None:
    model = StepTime()
    assert not model.is_full(FIRST_CROWD - 1), "nothing is known"
    assert model.is_full(FIRST_CROWD)
    for _ in range(50):
        model.observe(1, 0, 0.010)
        model.observe(40, 0, 0.090)
        model.observe(200, 0, 0.400)
    assert [model.is_full(count) for count in (1, 40, 60, 100, 200)] == [False] * 2 + [True] * 3


def test_a_model_that_takes_long_for_one_token_still_runs_many_at_once() -> None:
    model = StepTime()
    for _ in range(50):
        model.observe(1, 0, 0.500)
        model.observe(16, 0, 0.900)
    assert not model.is_full(16)
    assert model.is_full(16 * 3), "twice as long as four times the shortest, for all that is known"


SLOW_ROW_S = 0.004  # so that LONGEST_STEP_S is reached at 35


def beside_a_crowd(client: str, priority: int = 0) -> tuple[int, bool]:
    """How many of a crowd run at once on a machine of long steps, and whether one who comes then is
    served at once."""
    machine = TimedMachine(1024, 16, seed=3, row_s=SLOW_ROW_S)
    engine = Engine(Scheduler(SchedulerConfig(1024, 16)), machine, machine.clock)
    engine.add(request("first", [1] * 8, max_tokens=8))
    while engine.has_work:
        engine.step()
    for index in range(100):
        engine.add(request(f"c{index}", [index] * 8, max_tokens=400, client="crowd"))
    for _ in range(120):
        engine.step()
    most = engine.stats().running
    engine.add(request("one", [5] * 8, max_tokens=2, client=client, priority=priority))
    ids = [output.id for _ in range(5) for output in engine.step()]
    return most, "one" in ids


def test_a_crowd_runs_as_many_at_once_as_pay_and_a_guest_is_let_in_nevertheless() -> None:
    most, is_served = beside_a_crowd("guest")
    assert LONGEST_STEP_S < BASE_S + most * SLOW_ROW_S < 1.5 * LONGEST_STEP_S
    assert is_served


def test_where_it_is_full_only_who_is_more_important_is_let_in() -> None:
    assert not beside_a_crowd("crowd")[1]
    assert beside_a_crowd("crowd", priority=-1)[1]


def test_a_pause_of_the_machine_is_no_new_normal() -> None:
    model = StepTime()
    for _ in range(20):
        model.observe(1, 0, 0.010)
    model.observe(1, 0, 10.0)
    assert (model.decode_s(1) or 0.0) < 0.020


def test_a_drafts_row_is_told_in_the_time_of_a_token() -> None:
    model = StepTime()
    assert model.draft_cost(4) == FIRST_DRAFT_COST
    for _ in range(100):
        model.observe(4, 0, 0.010)
        model.observe(4, 0, 0.010 + 8 * 0.001, num_drafts=8)
    assert model.draft_cost(4) == pytest.approx(0.001 * 4 / 0.010, rel=0.01)
    assert model.decode_s(4) == pytest.approx(0.010), "and drafts don't look like slow decodes"
