"""Speculation from the sequence's own text: same ids, fewer steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmd.backend.engine.batch import BlockGroups
from llmd.backend.engine.drafts import MAX_PAUSE, Drafter
from llmd.backend.engine.engine import Engine, SequenceOutput
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig

from .fake_runner import FakeRunner, next_id
from .test_scheduler import Clock, request

BLOCK = 4
PROMPT = list(range(17))


class Parrot(FakeRunner):
    """Says the prompt again, token by token, but now and then something else."""

    def next_id(self, token_ids: Sequence[int]) -> int:
        if len(token_ids) % 23 == 0:
            return next_id(token_ids, self.vocab_size)
        return token_ids[-17]


def run(
    runner: FakeRunner,
    max_drafts: int,
    max_tokens: int = 60,
    num_streams: int = 1,
    **fields: object,
) -> tuple[dict[str, list[int]], list[SequenceOutput]]:
    config = SchedulerConfig(
        len(runner.slots) // BLOCK, BLOCK, max_batch_tokens=32, max_drafts=max_drafts
    )
    engine = Engine(Scheduler(config), runner, Clock())  # every step takes as long: drafts are free
    for index in range(num_streams):
        engine.add(request(f"s{index}", [*PROMPT[index:], *PROMPT[:index]], max_tokens, **fields))
    texts: dict[str, list[int]] = {}
    ends: list[SequenceOutput] = []
    for _ in range(3000):
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            texts.setdefault(output.id, []).extend(output.token_ids)
            ends += [output] if output.finish_reason else []
        engine.check()
    assert not engine.has_work
    assert engine.stats().blocks_in_use == 0
    return texts, ends


@pytest.mark.parametrize("num_blocks", [64, 22], ids=["roomy", "tight"])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    num_blocks: int, num_streams: int
) -> None:
    plain, drafting = Parrot(num_blocks, BLOCK), Parrot(num_blocks, BLOCK)
    expected, _ = run(plain, 0, num_streams=num_streams)
    assert run(drafting, 8, num_streams=num_streams)[0] == expected
    assert len(drafting.batches) < len(plain.batches)
    if num_streams == 1:
        assert len(drafting.batches) * 2 < len(plain.batches)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 7, 30])
def test_accepted_drafts_never_pass_the_limit(max_tokens: int) -> None:
    texts, (end,) = run(Parrot(64, BLOCK), 8, max_tokens)
    assert (len(texts["s0"]), end.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16])  # the parrot misses 6
def test_a_stop_among_accepted_drafts_cuts_there(at: int) -> None:
    runner = Parrot(64, BLOCK)
    texts, (end,) = run(runner, 8, stop_ids=frozenset([at]))
    plain, _ = run(Parrot(64, BLOCK), 0, stop_ids=frozenset([at]))
    assert texts == plain
    assert (end.finish_reason, end.stop_token) == ("stop", at)


def test_a_large_batch_does_without() -> None:
    runner = Parrot(256, BLOCK)
    run(runner, 8, num_streams=17)
    decodes = [[c for c in batch.chunks if c.start >= 17] for batch in runner.batches]
    drafting = [sum(1 + len(c.draft_ids) for c in chunks) for chunks in decodes if chunks]
    assert max(map(len, decodes)) == 17
    assert all(rows <= 17 for rows in drafting)


def test_text_that_does_not_repeat_is_left_alone() -> None:
    drafter = Drafter(8)
    wrong = 0
    tokens = [1, 2, 3, 9, 1, 2, 3]
    for _ in range(4 * MAX_PAUSE):
        drafts = drafter.propose(tokens, 8, row_cost=0.2)
        if drafts:
            wrong += len(drafts)
            drafter.record(len(drafts), 0)
        tokens += [3] if len(tokens) % 2 else [2]
    assert wrong < 60


@pytest.mark.parametrize(("row_cost", "fewest", "most"), [(0.0, 8, 8), (0.2, 2, 4), (0.9, 0, 0)])
def test_the_dearer_a_row_the_fewer_drafts(row_cost: float, fewest: int, most: int) -> None:
    assert fewest <= len(Drafter(8).propose([7, 7, 7, 7], 8, row_cost)) <= most


def test_drafts_that_are_right_become_longer_and_those_that_are_wrong_shorter() -> None:
    drafter = Drafter(8)
    first = len(drafter.propose([7] * 9, 8, 0.2))
    drafter.record(first, first)
    drafter.record(first, first)
    longer = len(drafter.propose([7] * 9, 8, 0.2))
    for _ in range(6):
        drafter.record(longer, 0)
    assert len(drafter.propose([7] * 9, 8, 0.2)) < first < longer


def test_a_loop_is_drafted_beyond_what_was_seen() -> None:
    assert Drafter(8).propose([7, 7, 7, 7], 8) == (7,) * 8


def test_the_latest_occurrence_wins_and_the_limit_holds() -> None:
    tokens = [1, 2, 3, 8, 1, 2, 3, 9, 5, 1, 2, 3]
    assert Drafter(8).propose(tokens, 2) == (9, 5)
    assert Drafter(8).propose(tokens, 0) == ()
    assert Drafter(8).propose([1, 2, 3], 8) == ()


def test_where_three_tokens_were_never_seen_two_are_looked_up() -> None:
    tokens = [4, 1, 2, 9, 5, 6, 7, 1, 2]
    assert Drafter(8).propose(tokens, 2) == (9, 5)
    assert Drafter(8).propose([*tokens[:-2], 4, 1, 2], 2) == (9, 5)
    assert Drafter(8).propose([*tokens[:-2], 8, 2], 2) == ()


def test_drafts_behind_two_tokens_are_trusted_less_and_on_their_own_record() -> None:
    by_three, by_two = [7, 1, 2, 9, 5, 6, 3, 7, 1, 2], [7, 1, 2, 9, 5, 6, 3, 1, 2]
    drafter = Drafter(8)
    before = len(drafter.propose(by_three, 8, 0.2))
    assert 0 < len(drafter.propose(by_two, 8, 0.2)) < before
    for _ in range(8):
        drafter.record(1, 0)  # behind two
    assert drafter.propose(by_two, 8, 0.2) == ()
    assert len(drafter.propose(by_three, 8, 0.2)) == before
    assert not drafter.is_pausing(len(by_two) + 1)


def test_while_a_prompt_is_read_nobody_drafts() -> None:
    runner = Parrot(256, BLOCK)
    config = SchedulerConfig(256, BLOCK, max_batch_tokens=32, prefill_chunk=4, max_drafts=8)
    engine = Engine(Scheduler(config), runner, Clock())
    engine.add(request("a", PROMPT, 60))
    for step in range(200):
        if step == 12:
            engine.add(request("long", [9] * 60, 2))
        engine.step()
    for batch in runner.batches[1:]:
        has_prompt = any(chunk.num_tokens > 1 for chunk in batch.chunks if chunk.start > 0)
        has_drafts = any(chunk.draft_ids for chunk in batch.chunks)
        assert not (has_prompt and has_drafts)
    assert any(chunk.draft_ids for batch in runner.batches for chunk in batch.chunks)


def test_a_model_whose_layers_remember_drafts_nothing() -> None:
    runner = Parrot(64, BLOCK)
    groups = BlockGroups(is_shareable=False)
    config = SchedulerConfig(64, BLOCK, max_batch_tokens=32, max_drafts=8, groups=groups)
    engine = Engine(Scheduler(config), runner, Clock())
    engine.add(request("a", PROMPT, 60))
    while engine.has_work:
        engine.step()
    assert not any(chunk.draft_ids for batch in runner.batches for chunk in batch.chunks)
