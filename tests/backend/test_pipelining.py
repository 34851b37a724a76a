"""Two steps deep, the texts are those of one step at a time.

`test_every_short_history` is the model checker: every sequence of operations up to a length, on an
engine so small that they get into each other's way, at depth 1 and at depth 2.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest

from llmd.backend.engine.batch import Batch, StepResult
from llmd.backend.engine.engine import Engine, SequenceOutput
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.engine.sequence import MAX_PREEMPTIONS
from llmd.backend.protocol import SamplingParams

from .engine_watch import WatchedScheduler
from .fake_runner import FakeRunner, PendingStep, PipelinedFakeRunner, next_id
from .test_scheduler import BLOCK, Clock, expected, request

DEPTHS = [(1, False), (2, False), (2, True)]
IDS = ["depth-1", "depth-2-late", "depth-2-early"]


def make(
    depth: int, is_eager: bool, num_blocks: int = 64, **limits: int
) -> tuple[Engine, PipelinedFakeRunner, WatchedScheduler]:
    scheduler = WatchedScheduler(SchedulerConfig(num_blocks, BLOCK, **limits))  # type: ignore[arg-type]
    runner = PipelinedFakeRunner(num_blocks, BLOCK, is_eager)
    return Engine(scheduler, runner, Clock(), depth=depth), runner, scheduler


def finish(engine: Engine) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(1000):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.check()
    raise AssertionError(f"no end: {engine!r}")


def text(outputs: Sequence[SequenceOutput]) -> list[int]:
    return [id for output in outputs for id in output.token_ids]


# ------------------------------------------------------------------ 20: depths agree


@pytest.mark.parametrize(("depth", "is_eager"), DEPTHS, ids=IDS)
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_token_is_drawn_and_no_slot_written_beyond_the_limit(
    depth: int, is_eager: bool, max_tokens: int
) -> None:
    engine, runner, _ = make(depth, is_eager)
    engine.add(request("a", [1, 2, 3], max_tokens))
    assert text(finish(engine)["a"]) == expected([1, 2, 3], max_tokens)
    written = sum(slot is not None for slot in runner.slots)
    assert written == 3 + max_tokens - 1, "the last token is never computed"
    assert runner.most_in_flight == min(depth, max_tokens)


@pytest.mark.parametrize(("depth", "is_eager"), DEPTHS, ids=IDS)
@pytest.mark.parametrize("at", range(6))
def test_a_stop_token_ends_at_its_place_at_every_depth(depth: int, is_eager: bool, at: int) -> None:
    full = expected([5, 6], 8)
    engine, _, _ = make(depth, is_eager)
    engine.add(request("a", [5, 6], 8, stop_ids=frozenset([full[at]])))
    outputs = finish(engine)["a"]
    length = full.index(full[at]) + 1
    assert (text(outputs), outputs[-1].finish_reason) == (full[:length], "stop")


def test_two_steps_really_overlap() -> None:
    engine, runner, _ = make(2, False)
    engine.add(request("a", [1, 2, 3], 20))
    finish(engine)
    assert runner.most_in_flight == 2


def test_a_runner_that_can_only_execute_is_driven_one_step_at_a_time() -> None:
    runner = FakeRunner(64, BLOCK)
    engine = Engine(Scheduler(SchedulerConfig(64, BLOCK)), runner, Clock(), depth=2)
    engine.add(request("a", [1, 2, 3], 20))
    assert text(finish(engine)["a"]) == expected([1, 2, 3], 20)


def test_out_of_blocks_the_step_waits_for_the_result_before_it_preempts() -> None:
    engine, runner, scheduler = make(2, False, num_blocks=12)
    prompts = {f"s{i}": [i] * 7 for i in range(4)}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, max_tokens=14))
    in_flight_at_preemption: list[int] = []
    plain = scheduler._preempt

    def preempt(sequence: object) -> None:
        in_flight_at_preemption.append(len(scheduler._in_flight))
        plain(sequence)  # type: ignore[arg-type]

    scheduler._preempt = preempt  # type: ignore[method-assign]
    outputs = finish(engine)
    assert {id: text(out) for id, out in outputs.items()} == {
        id: expected(prompt, 14) for id, prompt in prompts.items()
    }
    assert in_flight_at_preemption
    assert set(in_flight_at_preemption) == {0}
    assert runner.most_in_flight == 2


class Parrot(PipelinedFakeRunner):
    def next_id(self, token_ids: Sequence[int]) -> int:
        return token_ids[-17] if len(token_ids) % 23 else next_id(token_ids)


@pytest.mark.parametrize("is_eager", [False, True], ids=["late", "early"])
def test_drafts_and_planning_ahead_take_turns(is_eager: bool) -> None:
    runs = []
    for depth, max_drafts in [(1, 0), (2, 0), (2, 8)]:
        runner = Parrot(64, BLOCK, is_eager)
        config = SchedulerConfig(64, BLOCK, max_batch_tokens=64, max_drafts=max_drafts)
        engine = Engine(WatchedScheduler(config), runner, Clock(), depth=depth)
        engine.add(request("a", list(range(17)), 60))
        runs.append((text(finish(engine)["a"]), len(runner.batches)))
    (plain, _), (ahead, steps), (drafted, fewer) = runs
    assert plain == ahead == drafted
    assert fewer * 2 < steps


# ------------------------------------------------------------------------ failures


class Moody(PipelinedFakeRunner):
    """Fails where it is told to: at hand-over, or when asked for the result."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.fail_at_hand_over: set[int] = set()

    def submit(self, batch: Batch) -> PendingStep:
        if batch.step in self.fail_at_hand_over:
            self._take_rows(batch)
            raise RuntimeError("no room for the step")
        return super().submit(batch)


@pytest.mark.parametrize("at_hand_over", [True, False])
def test_a_step_that_fails_while_another_runs_ends_its_own_sequences(at_hand_over: bool) -> None:
    runner = Moody(64, BLOCK)
    (runner.fail_at_hand_over if at_hand_over else runner.fail_at).add(4)
    engine = Engine(WatchedScheduler(SchedulerConfig(64, BLOCK)), runner, Clock())
    engine.add(request("a", [1, 2, 3], 20))
    outputs = finish(engine)["a"]
    assert outputs[-1].finish_reason == "error"
    assert text(outputs) == expected([1, 2, 3], 3), "what was drawn before it has been told"
    engine.add(request("b", [1, 2, 3], 5))
    assert text(finish(engine)["b"]) == expected([1, 2, 3], 5), "and the engine goes on"


class Spoilt(PipelinedFakeRunner):
    """The logits of row 0 are unusable in step 3."""

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        if batch.step != 3:
            return result
        return StepResult(batch.step, result.token_ids, errors={batch.chunks[0].row: "not finite"})


def test_a_sequence_that_fails_alone_leaves_the_step_ahead_to_the_others() -> None:
    engine = Engine(WatchedScheduler(SchedulerConfig(64, BLOCK)), Spoilt(64, BLOCK), Clock())
    engine.add(request("a", [1, 2, 3], 9))
    engine.add(request("b", [4, 5, 6], 9))
    outputs = finish(engine)
    assert [(o.finish_reason, o.error) for o in outputs["a"]][-1] == ("error", "not finite")
    assert text(outputs["b"]) == expected([4, 5, 6], 9)


# ------------------------------------------------------------------ the model checker

OPERATIONS = ("add a", "add b", "step", "cancel", "preempt")
LENGTH = 7 if os.environ.get("LLMD_LONG_TESTS") else 4
PROMPTS = {"a": [1] * 6, "b": [1] * 5 + [2, 3]}
STOPS = {id: frozenset([expected(prompt, 4)[3]]) for id, prompt in PROMPTS.items()}


def histories() -> Iterator[tuple[str, ...]]:
    """Those that begin with an arrival: all others are one of these, later."""
    for rest in itertools.product(OPERATIONS, repeat=LENGTH - 1):
        yield ("add a", *rest)


def play(history: tuple[str, ...], depth: int, is_eager: bool) -> None:
    """Five blocks for two sequences that want three each and share one."""
    engine, _, scheduler = make(
        depth, is_eager, num_blocks=5, max_num_seqs=2, max_batch_tokens=5, prefill_chunk=4
    )
    texts: dict[str, list[int]] = {}
    cancelled: set[str] = set()

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.id not in cancelled
            texts[output.id].extend(output.token_ids)

    for number, operation in enumerate(history):
        if operation.startswith("add"):
            id = f"{operation[-1]}{number}"
            sampling = SamplingParams(min_tokens=2)
            engine.add(request(id, PROMPTS[id[0]], 6, stop_ids=STOPS[id[0]], sampling=sampling))
            texts[id] = []
        elif operation == "step":
            take(engine.step())
        elif texts:
            newest = list(texts)[-1]
            sequence = scheduler._sequences.get(newest)
            if operation == "cancel" and engine.cancel(newest):
                cancelled.add(newest)
            elif sequence is not None and sequence.num_preemptions < MAX_PREEMPTIONS:
                engine.force_preempt(newest)
        engine.check()
    for outputs in finish(engine).values():
        take(outputs)
    for id, drawn in texts.items():
        full = wanted(id[0])
        assert drawn == (full[: len(drawn)] if id in cancelled else full), (history, id)
    assert engine.stats().blocks_in_use == 0


def wanted(kind: str) -> list[int]:
    full = expected(PROMPTS[kind], 6)
    ends = [i + 1 for i, token in enumerate(full) if token in STOPS[kind] and i >= 2]
    return full[: ends[0]] if ends else full


@pytest.mark.parametrize(("depth", "is_eager"), DEPTHS, ids=IDS)
def test_every_short_history_tells_the_same_texts(depth: int, is_eager: bool) -> None:
    for history in histories():
        play(history, depth, is_eager)
