"""Each prompt alone: the engine says what transformers says, token for token. See test_truth."""

from __future__ import annotations

import pytest

from .truth import TruthEngine, add, run

pytestmark = pytest.mark.timeout(900)


def test_each_alone_equals_transformers(
    truth: TruthEngine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    for prompt, expected in zip(prompts, reference, strict=True):
        engine = truth.engine()
        add(engine, "alone", prompt)
        assert run(engine) == {"alone": expected}
