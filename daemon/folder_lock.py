"""One daemon for one models folder: a locked file in it, with who has it.

The lock is the system's, on the open file: it ends with the process, however that ends, so there is
no stale lock to clear away. What the file says is for people and for the error's sentence.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FILE_NAME = "daemon.lock"


class FolderTaken(Exception):
    """Another daemon uses the folder. One sentence says which, and what to do."""


class FolderLock:
    """Held from construction to `release`, or to the end of the process."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        """Raises FolderTaken, OSError."""
        self.path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        if not _lock(self._file.fileno()):
            owner = self._owner()
            self._file.close()
            raise FolderTaken(
                f"another llmd daemon{owner} uses the models folder {folder}; talk to that one, "
                "end it with `llmd stop`, or set LLMD_MODELS to another folder"
            )
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": host, "port": port}, self._file)
        self._file.flush()

    def _owner(self) -> str:
        try:
            known: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            return f" (pid {known['pid']}, at {known['host']}:{known['port']})"
        except (OSError, ValueError, KeyError, TypeError):
            return ""  # it is just being written

    def release(self) -> None:
        self._file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        # Beyond the content, which others may then read.
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
