"""What the scheduler promises to a caller: shares, ends, priorities, refusals, aborts.

Numbers are those of the scheduler checks in issue 8: 12 to 20 here and in test_pipelining.py; 21
and 22 are the daemon's queue, in tests/daemon/test_manager.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from llmd.backend.engine.engine import Engine, SequenceOutput, Unservable
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.engine.sequence import Status
from llmd.backend.protocol import SamplingParams

from .fake_runner import FakeRunner, PipelinedFakeRunner
from .test_scheduler import BLOCK, Clock, drain, expected, make_engine, request

# ------------------------------------------------------------------ 12, 13: shares


def chunk_sizes(runner: FakeRunner) -> list[int]:
    return [chunk.num_tokens for chunk in runner.batches[-1].chunks]


def test_three_prompts_share_a_budget_in_the_order_of_their_arrival() -> None:
    engine, runner, _ = make_engine(num_blocks=512, max_batch_tokens=1024)
    for index in range(3):
        engine.add(request(f"p{index}", [index] * 400))
    engine.step()
    assert chunk_sizes(runner) == [400, 400, 224]
    engine.step()
    assert chunk_sizes(runner) == [1, 1, 176], "decodes first, then what is left of the third"


def test_a_cap_on_chunks_lets_two_long_prompts_in_side_by_side() -> None:
    engine, runner, _ = make_engine(num_blocks=512, max_batch_tokens=1024, prefill_chunk=400)
    for index in range(2):
        engine.add(request(f"p{index}", [index] * 800))
    engine.step()
    assert chunk_sizes(runner) == [400, 400]


def test_a_long_prompt_alone_takes_the_whole_budget() -> None:
    engine, runner, _ = make_engine(num_blocks=512, max_batch_tokens=1024)
    engine.add(request("p", [7] * 800))
    engine.step()
    assert chunk_sizes(runner) == [800]


# ---------------------------------------------------------------- 14: the stop matrix

PROMPT = list(range(17))


class Parrot(FakeRunner):
    """Says the prompt over and over: every draft is right, and steps return several tokens."""

    def next_id(self, token_ids: Sequence[int]) -> int:
        return token_ids[-17]


def parroted(max_drafts: int, **fields: object) -> tuple[list[int], SequenceOutput, int]:
    config = SchedulerConfig(64, BLOCK, max_batch_tokens=64, max_drafts=max_drafts)
    runner = Parrot(64, BLOCK)
    engine = Engine(Scheduler(config), runner, Clock())
    engine.add(request("a", PROMPT, **fields))  # type: ignore[arg-type]
    ids: list[int] = []
    for _ in range(200):
        for output in engine.step():
            ids.extend(output.token_ids)
            if output.finish_reason:
                engine.check()
                return ids, output, len(runner.batches)
    raise AssertionError("no end")


@pytest.mark.parametrize("max_drafts", [0, 3, 8], ids=["plain", "3-drafts", "8-drafts"])
@pytest.mark.parametrize("stop_at", [0, 1, 4, 5, 6, 7, 11, 16])
@pytest.mark.parametrize("min_tokens", [0, 5, 12])
@pytest.mark.parametrize("max_tokens", [1, 5, 13, 40])
def test_an_answer_ends_at_its_first_valid_end_however_many_tokens_come_at_once(
    max_drafts: int, stop_at: int, min_tokens: int, max_tokens: int
) -> None:
    ids, end, _ = parroted(
        max_drafts,
        max_tokens=max_tokens,
        stop_ids=frozenset([stop_at]),
        sampling=SamplingParams(min_tokens=min_tokens),
    )
    endless = [token for _ in range(4) for token in PROMPT]
    stops = [i + 1 for i, token in enumerate(endless) if token == stop_at and i >= min_tokens]
    length = min(stops[0] if stops else max_tokens, max_tokens)
    assert ids == endless[:length]
    is_stop = bool(stops) and stops[0] <= max_tokens
    assert (end.finish_reason, end.stop_token) == (
        ("stop", stop_at) if is_stop else ("length", None)
    )


def test_the_matrix_really_returns_several_tokens_at_once() -> None:
    _, _, plain = parroted(0, max_tokens=40)
    _, _, drafted = parroted(8, max_tokens=40)
    assert drafted * 2 < plain


def test_without_stop_ids_an_answer_goes_on_to_its_length() -> None:
    ids, end, _ = parroted(8, max_tokens=40)  # ignore_eos: the worker passes no stop ids
    assert (len(ids), end.finish_reason) == (40, "length")


# ------------------------------------------------------------------- 15: priority


def test_who_waits_comes_in_by_priority_and_then_by_arrival() -> None:
    rng = random.Random(5)
    engine, _, _ = make_engine(max_num_seqs=1)
    wanted = [(rng.randint(-1, 1), index) for index in range(12)]
    for priority, index in wanted:
        engine.add(request(f"{index}", [index], max_tokens=1, priority=priority))
    order: list[int] = []
    while engine.has_work:
        order += [int(output.id) for output in engine.step()]
    assert order == [index for _, index in sorted(wanted)]


def test_when_the_pool_is_full_the_least_important_gives_way() -> None:
    priorities = {"a": 0, "b": 7, "c": 3}
    engine, _, scheduler = make_engine(num_blocks=9, max_num_seqs=3)
    for id, priority in priorities.items():
        engine.add(request(id, [priority] * 7, max_tokens=20, priority=priority))
    preempted: list[str] = []
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.token_ids)
        for sequence in scheduler._waiting:
            if sequence.num_preemptions and sequence.id not in preempted:
                preempted.append(sequence.id)
        engine.check()
    assert preempted[0] == "b", "the least important first"
    assert "a" not in preempted, "and the most important never"
    assert texts == {id: expected([p] * 7, 20) for id, p in priorities.items()}


def test_a_newcomer_preempts_nobody_to_get_in() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    engine.add(request("old", [1] * 24, max_tokens=4))
    engine.step()
    engine.add(request("urgent", [2] * 24, max_tokens=4, priority=-9))
    drain(engine)
    assert engine.stats().preemptions == 0


# ------------------------------------------------------------- 16: preempted in flight


@pytest.mark.parametrize("is_eager", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_sequence_preempted_while_its_step_runs_loses_and_doubles_nothing(
    at: int, is_eager: bool
) -> None:
    runner = PipelinedFakeRunner(64, BLOCK, is_eager)
    engine = Engine(Scheduler(SchedulerConfig(64, BLOCK)), runner, Clock())
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 9]}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, max_tokens=10))
    texts: dict[str, list[int]] = {}
    for step in itertools.count():
        if not engine.has_work:
            break
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.token_ids)
        if step == at:
            assert runner.num_in_flight == 1
            engine.force_preempt("a")
        engine.check()
    assert texts == {id: expected(prompt, 10) for id, prompt in prompts.items()}


# ---------------------------------------------------------------- 17, 18: what fits


def test_a_prompt_that_fills_the_pool_is_refused_at_once_and_never_scheduled() -> None:
    engine, runner, _ = make_engine(num_blocks=4)
    with pytest.raises(Unservable, match="room for 17 tokens, and the KV cache holds 16"):
        engine.add(request("a", [1] * 16))
    assert (engine.has_work, engine.step(), runner.batches) == (False, [], [])


@pytest.mark.parametrize("max_tokens", [1, 99])
def test_a_prompt_one_token_shorter_runs_without_preemption(max_tokens: int) -> None:
    engine, _, _ = make_engine(num_blocks=4)
    engine.add(request("a", [1] * 15, max_tokens=max_tokens))
    (end,) = [output for output in engine.step() if output.finish_reason]
    assert (end.finish_reason, engine.stats().preemptions) == ("length", 0)


def test_an_answer_that_reaches_the_end_of_the_pool_ends_by_length() -> None:
    engine, _, _ = make_engine(num_blocks=4)
    engine.add(request("a", [1] * 6, max_tokens=99))
    texts = drain(engine)
    assert texts == {"a": expected([1] * 6, 10)}


# -------------------------------------------------------------------- 19: aborts

ABORTS: dict[str, Callable[[Engine], object]] = {
    "of an unknown id": lambda engine: None,
    "twice": lambda engine: engine.cancel("a"),
    "after the end": lambda engine: drain(engine),
}


@pytest.mark.parametrize("before", ABORTS.values(), ids=ABORTS.keys())
def test_an_abort_without_a_target_changes_nothing(before: Callable[[Engine], object]) -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=3))
    engine.step()
    before(engine)
    state = (engine.stats(), repr(engine))
    target = "nobody" if engine.has_work else "a"
    assert engine.cancel(target) is None
    assert (engine.stats(), repr(engine)) == state
    engine.check()


@pytest.mark.parametrize("is_eager", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("at", range(8))
def test_an_abort_at_any_step_frees_the_blocks_and_disturbs_nobody(at: int, is_eager: bool) -> None:
    runner = PipelinedFakeRunner(10, BLOCK, is_eager)
    scheduler = Scheduler(SchedulerConfig(10, BLOCK, max_batch_tokens=6))
    engine = Engine(scheduler, runner, Clock())
    prompts = {"a": [1] * 9, "b": [2] * 8, "c": [3] * 7}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, max_tokens=8))
    texts: dict[str, list[int]] = {id: [] for id in prompts}
    for step in itertools.count():
        if not engine.has_work:
            break
        for output in engine.step():
            texts[output.id].extend(output.token_ids)
        if step == at and engine.cancel("a"):
            assert all(sequence.id != "a" for sequence in scheduler._running)
            texts["a"] = expected(prompts["a"], 8)  # nothing more is asked of it
        engine.check()
    assert texts == {id: expected(prompt, 8) for id, prompt in prompts.items()}
    assert engine.stats().blocks_in_use == 0


# ------------------------------------------------------------------- fairness


def test_one_who_asks_once_waits_no_longer_than_a_turn_of_each_client() -> None:
    engine, _, scheduler = make_engine(max_num_seqs=4, num_blocks=512)
    clients = {"flood": 40, "few": 3, "one": 1}
    for number, (client, count) in enumerate(clients.items()):
        for index in range(count):
            engine.add(request(f"{client}{index}", [number, index], max_tokens=6, client=client))
    order: list[str] = []
    while engine.has_work:
        order += [output.id for output in engine.step() if output.finish_reason]
    assert order.index("one0") < 8
    assert all(order.index(f"few{index}") < 16 for index in range(3))
    assert scheduler.num_waiting == 0


def crowded(**fields: object) -> tuple[Engine, FakeRunner, Scheduler]:
    """Sixteen streams of one client, decoding."""
    engine, runner, scheduler = make_engine(num_blocks=512, max_batch_tokens=1024, max_num_seqs=32)
    for index in range(16):
        engine.add(request(f"crowd{index}", [index, 1], max_tokens=40, client="crowd", **fields))
    for _ in range(5):
        engine.step()
    assert chunk_sizes(runner) == [1] * 16
    return engine, runner, scheduler


def test_the_prompt_of_one_who_asks_once_has_a_step_of_its_own_beside_a_crowd() -> None:
    engine, runner, scheduler = crowded()
    engine.add(request("one", [7] * 20, max_tokens=4, client="few"))
    engine.add(request("more", [8] * 20, max_tokens=4, client="crowd"))
    ends: list[int] = []
    sizes: list[list[int]] = []
    while engine.has_work:
        ends += [len(sizes) for output in engine.step() if output.id == "one"]
        sizes.append(chunk_sizes(runner))
        scheduler.check()
    assert sizes[0] == [20], "the one's prompt alone"
    assert sizes[1][:17] == [1] * 17, "then all who decode, and the crowd's own prompt after them"
    assert ends == [0, 1, 2, 3], "one token with each step from then on"


def test_turns_alternate_with_the_steps_of_the_crowd() -> None:
    engine, runner, _ = crowded()
    for index in range(3):
        engine.add(request(f"few{index}", [index] * 20, max_tokens=4, client=f"few{index}"))
    kinds = []
    for _ in range(6):
        engine.step()
        kinds.append(len(runner.batches[-1].chunks))
    assert kinds[0] == 1 and min(kinds[1], kinds[3], kinds[5]) >= 16


def test_a_lesser_priority_has_no_turns() -> None:
    engine, runner, _ = crowded()
    engine.add(request("one", [7] * 20, max_tokens=4, client="few", priority=1))
    engine.step()
    assert len(runner.batches[-1].chunks) == 17


def test_statuses_are_told_by_the_sequence_itself() -> None:
    engine, _, scheduler = make_engine(max_num_seqs=1)
    engine.add(request("a", [1], max_tokens=3))
    engine.add(request("b", [2], max_tokens=3))
    engine.step()
    statuses = {seq.id: seq.status for seq in scheduler._sequences.values()}
    assert statuses == {"a": Status.RUNNING, "b": Status.WAITING}
