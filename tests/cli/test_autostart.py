"""The daemon starts by itself, once, and says why if it can't. A real daemon, without a model."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .fake_daemon import llmd


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A free port and a home of its own; whatever listens there afterwards is ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LLMD_HOST": f"127.0.0.1:{port}",
    }
    for daemon in daemons_of(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):  # the one that found the port taken
            daemon.terminate()
            daemon.wait(timeout=20)


def daemons_of(home: Path) -> list[psutil.Process]:
    """The daemons whose home this is: no other test's, and not the user's own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        try:
            if "llmd.daemon" in command and process.environ().get("HOME") == str(home):
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or is another user's
    return found


def listening_of(home: Path) -> list[psutil.Process]:
    """The daemons that have not ended."""
    alive = []
    for daemon in daemons_of(home):
        with contextlib.suppress(psutil.NoSuchProcess):
            if daemon.status() != psutil.STATUS_ZOMBIE:
                alive.append(daemon)
    return alive


def log_of(home: Path) -> str:
    return next(home.rglob("daemon.log")).read_text(encoding="utf-8")


def test_a_command_starts_the_daemon_and_the_next_one_finds_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    first = llmd("list", environ=environ)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == "NAME    ID    SIZE    MODIFIED\n"
    daemons = daemons_of(tmp_path)
    assert len(daemons) == 1
    assert llmd("ps", environ=environ).returncode == 0
    assert daemons_of(tmp_path) == daemons
    assert "listening on" in log_of(tmp_path)


def test_two_commands_at_once_end_with_one_daemon(environ: dict[str, str], tmp_path: Path) -> None:
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "llmd", "list"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    outcomes = [command.communicate(timeout=90) for command in commands]
    assert [command.returncode for command in commands] == [0, 0]
    assert [errors for _, errors in outcomes] == [b"", b""]
    deadline = time.monotonic() + 30  # the second daemon finds the port taken and ends
    while len(listening_of(tmp_path)) != 1:
        assert time.monotonic() < deadline, daemons_of(tmp_path)
        time.sleep(0.05)


def test_a_setting_that_cannot_be_read_is_told(environ: dict[str, str]) -> None:
    result = llmd("list", environ={**environ, "LLMD_KEEP_ALIVE": "soon"})
    assert result.returncode == 1
    assert result.stderr.startswith("Error: LLMD_KEEP_ALIVE='soon': ")
    assert result.stderr.count("\n") == 1


def test_a_folder_named_llmd_is_not_taken_for_the_package(
    environ: dict[str, str], tmp_path: Path
) -> None:
    trap = tmp_path / "here" / "llmd"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text("raise SystemExit('the wrong package')")
    program = Path(sys.executable).with_name("llmd")
    result = subprocess.run(
        [program, "list"],
        env=environ,
        cwd=trap.parent,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
