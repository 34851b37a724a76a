"""Two `llmd pull` and one `llmd run` of a model at once: one download; who leaves, leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ..registry import model_makers as make
from ..registry.hub_fixture import Faults, Hub, running_hub
from .test_lifecycle import Daemon

NAME = "hf.co/o/r"
SLOWLY = 300_000  # bytes a second of each connection, while the three meet
QUICKLY = 30_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    content = make.tiny_gguf() + bytes(range(256)) * 16_000
    with running_hub({"m.gguf": content}, Faults(bytes_per_s=SLOWLY)) as hub:
        yield hub


@pytest.fixture
def daemon(tmp_path: Path, hub: Hub) -> Iterator[Daemon]:
    running = Daemon(tmp_path, HF_ENDPOINT=hub.endpoint)
    yield running
    running.close()


@contextmanager
def command(daemon: Daemon, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`llmd` in a process of its own, not at a terminal; ended with the block."""
    environ = {**os.environ, "LLMD_HOST": f"127.0.0.1:{daemon.port}"}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "llmd", *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for_a_figure(process: subprocess.Popen[str]) -> None:
    """Until it has told how far the download is."""
    assert process.stderr is not None
    for line in process.stderr:
        if "%" in line:
            return
    raise AssertionError("no progress was told")


def test_two_pulls_and_a_run_share_one_download_and_one_may_leave(daemon: Daemon, hub: Hub) -> None:
    with ExitStack() as stack:
        leaving, staying, running = (
            stack.enter_context(command(daemon, *words))
            for words in (("pull", NAME), ("pull", NAME), ("run", NAME, "hello"))
        )
        for process in (leaving, staying, running):
            wait_for_a_figure(process)
        leaving.send_signal(signal.SIGINT)
        assert leaving.wait(20) != 0
        assert daemon.client.get("/api/tags").json()["models"][0]["name"] == "plain:latest"
        hub.faults.bytes_per_s = QUICKLY
        answer, complaint = running.communicate(timeout=60)
        assert running.returncode == 0, complaint
        assert answer.startswith("w")
        _, complaint = staying.communicate(timeout=60)
        assert staying.returncode == 0, complaint
    assert hub.bytes_served == len(hub.files["m.gguf"])
