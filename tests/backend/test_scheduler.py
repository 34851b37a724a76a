"""The scheduler and the engine over a runner that computes with integers."""

from __future__ import annotations

import pytest

from llmd.backend.engine.engine import Engine, EngineRequest, SequenceOutput, Unservable
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.engine.sequence import MAX_PREEMPTIONS
from llmd.backend.protocol import SamplingParams

from .fake_runner import FakeRunner, next_id

BLOCK = 4


class Clock:
    """Seconds that pass one per call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_engine(
    num_blocks: int = 64,
    max_batch_tokens: int = 64,
    prefill_chunk: int = 0,
    max_num_seqs: int = 8,
    max_drafts: int = 0,
) -> tuple[Engine, FakeRunner, Scheduler]:
    config = SchedulerConfig(
        num_blocks, BLOCK, max_num_seqs, max_batch_tokens, prefill_chunk, max_drafts=max_drafts
    )
    scheduler = Scheduler(config)
    runner = FakeRunner(num_blocks, BLOCK)
    return Engine(scheduler, runner, Clock()), runner, scheduler


def request(id: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> EngineRequest:
    return EngineRequest(id, tuple(prompt), len(prompt), max_tokens, **fields)  # type: ignore[arg-type]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_id(tokens))
    return tokens[len(prompt) :]


def drain(engine: Engine, limit: int = 2000) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        limit -= 1
        assert limit > 0, f"no progress: {engine!r}"
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            texts.setdefault(output.id, []).extend(output.token_ids)
        engine.check()
    return texts


PROMPTS = {f"s{i}": [(7 * i + j) % 50 for j in range(3 + 5 * i)] for i in range(6)}


@pytest.mark.parametrize(
    ("num_blocks", "max_batch_tokens", "chunk"),
    [(64, 64, 0), (64, 5, 0), (64, 64, 3), (14, 64, 0), (12, 7, 2)],
    ids=["roomy", "small-budget", "chunked", "preempting", "all-at-once"],
)
def test_the_batch_never_changes_an_answer(
    num_blocks: int, max_batch_tokens: int, chunk: int
) -> None:
    engine, _, _ = make_engine(num_blocks, max_batch_tokens, chunk)
    for id, prompt in PROMPTS.items():
        engine.add(request(id, prompt, max_tokens=12))
    assert drain(engine) == {id: expected(prompt, 12) for id, prompt in PROMPTS.items()}
    assert engine.stats().blocks_in_use == 0


def test_a_tight_pool_really_preempts() -> None:
    engine, _, _ = make_engine(num_blocks=14)
    for id, prompt in PROMPTS.items():
        engine.add(request(id, prompt, max_tokens=20))
    drain(engine)
    assert engine.stats().preemptions > 0


def test_decodes_come_before_prompts_and_prompts_share_what_is_left() -> None:
    engine, runner, _ = make_engine(num_blocks=512, max_batch_tokens=1024)
    for index in range(3):
        engine.add(request(f"p{index}", [index] * 400))
    engine.step()
    assert [chunk.num_tokens for chunk in runner.batches[-1].chunks] == [400, 400, 224]
    engine.step()
    assert [chunk.num_tokens for chunk in runner.batches[-1].chunks] == [1, 1, 176]


def test_the_second_of_two_equal_prompts_reuses_all_but_the_last_token() -> None:
    engine, runner, _ = make_engine()
    prompt = list(range(12))  # three full blocks: a copy of the last is written to
    engine.add(request("a", prompt, max_tokens=1))
    drain(engine)
    engine.add(request("b", prompt, max_tokens=1))
    (output,) = engine.step()
    assert output.num_cached_tokens == 11
    assert list(output.token_ids) == expected(prompt, 1)
    assert len(runner.batches[-1].copies) == 1


def test_a_prompt_that_leaves_the_known_text_within_a_block_begins_with_a_copy_of_it() -> None:
    engine, runner, _ = make_engine()
    engine.add(request("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=4))
    drain(engine)
    other = [1, 2, 3, 4, 5, 6, 9, 9, 9]
    engine.add(request("b", other, max_tokens=4))
    outputs = engine.step()
    assert outputs[0].num_cached_tokens == 6
    assert runner.batches[-1].copies
    assert [*outputs[0].token_ids, *drain(engine)["b"]] == expected(other, 4)


def test_no_block_is_copied_where_the_last_free_one_is_its_own() -> None:
    engine, runner, _ = make_engine(num_blocks=2)
    engine.add(request("a", [1, 2, 3, 4, 5], max_tokens=2))
    drain(engine)
    engine.add(request("b", [1, 2, 3, 9, 9], max_tokens=2))
    assert drain(engine)["b"] == expected([1, 2, 3, 9, 9], 2)
    assert all(source != target for batch in runner.batches for source, target in batch.copies)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine, runner, _ = make_engine()
    prompt = list(range(33))
    for id in ("a", "b", "c"):
        engine.add(request(id, prompt, max_tokens=3))
    texts = drain(engine)
    assert texts == {id: expected(prompt, 3) for id in ("a", "b", "c")}
    prefill = sum(c.num_tokens for b in runner.batches for c in b.chunks if c.num_tokens > 1)
    assert prefill == 33, "only the first computes the prompt; the others one token each"


def test_samples_of_one_prompt_share_it_to_the_last_token() -> None:
    engine, runner, _ = make_engine()
    prompt = list(range(30, 41))  # two full blocks and three tokens of a third
    for id in ("a", "b", "c"):
        engine.add(request(id, prompt, max_tokens=6))
    outputs = engine.step() + engine.step()
    assert {o.id: o.num_cached_tokens for o in outputs} == {"a": 0, "b": 10, "c": 10}
    assert engine.stats().blocks_in_use == 2 + 3, "two shared, and a last one each"
    assert len({target for batch in runner.batches for _, target in batch.copies}) == 2
    texts = drain(engine)
    for output in outputs:
        texts[output.id] = [*output.token_ids, *texts[output.id]][-6:]
    assert texts["b"] == texts["c"] == expected(prompt, 6)


def test_a_twin_of_another_salt_copies_nothing() -> None:
    engine, runner, _ = make_engine()
    for id in ("a", "b"):
        engine.add(request(id, [5, 6, 7], max_tokens=6, cache_salt=id))
    drain(engine)
    assert not any(batch.copies for batch in runner.batches)


def test_a_pool_that_shrinks_below_a_running_sequence_ends_its_answer() -> None:
    engine, _, _ = make_engine(num_blocks=16)
    engine.add(request("a", list(range(40)), max_tokens=20))
    engine.add(request("b", [1, 2, 3], max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.set_num_blocks(6)
    ends: dict[str, SequenceOutput] = {}
    for _ in range(200):
        ends.update({o.id: o for o in engine.step() if o.finish_reason})
        engine.check()
    assert not engine.has_work
    assert (ends["a"].finish_reason, ends["b"].finish_reason) == ("length", "length")


def test_a_waiting_sequence_that_the_shrunken_pool_cannot_hold_fails_with_both_numbers() -> None:
    engine, _, _ = make_engine(num_blocks=16)
    engine.add(request("a", list(range(40)), max_tokens=20))
    engine.step()
    engine.force_preempt("a")
    engine.set_num_blocks(6)
    (end,) = engine.step()
    assert end.finish_reason == "error"
    assert "42 tokens, and the KV cache holds 24" in end.error
    assert not engine.has_work


def test_a_protected_sequence_does_not_wait_for_ever_in_a_shrunken_pool() -> None:
    engine, _, _ = make_engine(num_blocks=16)
    engine.add(request("a", list(range(20)), max_tokens=40))
    for _ in range(MAX_PREEMPTIONS):
        engine.step()
        engine.force_preempt("a")
    engine.step()
    engine.set_num_blocks(3)
    ends = [o for _ in range(50) for o in engine.step() if o.finish_reason]
    assert ([o.finish_reason for o in ends], engine.has_work) in (
        (["error"], False),
        (["length"], False),
    )


@pytest.mark.parametrize("num_prompt", [14, 15])
def test_one_spare_block_serves_the_whole_window(num_prompt: int) -> None:
    engine, _, _ = make_engine(num_blocks=4)
    engine.add(request("a", [3] * num_prompt, max_tokens=16 - num_prompt))
    assert len(drain(engine)["a"]) == 16 - num_prompt
    assert engine.stats().preemptions == 0


def test_the_victim_is_whoever_loses_least_and_the_unimportant_first() -> None:
    engine, _, scheduler = make_engine(num_blocks=12, max_num_seqs=3)
    engine.add(request("published", [1] * 8, max_tokens=12))
    engine.add(request("partial", [2] * 11, max_tokens=12))
    engine.step()
    victim = scheduler._victim()
    assert victim is not None
    assert victim.id == "published", "both its blocks are found again"
    engine.add(request("cheap", [3] * 3, max_tokens=12, priority=3))
    engine.step()
    victim = scheduler._victim()
    assert victim is not None
    assert victim.id == "cheap"


def test_nonsense_is_refused() -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", [1]))
    for bad in (request("a", [2]), request("b", []), EngineRequest("c", (1, 2, 3), 1, 2)):
        with pytest.raises(ValueError, match=f"sequence {bad.id}"):
            engine.add(bad)
    engine.check()


def test_counters_tell_prompt_cached_and_output_tokens_apart() -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", list(range(12)), max_tokens=5))
    drain(engine)
    engine.add(request("b", list(range(12)), max_tokens=5))
    engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (13, 11, 6)


def test_salts_do_not_share() -> None:
    engine, _, _ = make_engine()
    prompt = list(range(12))
    cached = []
    for id, salt in [("a", "x"), ("b", "x"), ("c", "y")]:
        engine.add(request(id, prompt, max_tokens=1, cache_salt=salt))
        cached.append(engine.step()[0].num_cached_tokens)
    assert cached == [0, 11, 0]


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    engine, _, _ = make_engine(num_blocks=4)
    with pytest.raises(Unservable, match="17 tokens, and the KV cache holds 16"):
        engine.add(request("a", [1] * 16))
    assert not engine.has_work


def test_a_sequence_that_fills_the_pool_runs_to_the_brim() -> None:
    engine, _, _ = make_engine(num_blocks=4)
    engine.add(request("a", [1] * 15, max_tokens=99))
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].finish_reason == "length"
    assert engine.stats().preemptions == 0


def test_a_stop_token_ends_and_min_tokens_delays_it() -> None:
    first, second, third = expected([5], 3)
    engine, _, _ = make_engine()
    engine.add(request("a", [5], stop_ids=frozenset([second])))
    assert drain(engine) == {"a": [first, second]}
    patient = SamplingParams(min_tokens=2)
    engine.add(request("b", [5], 3, stop_ids=frozenset([second]), sampling=patient))
    assert drain(engine) == {"b": [first, second, third]}


def test_cancel_is_idempotent_and_frees_the_blocks() -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", list(range(20))))
    engine.step()
    assert engine.stats().blocks_in_use > 0
    assert engine.cancel("a") is not None
    assert engine.cancel("a") is None
    assert engine.cancel("nobody") is None
    engine.check()
    assert (engine.stats().blocks_in_use, engine.has_work) == (0, False)


def test_a_failed_step_ends_its_sequences_and_leaves_no_key() -> None:
    engine, runner, _ = make_engine()
    runner.fail_at = {1}
    engine.add(request("a", list(range(12))))
    (output,) = engine.step()
    assert (output.finish_reason, "told to fail" in output.error) == ("error", True)
    engine.check()
    engine.add(request("b", list(range(12)), max_tokens=2))
    assert drain(engine) == {"b": expected(list(range(12)), 2)}
    assert engine.stats().cached_tokens == 0


def test_a_sequence_preempted_too_often_is_left_alone() -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", list(range(9)), max_tokens=20))
    engine.step()
    for _ in range(MAX_PREEMPTIONS):
        assert engine.force_preempt("a")
        engine.step()
    engine.add(request("b", list(range(20, 60)), max_tokens=100))
    texts = drain(engine)
    assert len(texts["b"]) == 100
    assert engine.stats().preemptions == MAX_PREEMPTIONS


def test_a_sequence_resumed_after_preemption_says_the_same() -> None:
    engine, _, _ = make_engine()
    engine.add(request("a", list(range(9)), max_tokens=20))
    texts: list[int] = []
    for step in range(100):
        if not engine.has_work:
            break
        for output in engine.step():
            texts += output.token_ids
        if step in (3, 7, 8):
            engine.force_preempt("a")
            engine.check()
    assert texts == expected(list(range(9)), 20)


def test_outputs_of_an_earlier_worker_count() -> None:
    engine, _, _ = make_engine()
    prompt = [1, 2, 3]
    full = expected(prompt, 10)
    engine.add(EngineRequest("a", (*prompt, *full[:4]), 3, 10))
    assert drain(engine) == {"a": full[4:]}


def test_clients_take_turns() -> None:
    engine, runner, scheduler = make_engine(max_num_seqs=2, num_blocks=256)
    for index in range(20):
        engine.add(request(f"greedy{index}", [index, 1, 2], max_tokens=4, client="greedy"))
    engine.add(request("modest", [9, 9, 9], max_tokens=4, client="modest"))
    order: list[str] = []
    while engine.has_work:
        order += [output.id for output in engine.step() if output.finish_reason]
    assert order.index("modest") < 4
    assert (len(runner.batches) > 0, scheduler.num_waiting) == (True, 0)


def test_priority_runs_first() -> None:
    engine, _, _ = make_engine(max_num_seqs=1)
    engine.add(request("late", [1], max_tokens=1, priority=5))
    engine.add(request("soon", [2], max_tokens=1, priority=-5))
    order = []
    while engine.has_work:
        order += [output.id for output in engine.step()]
    assert order == ["soon", "late"]


@pytest.mark.parametrize(("length", "max_drafts"), [(1, 0), (10, 0), (10, 4)])
def test_an_answer_drawn_in_one_step_has_taken_its_part_of_that_step(
    length: int, max_drafts: int
) -> None:
    engine, _, _ = make_engine(max_drafts=max_drafts)
    engine.add(request("a", [1] * length, max_tokens=1))
    (output,) = engine.step()
    assert output.finish_reason == "length"
    step_s = output.prefill_s + output.decode_s
    assert step_s > 0
    assert output.decode_s == pytest.approx(step_s / length)
