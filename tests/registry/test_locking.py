"""Should two processes write to one models folder: neither takes from the other what it needs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmd.registry.locking import FileLock
from llmd.registry.pull import pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, running_hub

HOLDER = """
import sys
from pathlib import Path
from llmd.registry.locking import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.take(is_shared=sys.argv[2] == "shared"), flush=True)
sys.stdin.read()
"""
PULLER = """
import asyncio, sys
from pathlib import Path
from llmd.registry.pull import PullSettings, pull
from llmd.registry.store import ModelStore
settings = PullSettings(hub_endpoint=sys.argv[2], give_up_s=60, reserve_bytes=0, part_bytes=1 << 18)
told = []
def show(line):
    if line.digest:
        told.append(line.completed)
        print(line.completed, flush=True)
asyncio.run(pull(ModelStore(Path(sys.argv[1])), "hf.co/o/r", settings=settings, on_progress=show))
assert told == sorted(told)
"""


@contextmanager
def other_process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_lock_excludes_other_processes_until_its_holder_ends(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with other_process(HOLDER, str(tmp_path / "lock"), "alone") as holder:
        assert first_line(holder) == "True"
        assert not lock.take()
        assert not lock.take(is_shared=True)
        holder.kill()
        holder.wait(30)
        assert lock.take()
    lock.release()


def test_shared_holders_exclude_only_the_one_that_wants_to_be_alone(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with other_process(HOLDER, str(tmp_path / "lock"), "shared") as holder:
        assert first_line(holder) == "True"
        assert not lock.take()
        assert lock.take(is_shared=True)
    lock.release()


def test_two_processes_that_pull_one_file_share_one_download(tmp_path: Path) -> None:
    content = make.tiny_gguf() + bytes(range(256)) * 16_000
    settings = PullSettings(reserve_bytes=0, part_bytes=1 << 18)
    told: list[int] = []
    with running_hub({"m.gguf": content}, Faults(bytes_per_s=300_000)) as hub:
        with other_process(PULLER, str(tmp_path), hub.endpoint) as puller:
            first_line(puller)
            hub.faults.bytes_per_s = 3_000_000
            ours = PullSettings(
                hub_endpoint=hub.endpoint,
                give_up_s=60,
                reserve_bytes=settings.reserve_bytes,
                part_bytes=settings.part_bytes,
            )
            store = ModelStore(tmp_path)
            manifest = asyncio.run(
                pull(
                    store,
                    "hf.co/o/r",
                    settings=ours,
                    on_progress=lambda line: told.append(line.completed or 0),
                )
            )
            assert puller.stdout is not None
            puller.stdout.read()
            assert puller.wait(60) == 0
        assert hub.bytes_served <= 1.06 * len(content)
    assert store.path_of(manifest.files[0]).read_bytes() == content
    store.check()
