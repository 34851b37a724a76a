"""Structured output on the real model; all 200 schemas: `python -m tests.end_to_end.structured`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .real_daemon import running_daemon
from .structured import judge_all
from .test_first_light import store_model

NUM_SCHEMAS = 10


@pytest.mark.real_model
def test_whatever_the_model_wants_to_say_the_answer_fits_its_schema(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    model = store_model(tmp_path, smollm2_gguf)
    with running_daemon(tmp_path) as daemon:
        verdicts = judge_all(daemon.url, model, NUM_SCHEMAS)
    assert [verdict for verdict in verdicts if verdict.problem] == []
