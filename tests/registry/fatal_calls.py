"""Pulls of a small model, each killed at another of its system calls; what the disk then holds.

    python -m tests.registry.fatal_calls ENDPOINT FOLDER STRIDE

The model is in the store already, in an older version, which the pull replaces. A child process
pulls; when it is about to make its n-th call that touches the disk, in whatever thread, it ends by
SIGKILL. Its parent looks at the store as a new daemon would: the old model or the new one, whole;
then pulls again, to the end, and the store must be clean. n goes up by STRIDE, and by one in the
install at the end, until a pull has not so many calls. The last line counts the kills.

The calls are found with the interpreter's profiling hook, which tells every call of a C function
before it is made. Children are forked, so that the modules are imported once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from llmd.registry.names import ModelName
from llmd.registry.pull import PullSettings, pull
from llmd.registry.store import ModelStore

REFERENCE = "hf.co/o/r"
INSTALL_CALLS = 12  # about so many come after the new manifest was begun
LATER = 4e9  # seconds since 1970; far past any grace period
POSIX_CALLS = frozenset(
    (
        *("chmod", "close", "fdatasync", "fsync", "ftruncate", "link", "lseek", "mkdir", "open"),
        *("posix_fallocate", "pwrite", "remove", "rename", "replace", "rmdir", "symlink"),
        *("truncate", "unlink", "utime", "write"),
    )
)
FILE_CALLS = frozenset(("close", "flush", "truncate", "write"))


class Countdown:
    """Ends this process at the n-th call that touches the disk."""

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self.num_calls = 0
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event != "c_call" or not touches_disk(what):
            return
        with self._lock:
            self.num_calls += 1
            if self.num_calls == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    def begin(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)


def touches_disk(function: Any) -> bool:
    owner, name = getattr(function, "__self__", None), function.__name__
    module = getattr(function, "__module__", None)
    if module == "posix":
        return name in POSIX_CALLS
    if module == "fcntl":
        return True
    if type(owner).__module__ == "_io":  # a file object; `open` itself belongs to the module
        return name in FILE_CALLS
    return module == "_io" and name == "open"


def ended(work: Callable[[], None]) -> int:
    """Do it in a child process; its exit status, negative: the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fetch(root: Path, endpoint: str) -> None:
    settings = PullSettings(hub_endpoint=endpoint, reserve_bytes=0, part_bytes=1 << 16)
    asyncio.run(pull(ModelStore(root), REFERENCE, settings=settings))


def content_of(root: Path) -> bytes:
    """The model's file, after everything that a new daemon could find wrong was looked at."""
    store = ModelStore(root)
    store.check()
    (manifest,) = store.list()
    assert manifest.name == ModelName.parse(REFERENCE) and store.damaged() == ()
    assert store.verify(manifest) == ()
    return store.path_of(manifest.files[0]).read_bytes()


def one_trial(template: Path, folder: Path, endpoint: str, fatal: int, old: bytes) -> bytes | None:
    """What stood there after the kill; None: the pull came to its end."""
    root = folder / str(fatal)
    shutil.copytree(template, root, copy_function=shutil.copy2)

    def die() -> None:
        Countdown(fatal).begin()
        fetch(root, endpoint)

    status = ended(die)
    assert status in (0, -signal.SIGKILL), f"call {fatal}: the pull ended with {status}"
    found = content_of(root)
    assert ended(lambda: fetch(root, endpoint)) == 0, f"call {fatal}: no pull after it"
    new = content_of(root)
    assert found in (old, new) and new != old, f"call {fatal}: neither the old model nor the new"
    store = ModelStore(root)
    store.collect(now=LATER)
    assert content_of(root) == new
    left = [path for place in (store.temp, store.partial) for path in place.iterdir()]
    assert len(list(store.blobs.iterdir())) == 1 and not left, f"call {fatal}: {left} stays"
    shutil.rmtree(root)
    return found if status else None


def num_calls(template: Path, root: Path, endpoint: str) -> int:
    """Of a pull that nobody disturbs. In this process: its children find all modules imported."""
    fetch(root, endpoint)
    shutil.rmtree(root)
    shutil.copytree(template, root, copy_function=shutil.copy2)
    countdown = Countdown(0)
    countdown.begin()
    fetch(root, endpoint)
    sys.setprofile(None)
    threading.setprofile(None)
    return countdown.num_calls


def main() -> None:
    endpoint, place, stride = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    gc.disable()  # a file closed by the collector would be another call each time
    template = place / "old"
    old = content_of(template)
    ends = {True: 0, False: 0}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        install = num_calls(template, Path(folder) / "counted", endpoint) - INSTALL_CALLS
        fatal = 1
        while (found := one_trial(template, Path(folder), endpoint, fatal, old)) is not None:
            ends[found == old] += 1
            fatal = fatal + 1 if fatal >= install else min(fatal + stride, install)
    print(f"{ends[True] + ends[False]} kills: {ends[True]} old, {ends[False]} new")


if __name__ == "__main__":
    main()
