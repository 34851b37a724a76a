"""Prefix blocks on disk: what a model knew when it was unloaded, or idle, is found again later.

One file for each block, named by the block's key, which names its tokens and all before them:

    <folder>/<fingerprint>/<key>   magic, the key's and the block's checksum, then the block as it
                                   lies in memory

`fingerprint` names what decides the meaning of the bytes (model, dtype, rope, layout): files of
another meaning are in another folder, which is removed. A file that is cut off, damaged or of
another block is as good as absent. The files are the user's own conversations: nobody else may
read them, and nothing is written outside `budget_bytes`, the least recently used first to go.

Owner: the engine thread; `read` is the reader thread's. They share `_sizes`, each for a few
dictionary operations at a time and never while a file is read or written: hence a lock, which
nobody holds long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger("llmd.worker")

MAGIC = b"llmdkv1\n"
KEY_BYTES = 16  # at least; the keys of a second group of layers are longer
SUM_BYTES = 16
HEADER_BYTES = len(MAGIC) + 2 * SUM_BYTES
MAX_FILES = 20_000  # a folder with more is slow on some file systems


class PrefixFiles:
    """The saved blocks of one model. An unusable folder holds nothing and takes nothing."""

    def __init__(self, folder: Path, fingerprint: bytes, budget_bytes: int) -> None:
        self._root = folder
        self._folder = folder / blake2b(fingerprint, digest_size=12).hexdigest()
        self._budget_bytes = budget_bytes
        self._sizes: dict[bytes, int] = {}  # the least recently used first
        self._total = 0
        self._lock = threading.Lock()  # of the two above
        self._open()

    def __repr__(self) -> str:
        return f"<PrefixFiles {len(self._sizes)} blocks, {self._total} bytes>"

    @property
    def num_bytes(self) -> int:
        return self._total

    def budget_blocks(self, block_bytes: int) -> int:
        """How many blocks there may be."""
        return min(self._budget_bytes // (HEADER_BYTES + block_bytes), MAX_FILES)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def _open(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for other in self._root.iterdir():
                if other != self._folder:
                    shutil.rmtree(other, ignore_errors=True)
            for path in self._folder.iterdir():
                status = path.stat()
                key = _key_of(path.name)
                if key is None:
                    path.unlink()  # a write that was cut off
                else:
                    found.append((status.st_mtime, key, status.st_size))
        except OSError as error:
            log.warning("saved prefixes are not used: %s", error)
            self._budget_bytes = 0
            return
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._total += size
        self._make_room(0)

    def save(self, key: bytes, block: memoryview) -> bool:
        """Keep this block. False if the budget or the disk has no place for it."""
        if key in self._sizes:
            return True
        size = HEADER_BYTES + len(block)
        if size > self._budget_bytes:
            return False
        self._make_room(size)
        path = self._path(key)
        # Not flushed to the disk: after a power cut the checksum tells what is whole.
        temporary = path.with_suffix(".part")
        try:
            with open(  # noqa: PTH123 - the mode must hold from the first byte on
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as file:
                file.write(_header(key, block))
                file.write(block)
            temporary.replace(path)
        except OSError as error:
            log.warning("a prefix could not be saved: %s", error)
            self._budget_bytes = 0  # the disk is full or gone; don't try for each block
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        with self._lock:
            self._sizes[key] = size
            self._total += size
        return True

    def read(self, key: bytes, block_bytes: int) -> memoryview | None:
        """The block's bytes, or None. A file that is not what it should be is removed."""
        if key not in self._sizes:
            return None
        path = self._path(key)
        try:
            raw = memoryview(path.read_bytes())
        except OSError:
            return None
        head, block = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
        if len(block) != block_bytes or bytes(head) != _header(key, block):
            log.warning("the saved prefix %s is damaged and ignored", path.name)
            with self._lock:
                self._total -= self._sizes.pop(key, 0)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path, (time.time(), time.time()))
        return block

    def _make_room(self, size: int) -> None:
        while self._sizes and (
            self._total + size > self._budget_bytes or len(self._sizes) >= MAX_FILES
        ):
            with self._lock:
                key = next(iter(self._sizes))
                self._total -= self._sizes.pop(key)
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()


def _key_of(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) >= KEY_BYTES else None


def _header(key: bytes, block: memoryview) -> bytes:
    sums = (blake2b(part, digest_size=SUM_BYTES).digest() for part in (key, block))
    return MAGIC + b"".join(sums)
