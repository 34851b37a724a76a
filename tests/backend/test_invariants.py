"""I1 to I19 hold after every operation, at both depths; and each is noticed when it is broken.

The names are those of backend/engine/invariants.py (states) and engine_watch.py (changes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmd.backend.engine import invariants
from llmd.backend.engine import sequence as sequences
from llmd.backend.engine.batch import BlockGroups
from llmd.backend.engine.block_pool import BlockPool
from llmd.backend.engine.engine import Engine, SequenceOutput, Unservable
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.engine.sequence import MAX_PREEMPTIONS

from .engine_watch import WatchedScheduler
from .fake_runner import FakeRunner, PipelinedFakeRunner
from .test_scheduler import BLOCK, Clock, expected, request

NUM_BLOCKS = 10
MAX_NUM_SEQS = 3


class EngineMachine(RuleBasedStateMachine):
    """Random operations on a small, crowded engine; everyone's text must be right in the end."""

    depth = 1
    is_eager = False
    groups = BlockGroups()
    num_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(
            self.num_blocks,
            BLOCK,
            MAX_NUM_SEQS,
            max_batch_tokens=9,
            prefill_chunk=4,
            max_drafts=2,
            groups=self.groups,
        )
        self.scheduler = WatchedScheduler(config)
        self.runner = PipelinedFakeRunner(self.num_blocks, BLOCK, self.is_eager, self.groups)
        self.engine = Engine(self.scheduler, self.runner, Clock(), depth=self.depth)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.count = 0

    @rule(
        head=st.integers(0, 2),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 14),
        salt=st.sampled_from(["", "x"]),
        priority=st.integers(0, 1),
    )
    def add(self, head: int, length: int, max_tokens: int, salt: str, priority: int) -> None:
        id = f"r{self.count}"
        self.count += 1
        prompt = [head] * min(length, 8) + list(range(max(length - 8, 0)))
        self.engine.add(
            request(id, prompt, max_tokens, cache_salt=salt, priority=priority, client=salt)
        )
        self.prompts[id] = (prompt, max_tokens)
        self.texts[id] = []

    @precondition(lambda self: self.groups.num_full > 0)  # else everything does
    @rule()
    def add_what_never_fits(self) -> None:
        with pytest.raises(Unservable):
            self.engine.add(request("giant", [1] * self.engine.max_sequence_tokens))

    @precondition(lambda self: self.engine.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                self.take(output)
            self.engine.check()

    def take(self, output: SequenceOutput) -> None:
        assert output.id not in self.ended, "a sequence spoke after its end"
        self.texts[output.id].extend(output.token_ids)
        prompt, max_tokens = self.prompts[output.id]
        full = expected(prompt, max_tokens)
        so_far = self.texts[output.id]
        assert so_far == full[: len(so_far)], f"I14: {output.id} says something else"
        if output.finish_reason:
            self.ended.add(output.id)
            if len(prompt) + max_tokens <= self.engine.max_sequence_tokens:
                assert so_far == full, f"I14: {output.id} was cut short"

    def live(self) -> list[str]:
        return sorted(set(self.prompts) - self.ended)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.live()))
        assert self.engine.cancel(id) is not None
        self.ended.add(id)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.live()))
        if self.scheduler._sequences[id].num_preemptions < MAX_PREEMPTIONS:
            self.engine.force_preempt(id)

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def state_is_sound(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        total = sum(len(prompt) + max_tokens for prompt, max_tokens in self.prompts.values())
        for _ in range(20 * total + 20):
            if not self.engine.has_work:
                break
            for output in self.engine.step():
                self.take(output)
        assert not self.engine.has_work, f"I18: no progress: {self.engine!r}"
        assert self.engine.stats().blocks_in_use == 0, "I15: drained, and blocks are in use"
        assert self.ended == set(self.prompts)


class DeepMachine(EngineMachine):
    depth = 2


class DeepEagerMachine(EngineMachine):
    depth = 2
    is_eager = True


class WindowedMachine(EngineMachine):
    """One group sees everything, two see the last six tokens."""

    groups = BlockGroups(1, 2, window=6)
    num_blocks = 24


class DeepWindowedMachine(WindowedMachine):
    depth = 2


class OnlyWindowsMachine(EngineMachine):
    """No layer sees everything: a sequence may be longer than the pool."""

    groups = BlockGroups(0, 1, window=5)
    num_blocks = 9


def _case(machine: type[EngineMachine], max_examples: int) -> type:
    case: type = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return case


TestAtDepthOne = _case(EngineMachine, 30)
TestAtDepthTwo = _case(DeepMachine, 25)
TestAtDepthTwoEagerly = _case(DeepEagerMachine, 15)
TestWithWindows = _case(WindowedMachine, 15)
TestWithWindowsAtDepthTwo = _case(DeepWindowedMachine, 15)
TestWithNothingButWindows = _case(OnlyWindowsMachine, 15)


# ------------------------------------------------------------- each is noticed: states


@pytest.fixture
def busy() -> Scheduler:
    """Two run with a step in flight, one waits, and a prefix is cached."""
    config = SchedulerConfig(24, BLOCK, 2, max_batch_tokens=64)
    scheduler = Scheduler(config)
    runner = FakeRunner(24, BLOCK)
    engine = Engine(scheduler, runner, Clock())
    engine.add(request("old", list(range(20, 32)), max_tokens=1))
    while engine.has_work:
        engine.step()
    engine.add(request("a", [1] * 9 + [3], max_tokens=9, cache_salt="x"))
    engine.add(request("b", [1] * 9 + [2], max_tokens=9))
    engine.add(request("c", [1] * 9 + [4], max_tokens=9, priority=9))
    engine.step()
    scheduler.schedule(0.0)
    scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.pool.num_cached > 0
    return scheduler


def break_i1(scheduler: Scheduler) -> None:
    scheduler.pool._num_in_use += 1


def break_i2(scheduler: Scheduler) -> None:
    scheduler.pool._ref_counts[scheduler._running[0].block_ids[0]] += 1


def break_i3(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    block_id, _ = pool._cached.popitem()
    pool._blank[block_id] = None


def break_i4(scheduler: Scheduler) -> None:
    scheduler.pool._published[b"nobody's"] = 0


def break_i6(scheduler: Scheduler) -> None:
    """A block is published before its step has filled it."""
    scheduler.pool.publish(scheduler._running[0].block_ids[-1], b"too early")


def break_i7(scheduler: Scheduler) -> None:
    """Two rows write to one block."""
    one, other = scheduler._running
    scheduler.pool.release(one.block_table[-1])
    one.block_table[-1] = other.block_table[-1]
    scheduler.pool._ref_counts[other.block_ids[-1]] += 1


def break_i8(scheduler: Scheduler) -> None:
    scheduler.tables.extend(scheduler._running[0], 4)


def break_i9(scheduler: Scheduler) -> None:
    sequence = scheduler._running[0]
    sequence.set_progress(sequence.num_tokens)


def break_i10(scheduler: Scheduler) -> None:
    """One who waits has taken the keys of another's salt."""
    waiting, running = scheduler._waiting[0], scheduler._running[0]
    assert waiting.request.cache_salt != running.request.cache_salt
    waiting.block_keys = list(running.block_keys)


def break_i15(scheduler: Scheduler) -> None:
    scheduler._running.clear()


def break_i17(scheduler: Scheduler) -> None:
    scheduler._waiting.append(scheduler._running[0])


def break_i19(scheduler: Scheduler) -> None:
    scheduler._running[0].num_preemptions = MAX_PREEMPTIONS + 1


def break_i20(scheduler: Scheduler) -> None:
    """A span has lost a block that its window still needs."""
    sequence = scheduler._running[0]
    scheduler.pool.release(sequence.block_table[0])
    sequence.block_table[0] = ()


def break_i21(scheduler: Scheduler) -> None:
    """A block is said to hold what it does not."""
    scheduler.tables.partial.add(b"parent", b"key", [1, 2, 3, 4])


@pytest.mark.parametrize(
    "damage",
    [
        break_i1,
        break_i2,
        break_i3,
        break_i4,
        break_i6,
        break_i7,
        break_i8,
        break_i9,
        break_i10,
        break_i15,
        break_i17,
        break_i19,
        break_i20,
        break_i21,
    ],
)
def test_a_damaged_state_is_called_by_its_name(
    busy: Scheduler, damage: Callable[[Scheduler], None]
) -> None:
    name = damage.__name__.removeprefix("break_").upper()
    damage(busy)
    with pytest.raises(AssertionError, match=rf"{name}:"):
        busy.check()


def test_every_invariant_has_a_number_and_is_broken_above() -> None:
    numbers = [match[1] for check in invariants.INVARIANTS if (match := _number(check.__name__))]
    assert len(numbers) == len(invariants.INVARIANTS)
    assert [number for number in numbers if f"break_i{number}" not in globals()] == []


def _number(name: str) -> re.Match[str] | None:
    return re.match(r"i(\d+)_", name)


# ------------------------------------------------------------ each is noticed: changes


def run_some(scheduler: WatchedScheduler) -> None:
    """A crowd in a small pool: everything happens, preemption too."""
    engine = Engine(scheduler, FakeRunner(NUM_BLOCKS, BLOCK), Clock())
    texts: dict[str, list[int]] = {}
    prompts = {f"s{i}": [i % 3] * 6 + list(range(i + 4)) for i in range(6)}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, max_tokens=12))
    for step in range(120):
        if step == 5:
            engine.force_preempt("s1")
        if step == 9:
            engine.cancel(scheduler._running[0].id)
        if step == 11:
            engine.reset_prefix_cache()
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.token_ids)
            full = expected(prompts[output.id], 12)
            so_far = texts[output.id]
            assert so_far == full[: len(so_far)], f"I14: {output.id} says something else"


def fault_i5(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool hands out whatever was handed out last."""
    plain = BlockPool._take
    last: list[int] = []

    def take(self: BlockPool) -> int:
        if last and self._ref_counts[last[0]]:
            return last[0]
        last[:] = [plain(self)]
        return last[0]

    monkeypatch.setattr(BlockPool, "_take", take)


def fault_i8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is turned round between steps."""
    plain = Scheduler._limit_prompts

    def limit(self: Scheduler, plan: object) -> None:
        plain(self, plan)  # type: ignore[arg-type]
        for sequence in self._running:
            sequence.block_table.reverse()

    monkeypatch.setattr(Scheduler, "_limit_prompts", limit)


def fault_i11(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission takes a row before it knows whether the blocks are there."""
    plain = Scheduler._fits

    def fits(self: Scheduler, sequence: object, hits: list[sequences.Span]) -> bool:
        self._released_rows.append(self._free_rows[-1])
        return plain(self, sequence, hits)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_fits", fits)


def fault_i12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are freed front to back."""
    plain = BlockPool.release

    def release(self: BlockPool, block_table: Sequence[int]) -> None:
        plain(self, list(reversed(block_table)))

    monkeypatch.setattr(BlockPool, "release", release)


def fault_i13(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a table is not given back."""
    plain = Scheduler._give_back

    def give_back(self: Scheduler, sequence: sequences.Sequence) -> None:
        sequence.block_table.pop()
        plain(self, sequence)

    monkeypatch.setattr(Scheduler, "_give_back", give_back)


def fault_i14(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's model looks at something beside the tokens: the number of its steps."""

    def next_id(self: FakeRunner, token_ids: Sequence[int]) -> int:
        return len(self.batches) % 50

    monkeypatch.setattr(FakeRunner, "next_id", next_id)


def fault_i16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset says yes whatever runs."""
    monkeypatch.setattr(BlockPool, "reset", lambda self: True)


def fault_i18(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs waits for something that never comes."""
    monkeypatch.setattr(Scheduler, "_can_go_on", lambda self, sequence: False)


def test_the_crowd_without_a_fault_passes() -> None:
    scheduler = WatchedScheduler(SchedulerConfig(NUM_BLOCKS, BLOCK, 6))
    run_some(scheduler)
    assert scheduler.num_preemptions > 1


@pytest.mark.parametrize(
    "fault", [fault_i5, fault_i8, fault_i11, fault_i12, fault_i13, fault_i14, fault_i16, fault_i18]
)
def test_a_faulty_change_is_called_by_its_name(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fault.__name__.removeprefix("fault_").upper()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=rf"{name}:"):
        run_some(WatchedScheduler(SchedulerConfig(NUM_BLOCKS, BLOCK, 6)))
