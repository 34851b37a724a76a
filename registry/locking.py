"""Locks between processes that share a models folder. The system frees them when a process ends.

    FileLock(path).held()        wait for it, hold it for a block
    FileLock(path).take()        try once; `release` gives it back

Not between threads by themselves, but two FileLocks of one path exclude each other in one process
too. The file stays: deleting it would let two processes lock two files of the same name.

Source: flock(2); on Windows the first byte is locked instead, which knows no shared holders.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.02

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int, is_shared: bool) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int, is_shared: bool) -> bool:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class FileLock:
    """One lock. Held by the process through this object, until `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def __repr__(self) -> str:
        return f"<FileLock {self.path}{' held' if self._descriptor >= 0 else ''}>"

    def take(self, *, is_shared: bool = False) -> bool:
        """Try once. True if it is held now. A shared one excludes only those that are not."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if _try_lock(self._descriptor, is_shared):
            return True
        self.release()
        return False

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until it is free and hold it for the block: for short work only."""
        while not self.take():
            time.sleep(POLL_S)
        try:
            yield
        finally:
            self.release()
