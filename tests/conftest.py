"""Fixtures that all tests share."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from . import model_files

LONGEST = ("test_truth_alone.py", "test_truth.py")


def pytest_configure() -> None:
    """A shell starts background jobs deaf to Ctrl+C, and what they start inherits that: the
    programs that the tests interrupt would go on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, and the rest fills up what the others have left of time."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, Q4_1."""
    return model_files.smollm2_gguf()


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Whatever a file of tests starts has ended when it ends."""
    me = psutil.Process()
    before = set(me.children())
    yield
    _, alive = psutil.wait_procs(set(me.children()) - before, timeout=10)
    left = [shlex.join(process.cmdline()) for process in alive]
    for process in alive:
        process.kill()
    assert not left, left
