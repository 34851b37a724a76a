"""Layers that see only a window hold only the window: the memory, the prefixes, the texts."""

from __future__ import annotations

import pytest

from llmd.backend.engine.batch import BlockGroups
from llmd.backend.engine.engine import Engine, Unservable
from llmd.backend.engine.scheduler import SchedulerConfig

from .engine_watch import WatchedScheduler
from .fake_runner import PipelinedFakeRunner
from .test_scheduler import BLOCK, Clock, drain, expected, request

WINDOW = 8
MIXED = BlockGroups(1, 2, WINDOW)


def make(
    groups: BlockGroups, num_blocks: int = 300, chunk: int = 8, depth: int = 1
) -> tuple[Engine, WatchedScheduler]:
    config = SchedulerConfig(num_blocks, BLOCK, 4, max_batch_tokens=chunk, groups=groups)
    scheduler = WatchedScheduler(config)
    runner = PipelinedFakeRunner(num_blocks, BLOCK, groups=groups)
    return Engine(scheduler, runner, Clock(), depth=depth), scheduler


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [MIXED, BlockGroups(2, 1, 3), BlockGroups(0, 1, WINDOW)])
def test_the_texts_are_those_of_a_model_without_groups(groups: BlockGroups, depth: int) -> None:
    engine, _ = make(groups, depth=depth)
    prompts = {f"s{i}": [i] * (5 + 9 * i) for i in range(4)}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, max_tokens=30))
    assert drain(engine) == {id: expected(prompt, 30) for id, prompt in prompts.items()}
    assert engine.stats().blocks_in_use == 0


def test_a_windowed_group_never_holds_more_than_its_window_and_a_step() -> None:
    engine, scheduler = make(MIXED)
    engine.add(request("a", [7] * 100, max_tokens=50))
    most = 0
    while engine.has_work:
        engine.step()
        for sequence in scheduler._running:
            full = len(sequence.block_table)
            most = max(most, len(sequence.block_ids) - full)
    spans = -(-(WINDOW + 8) // BLOCK) + 1
    assert 0 < most <= 2 * spans, "of the 38 spans there are in all"


def test_what_the_window_has_passed_is_counted_and_can_be_found_again() -> None:
    engine, _ = make(MIXED)
    engine.add(request("a", [7] * 60, max_tokens=1))
    drain(engine)
    stats = engine.stats()
    assert stats.blocks_left_behind == 2 * ((60 - WINDOW + 1) // BLOCK), "two groups"
    assert stats.blocks_cached == 3 * (60 // BLOCK), "and are kept as long as there is room"


def test_a_prefix_is_found_with_the_window_before_its_end() -> None:
    engine, _ = make(MIXED)
    engine.add(request("a", [7] * 60, max_tokens=1))
    drain(engine)
    engine.add(request("b", [7] * 41, max_tokens=1))
    (output,) = engine.step()
    assert output.num_cached_tokens == 40
    held = engine.stats()
    assert held.blocks_in_use == 0, "one token was asked for"


def test_a_prefix_whose_window_is_gone_is_found_as_far_as_a_window_is_left() -> None:
    engine, scheduler = make(MIXED)
    engine.add(request("a", [7] * 60, max_tokens=1))
    drain(engine)
    pool, tables = scheduler.pool, scheduler.tables
    engine.add(request("b", [7] * 60, max_tokens=1))
    sequence = scheduler._waiting[0]
    hits = tables.find_prefix(sequence)
    assert len(hits) == 14
    assert [len(span) for span in hits] == [1] * 12 + [3, 3], "windows only where they are read"
    pool._forget(hits[-1][2])  # the last span of one windowed group is evicted
    assert len(tables.find_prefix(sequence)) == 13
    pool._forget(hits[-2][1])
    assert len(tables.find_prefix(sequence)) == 12
    pool._forget(hits[0][0])  # the first block of the full group
    assert tables.find_prefix(sequence) == []
    scheduler.check()


def test_a_sequence_longer_than_the_pool_runs_if_all_layers_have_windows() -> None:
    engine, _ = make(BlockGroups(0, 1, WINDOW), num_blocks=12, chunk=4)
    engine.add(request("a", [3] * 70, max_tokens=20))
    assert drain(engine)["a"] == expected([3] * 70, 20)


def test_what_fits_is_told_by_the_growth_of_its_tables() -> None:
    uniform, _ = make(BlockGroups(), num_blocks=60)
    mixed, scheduler = make(MIXED, num_blocks=60)
    assert uniform.max_sequence_tokens == 60 * BLOCK
    longest = mixed.max_sequence_tokens
    assert 20 * BLOCK < longest < 60 * BLOCK, "more than whole spans of three would allow"
    mixed.add(request("a", [1] * (longest - 1), max_tokens=9))
    with pytest.raises(Unservable):
        mixed.add(request("b", [1] * longest, max_tokens=9))
    assert len(drain(mixed)["a"]) == 1
    assert scheduler.num_preemptions == 0


def test_samples_of_one_prompt_share_it_in_every_group() -> None:
    engine, _ = make(MIXED, chunk=32)
    prompt = list(range(19))
    for id in ("a", "b", "c"):
        engine.add(request(id, prompt, max_tokens=6))
    outputs = engine.step() + engine.step()
    assert sorted(output.num_cached_tokens for output in outputs)[-1] == 18
    texts: dict[str, list[int]] = {}
    for output in outputs:
        texts.setdefault(output.id, []).extend(output.token_ids)
    for id, rest in drain(engine).items():
        texts[id].extend(rest)
    assert texts == {id: expected(prompt, 6) for id in ("a", "b", "c")}
