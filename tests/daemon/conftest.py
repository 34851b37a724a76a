"""One live daemon for all tests of a file that leave its models as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .live import LiveDaemon, live_daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    with live_daemon(tmp_path_factory.mktemp("models")) as running:
        yield running
