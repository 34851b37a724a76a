"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import model_files


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, Q4_1."""
    return model_files.smollm2_gguf()
