"""The batch never changes an answer: a small run of the trials in determinism.py.

The full run, 32 prompts, is scripts/determinism; its result is benchmarks/results/determinism.md.
"""

from __future__ import annotations

import pytest

from .determinism import (
    RULES_OFF,
    SAMPLINGS,
    TRIALS,
    Answers,
    Stage,
    alone,
    crowd,
    load_stage,
    num_different,
)


@pytest.fixture(scope="module")
def stage() -> Stage:
    stage = load_stage(num_prompts=6, num_chars=300)
    stage.num_tokens = 8
    return stage


@pytest.fixture(scope="module")
def references(stage: Stage) -> dict[str, Answers]:
    found: dict[str, Answers] = {}
    for name, sampling in SAMPLINGS.items():
        stage.sampling = sampling
        found[name] = alone(stage)
    return found


@pytest.mark.parametrize(
    ("trial", "sampling"),
    [("among all others, random order", "greedy")]
    + [(trial, "seeded, temperature 1") for trial in TRIALS],
)
def test_the_ids_are_those_of_the_prompt_alone(
    stage: Stage, references: dict[str, Answers], sampling: str, trial: str
) -> None:
    stage.sampling = SAMPLINGS[sampling]
    assert num_different(references[sampling], TRIALS[trial](stage)) == 0


@pytest.mark.parametrize("rule", RULES_OFF)
def test_with_a_rule_switched_off_the_trial_notices(
    stage: Stage, references: dict[str, Answers], rule: str
) -> None:
    rule_off, sampling = RULES_OFF[rule]
    stage.sampling = SAMPLINGS[sampling]
    with rule_off(stage):
        assert num_different(references[sampling], crowd(stage)) > 0


def test_seeds_make_a_difference(stage: Stage, references: dict[str, Answers]) -> None:
    greedy, seeded = references.values()
    assert num_different(greedy, seeded) > 0
