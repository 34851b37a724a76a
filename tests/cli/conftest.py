"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fake_daemon import FakeDaemon, fake_daemon


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon() as daemon:
        yield daemon
