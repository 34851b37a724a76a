"""A short chaos over workers without a model; the long one, with the real model: scripts/chaos."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from .chaos import NAMES, is_clean, trial

# The file of the real model is pulled, though its weights are not read.
pytestmark = [pytest.mark.slow, pytest.mark.real_model]


def test_nothing_is_lost_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER", json.dumps({name: {"token_s": 0.02} for name in NAMES}))
    tally, left = asyncio.run(trial(tmp_path, seconds=8.0, seed=3, is_fake=True))
    assert is_clean(tally, left), (tally, left)
    assert tally.ends["complete"] > 10 and sum(tally.acts.values()) >= 2, tally
