"""The worker that is there before anybody asks: who takes it, and that it stays for nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from llmd.daemon.settings import read_settings
from llmd.daemon.spare_worker import SpareWorker
from llmd.daemon.start import start_spare, wants_spare

from ..end_to_end.real_daemon import running_daemon
from ..end_to_end.test_first_light import store_model
from .manager_stage import FAKE_COMMAND, store_of
from .test_lifecycle import free_port, is_zombie, until

pytestmark = pytest.mark.skipif(
    len(psutil.Process().cpu_affinity() or ()) == 1 if sys.platform == "linux" else False,
    reason="on one core there is no spare worker",
)

# Torch takes seconds to import, and this is about who owns the process: the daemon is the real one,
# its real worker is the fake one.
CODE = """
import sys
from llmd.daemon import spare_worker
spare_worker.worker_command = lambda: sys.argv[1:]
from llmd.daemon import start
sys.exit(start.main())
"""


def environ_of(root: Path, port: int, **more: str) -> dict[str, str]:
    own = {
        "LLMD_HOST": f"127.0.0.1:{port}",
        "LLMD_MODELS": str(root),
        "LLMD_SPARE_WORKER": "60",
        "FAKE_WORKER": "{}",
    }
    return {**os.environ, **own, **more}


class Daemon:
    """In a process of its own, with two models installed."""

    def __init__(self, root: Path, command: Sequence[str] = FAKE_COMMAND, **environ: str) -> None:
        store_of(root, ["plain", "other"])
        self.port = free_port()
        self.log = root / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, *command],
                env=environ_of(root, self.port, **environ),
                stderr=log,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def spare(self) -> psutil.Process:
        """It is there before the daemon answers."""
        until(lambda: bool(self.children()), 20)
        (spare,) = self.children()
        return spare

    def wait(self) -> None:
        until(self._answers, 20)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/api/version").status_code == 200
        return False

    def worker_of(self, model: str) -> int:
        """The pid of the process that answers for this model, which is loaded if need be."""
        body = {"model": model, "prompt": "hello", "stream": False}
        answer = self.client.post("/api/generate", json=body)
        assert answer.status_code == 200, answer.text
        models = self.client.get("/api/ps").json()["models"]
        (pid,) = [row["pid"] for row in models if row["model"].startswith(model)]
        return int(pid)

    def unload(self, model: str) -> None:
        before = len(self.children())
        self.client.post("/api/generate", json={"model": model, "keep_alive": 0})
        until(lambda: len(self.children()) < before, 20)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    running.wait()
    yield running
    running.close()


def test_the_first_load_takes_the_spare_worker_over_and_the_second_does_not_find_it(
    daemon: Daemon,
) -> None:
    spare = daemon.spare()
    assert daemon.client.get("/api/ps").json()["models"] == []  # it is no model
    assert daemon.worker_of("plain") == spare.pid
    assert daemon.worker_of("other") != spare.pid
    assert len(daemon.children()) == 2


def test_a_worker_that_was_the_spare_one_ends_as_others_do_and_leaves_no_descriptor(
    daemon: Daemon,
) -> None:
    num_fds = psutil.Process(daemon.process.pid).num_fds
    daemon.worker_of("plain")
    daemon.unload("plain")
    until(lambda: not daemon.children(), 20)
    after_spare = num_fds()
    daemon.worker_of("plain")
    daemon.unload("plain")
    until(lambda: num_fds() == after_spare, 20)


def test_a_spare_worker_that_has_died_is_replaced_and_nobody_hears_of_it(daemon: Daemon) -> None:
    spare = daemon.spare()
    spare.kill()
    until(lambda: is_zombie(spare), 20)
    assert daemon.worker_of("plain") != spare.pid
    assert [e["event"] for e in daemon.client.get("/api/history").json()["history"]] == ["loaded"]


def test_a_spare_worker_that_dies_before_it_has_read_what_to_load_is_replaced(
    tmp_path: Path,
) -> None:
    began = tmp_path / "began"
    code = (
        f"import os, pathlib, sys\nbegan = pathlib.Path({str(began)!r})\n"
        "if not began.exists():\n    began.touch()\n    sys.stdin.readline()\n    sys.exit(3)\n"
        f"os.execv(sys.executable, {list(FAKE_COMMAND)!r})"
    )
    daemon = Daemon(tmp_path, [sys.executable, "-c", code])
    daemon.wait()
    spare = daemon.spare()
    until(began.exists, 20)
    assert daemon.worker_of("plain") != spare.pid
    assert [e["event"] for e in daemon.client.get("/api/history").json()["history"]] == ["loaded"]
    daemon.close()


def test_a_spare_worker_that_nobody_wants_ends_and_loads_go_on_without_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, LLMD_SPARE_WORKER="300ms")
    spare = daemon.spare()
    daemon.wait()
    until(lambda: not spare.is_running(), 20)  # reaped, too
    assert "the spare worker has ended" in daemon.log.read_text()
    assert daemon.worker_of("plain") != spare.pid
    daemon.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_spare_worker_ends_with_its_daemon(daemon: Daemon, number: signal.Signals) -> None:
    spare = daemon.spare()
    daemon.process.send_signal(number)
    daemon.process.wait(10)
    until(lambda: is_zombie(spare), 5)


def test_the_spare_worker_ends_with_a_daemon_that_is_killed_while_it_starts(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path)
    spare = daemon.spare()
    daemon.close()
    until(lambda: is_zombie(spare), 5)


def test_a_start_that_fails_has_started_no_worker(daemon: Daemon, tmp_path: Path) -> None:
    began = tmp_path / "began"
    command = [sys.executable, "-c", f"open({str(began)!r}, 'w')"]
    other = tmp_path / "other"
    store_of(other, ["plain"])
    for root, port, reason in (
        (other, daemon.port, "port"),
        (tmp_path, free_port(), "another llmd daemon"),
    ):
        environ = environ_of(root, port)
        done = subprocess.run(
            [sys.executable, "-c", CODE, *command],
            env=environ,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1 and reason in done.stderr
    assert not began.exists()


def test_a_spare_worker_that_cannot_be_started_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_of(tmp_path, ["plain"])
    monkeypatch.setattr("llmd.daemon.start._num_cores", lambda: 2)
    monkeypatch.setattr("llmd.daemon.start.worker_command", lambda: [str(tmp_path / "missing")])
    spare = start_spare(read_settings({"LLMD_MODELS": str(tmp_path)}))
    assert spare.pid is None and spare.take() is None
    assert "no spare worker" in capsys.readouterr().err


def test_there_is_a_spare_worker_where_it_can_be_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wants(**more: str) -> bool:
        return wants_spare(read_settings({"LLMD_MODELS": str(tmp_path), **more}))

    monkeypatch.setattr("llmd.daemon.start._num_cores", lambda: 2)
    assert not wants()  # nothing is installed
    store_of(tmp_path, ["plain"])
    assert wants()
    assert not wants(LLMD_SPARE_WORKER="0")
    assert not wants(LLMD_WORKER_COMMAND="another program")  # loads would not take it
    monkeypatch.setattr("llmd.daemon.start._num_cores", lambda: 1)
    assert not wants()  # the daemon would be ready later


def test_what_a_spare_worker_holds_is_known_while_there_is_one() -> None:
    spare = SpareWorker.start([sys.executable, "-c", "x = b'1' * 50_000_000; input()"])
    until(lambda: spare.private_bytes > 50_000_000, 20)
    assert spare.end() and not spare.end()
    assert (spare.private_bytes, spare.take()) == (0, None)


@pytest.mark.real_model
def test_a_real_spare_worker_answers_for_a_real_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    name = store_model(tmp_path, smollm2_gguf)
    with running_daemon(tmp_path, LLMD_SPARE_WORKER="60") as daemon:
        (spare,) = daemon.workers()
        body = {"model": name, "prompt": "hi", "stream": False, "options": {"num_predict": 2}}
        assert daemon.post("/api/generate", body)["eval_count"] == 2
        assert [row["pid"] for row in daemon.ps()] == [spare.pid]
