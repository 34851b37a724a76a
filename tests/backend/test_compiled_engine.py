"""The compiled program under the engine, where layers have windows: whatever befalls a sequence,
its tokens are those that it says alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.kernels.cpu_launch import why_not
from llmd.backend.protocol import Load, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner

from .gpu_streams import run
from .test_compiled_decoder import Checkpoint

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"compiled kernels: {why_not()}")

WINDOW = 40
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 104,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    load = Load(name="tiny", digest="d", files=[], num_threads=2, kv_budget_bytes=8 << 20)
    found = ModelRunner(Checkpoint(**GEMMA), load, lambda share, stage: None)
    assert found.details["kernels"] == "compiled"
    assert found.groups.num_groups == 2
    return found


def engine_of(runner: ModelRunner, prefill_chunk: int = 0, max_drafts: int = 0) -> Engine:
    config = SchedulerConfig(
        num_blocks=min(runner.num_blocks, 64),
        block_size=runner.block_size,
        max_num_seqs=8,
        prefill_chunk=prefill_chunk,
        max_drafts=max_drafts,
        groups=runner.groups,
    )
    return Engine(Scheduler(config), runner)


def wanted() -> list[EngineRequest]:
    """Prompts on both sides of the window; the greedy ones repeat themselves."""
    made = []
    for index, length in enumerate((5, 39, 70, 200)):
        prompt = tuple((i * i + index) % 97 for i in range(20)) * 10
        warm = SamplingParams(temperature=1.0)
        made.append(
            EngineRequest(
                id=str(index),
                token_ids=prompt[:length],
                num_prompt_tokens=length,
                max_tokens=60,
                sampling=warm if index % 2 else SamplingParams(temperature=0.0),
                seed=index,
            )
        )
    return made


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[str, tuple[int, ...]]:
    streams: dict[str, tuple[int, ...]] = {}
    for request in wanted():
        streams |= run(engine_of(runner), [request])
    return streams


@pytest.mark.parametrize("prefill_chunk", [0, 7])
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_together_in_chunks_and_with_drafts_they_say_the_same(
    runner: ModelRunner, alone: dict[str, tuple[int, ...]], prefill_chunk: int, max_drafts: int
) -> None:
    engine = engine_of(runner, prefill_chunk, max_drafts)
    assert run(engine, wanted()) == alone
    assert run(engine, wanted()) == alone  # now from the prefix cache
    assert engine.stats().cached_tokens > 0


def test_a_preempted_sequence_says_the_same(
    runner: ModelRunner, alone: dict[str, tuple[int, ...]]
) -> None:
    def preempt(engine: Engine, step: int) -> None:
        if step % 9 == 8:
            engine.force_preempt(str(step // 9 % 4))

    engine = engine_of(runner, max_drafts=4)
    assert run(engine, wanted(), preempt) == alone
    assert engine.stats().preemptions > 0


def test_a_long_text_holds_no_more_than_the_window_in_windowed_layers(runner: ModelRunner) -> None:
    """Far past the window the streams still agree, whether read at once or token by token."""
    long = [replace(request, max_tokens=300) for request in wanted()[2:3]]
    whole = run(engine_of(runner), long)["2"]
    prompt = (*long[0].token_ids, *whole[:299])
    again = replace(long[0], token_ids=prompt, num_prompt_tokens=len(prompt), max_tokens=1)
    assert run(engine_of(runner), [again])["2"] == whole[299:]
