"""A pull whose process is killed at random points, and how fast a pull is when left alone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from llmd.registry.errors import NotEnoughSpace
from llmd.registry.pull import pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, Hub, running_hub

PULLER = """
import asyncio, sys
from pathlib import Path
from llmd.registry.pull import PullSettings, pull
from llmd.registry.store import ModelStore

def show(line):
    if line.digest:
        print(line.completed, flush=True)

settings = PullSettings(hub_endpoint=sys.argv[1], reserve_bytes=0, part_bytes=int(sys.argv[3]))
asyncio.run(pull(ModelStore(Path(sys.argv[2])), "hf.co/o/r", settings=settings, on_progress=show))
"""

SERVER = """
import sys
from tests.registry import hub_fixture, model_makers
content = model_makers.tiny_gguf() + bytes(400 << 20)
with hub_fixture.running_hub({"m.gguf": content}) as hub:
    print(hub.endpoint, hub.content_url, flush=True)
    sys.stdin.read()
"""


def killed_pulls(
    hub: Hub, root: Path, part_bytes: int, num_kills: int, slice_bytes: int, seed: int
) -> list[int]:
    """Pull in processes that are killed after so many more bytes each; then once to the end.

    Returns every `completed` that any of them told, in order.
    """
    rng = random.Random(seed)
    told: list[int] = []
    for number in range(num_kills + 1):
        goal = (told[-1] if told else 0) + rng.randint(slice_bytes // 2, slice_bytes)
        command = [sys.executable, "-c", PULLER, hub.endpoint, str(root), str(part_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told.append(int(line))
                if number < num_kills and told[-1] >= goal:
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.close()
        ended_well = process.wait() == (0 if number == num_kills else -signal.SIGKILL)
        assert ended_well, f"pull {number} ended with {process.returncode}"
    return told


def killed_daemons(
    hub: Hub, root: Path, part_bytes: int, num_kills: int, slice_bytes: int, seed: int
) -> list[int]:
    """As `killed_pulls`, but it is the daemon that is killed, while a client follows the pull."""
    rng = random.Random(seed)
    told: list[int] = []
    for number in range(num_kills + 1):
        goal = (told[-1] if told else 0) + rng.randint(slice_bytes // 2, slice_bytes)
        with real_daemon(hub, root) as (process, port):
            body = {"model": "hf.co/o/r"}
            with httpx.stream(
                "POST", f"http://127.0.0.1:{port}/api/pull", json=body, timeout=60
            ) as lines:
                for line in map(json.loads, lines.iter_lines()):
                    assert "error" not in line, line
                    if "digest" in line:
                        told.append(line.get("completed", 0))
                    if number < num_kills and told and told[-1] >= goal:
                        process.send_signal(signal.SIGKILL)
                        break
        ended = 0 if number == num_kills else -signal.SIGKILL
        assert process.returncode == ended, f"daemon {number} ended with {process.returncode}"
    return told


@contextmanager
def real_daemon(hub: Hub, root: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    environ = {
        **os.environ,
        "LLMD_HOST": f"127.0.0.1:{port}",
        "LLMD_MODELS": str(root),
        "HF_ENDPOINT": hub.endpoint,
    }
    command = [sys.executable, "-P", "-m", "llmd.daemon"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
            yield process, port
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(30)


def assert_killed_pulls_waste_little(
    root: Path,
    size: int,
    part_bytes: int,
    num_kills: int,
    bytes_per_s: int,
    waste: float,
    kill: Callable[..., list[int]] = killed_pulls,
) -> None:
    rng = random.Random(2)
    content = make.tiny_gguf() + b"".join(rng.randbytes(1 << 20) for _ in range(size >> 20))
    with running_hub({"m.gguf": content}, Faults(bytes_per_s=bytes_per_s // 6)) as hub:
        slice_bytes = len(content) // (num_kills + 1)
        told = kill(hub, root, part_bytes, num_kills, slice_bytes, seed=3)
        served = hub.bytes_served
    store = ModelStore(root)
    store.check()
    (manifest,) = store.list()
    assert store.path_of(manifest.files[0]).read_bytes() == content
    assert store.verify(manifest) == ()
    assert told == sorted(told)
    assert served <= (1 + waste) * len(content), f"{served} bytes served"


def test_a_pull_killed_three_times_is_resumed_and_fetches_little_twice(tmp_path: Path) -> None:
    assert_killed_pulls_waste_little(tmp_path / "m", 12 << 20, 1 << 20, 3, 6 << 20, waste=0.25)


@pytest.mark.slow
def test_300_megabytes_cost_at_most_six_percent_when_the_daemon_is_killed_ten_times(
    tmp_path: Path,
) -> None:
    assert_killed_pulls_waste_little(
        tmp_path / "m", 300 << 20, 16 << 20, 10, 20_000_000, 0.06, killed_daemons
    )


@pytest.mark.parametrize(
    "stride", [pytest.param(40, id="some"), pytest.param(1, id="each", marks=pytest.mark.slow)]
)
def test_a_kill_at_any_system_call_of_a_pull_leaves_the_old_model_or_the_new(
    tmp_path: Path, stride: int
) -> None:
    versions = {name: make.tiny_gguf({"general.name": name}) for name in ("old", "new")}
    with running_hub({"m.gguf": versions["old"] + bytes(200_000)}) as hub:
        settings = PullSettings(hub_endpoint=hub.endpoint, reserve_bytes=0)
        asyncio.run(pull(ModelStore(tmp_path / "old"), "hf.co/o/r", settings=settings))
        hub.files["m.gguf"] = versions["new"] + bytes(200_000)
        program = [sys.executable, "-m", "tests.registry.fatal_calls"]
        done = subprocess.run(
            [*program, hub.endpoint, str(tmp_path), str(stride)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    num_kills, num_old, num_new = map(int, re.findall(r"\d+", done.stdout))
    assert num_old and num_new, f"{num_kills} kills did not meet both sides of the install"


@pytest.fixture
def far_hub() -> Iterator[tuple[str, str]]:
    """A hub in a process of its own; its address and that of its contents."""
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, cwd=root, text=True, stdin=pipe, stdout=pipe) as server:
        assert server.stdout is not None and server.stdin is not None
        endpoint, content_url = server.stdout.readline().split()
        yield endpoint, content_url
        server.stdin.close()


@pytest.mark.slow
def test_an_unlimited_pull_is_fast_small_and_leaves_the_loop_free(
    far_hub: tuple[str, str], tmp_path: Path
) -> None:
    """Against curl and a sync for the same file; the pull verifies it besides."""
    curl = shutil.which("curl")
    assert curl is not None, "needs curl"
    endpoint, content_url = far_hub
    url = f"{content_url}/cdn/m.gguf?range=0-"
    start = time.monotonic()
    subprocess.run([curl, "-sf", "-r", "0-", "-o", str(tmp_path / "x"), url], check=True)
    with (tmp_path / "x").open("rb") as file:
        os.fsync(file.fileno())
    curl_s = time.monotonic() - start
    settings = PullSettings(hub_endpoint=endpoint, reserve_bytes=0)
    process, most = psutil.Process(), 0
    gaps: list[float] = []

    async def watch() -> None:
        nonlocal most
        while True:
            asked = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - asked - 0.005)
            most = max(most, process.memory_info().rss)

    async def main() -> float:
        watching = asyncio.create_task(watch())
        begun = time.monotonic()
        await pull(ModelStore(tmp_path / "m"), "hf.co/o/r", settings=settings)
        watching.cancel()
        return time.monotonic() - begun

    before = process.memory_info().rss
    pull_s = asyncio.run(main())
    gap_s = sorted(gaps)[int(0.99 * len(gaps))]
    print(json.dumps({"curl_s": curl_s, "pull_s": pull_s, "gap_s": gap_s, "rss": most - before}))
    assert curl_s / pull_s >= 0.6
    assert gap_s < 0.05
    assert most - before < 64 << 20


def test_a_full_disk_in_the_middle_is_named_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make.tiny_gguf() + random.Random(1).randbytes(1 << 20)
    store = ModelStore(tmp_path / "m")
    real = os.pwrite
    written = 0

    def write(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 500_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    with running_hub({"m.gguf": content}) as hub:
        settings = PullSettings(hub_endpoint=hub.endpoint, part_bytes=64 << 10, reserve_bytes=0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(NotEnoughSpace, match="not enough disk space in"):
                asyncio.run(pull(store, "hf.co/o/r", settings=settings))
        before = hub.bytes_served
        manifest = asyncio.run(pull(store, "hf.co/o/r", settings=settings))
        assert hub.bytes_served - before < 0.8 * len(content)
    assert store.path_of(manifest.files[0]).read_bytes() == content
