"""The engine says what transformers says, token for token, however the work is cut.

Real weights (SmolLM2-135M), float32, greedy. One reference run of transformers serves all tests;
each prompt alone, which takes as long as all others, is in test_truth_alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llmd.backend.protocol import SamplingParams

from .truth import (
    TruthEngine,
    add,
    folder_files,
    run,
    tokenizer_of,
)

pytestmark = pytest.mark.timeout(900)


def all_of(
    truth: TruthEngine, prompts: list[list[int]], chunk: int = 0, preempt_at: tuple[int, ...] = ()
) -> list[list[int]]:
    """All prompts at once."""
    engine = truth.engine(chunk)
    for index, prompt in enumerate(prompts):
        add(engine, f"p{index}", prompt)
    found = run(engine, preempt_at)
    return [found[f"p{index}"] for index in range(len(prompts))]


def test_in_batches_of_eight_equals_transformers(
    truth: TruthEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    found = [ids for at in range(0, 20, 8) for ids in all_of(truth, prompts[at : at + 8])]
    assert found == reference


def test_in_chunks_of_sixteen_equals_transformers(
    truth: TruthEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    assert all_of(truth, prompts, chunk=16) == reference


def test_after_forced_preemptions_equals_transformers(
    truth: TruthEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    assert all_of(truth, prompts, preempt_at=(5, 30)) == reference


def test_from_a_warm_prefix_cache_equals_transformers(
    truth: TruthEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    engine = truth.engine()
    for index, prompt in enumerate(prompts):
        add(engine, f"cold{index}", prompt)
    run(engine)
    for index, prompt in enumerate(prompts):
        add(engine, f"warm{index}", prompt)
    found = run(engine)
    assert [found[f"warm{index}"] for index in range(20)] == reference
    assert engine.stats().cached_tokens >= 64, "the long prompt was to be found again"


def test_the_safetensors_folder_equals_transformers(
    folder: Path, smollm2_gguf: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    truth = TruthEngine.load(folder_files(folder), tokenizer_of(smollm2_gguf), "float32")
    assert all_of(truth, prompts) == reference


def test_the_same_seed_says_the_same_in_any_company(
    truth: TruthEngine, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(temperature=0.9)
    alone = truth.engine()
    add(alone, "a", prompts[1], sampling=sampling, seed=7)
    crowd = truth.engine(chunk=16)
    add(crowd, "a", prompts[1], sampling=sampling, seed=7)
    for index in range(5):
        add(crowd, f"other{index}", prompts[index + 2], sampling=sampling, seed=index)
    other = truth.engine()
    add(other, "a", prompts[1], sampling=sampling, seed=8)
    expected = run(alone)["a"]
    assert run(crowd, preempt_at=(9,))["a"] == expected
    assert run(other)["a"] != expected
