"""Where the daemon is, and a line for the report per test. Runs in the clients' environment."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["LLMD_URL"]


@pytest.fixture(scope="session")
def real_model() -> str:
    """SmolLM2."""
    return os.environ["LLMD_REAL_MODEL"]
