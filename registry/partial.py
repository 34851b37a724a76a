"""PartialFile: a download that is not finished, on the disk, with a journal of what is there.

    partial/sha256-<key>.data    the bytes, sparse, at their final size
    partial/sha256-<key>.json    how far each part is filled, from its start
    partial/sha256-<key>.lock    held by the process that fetches it

The journal is written to a temporary name and renamed, a few times a second, after the bytes it
speaks of were handed to the system. A killed process therefore loses at most the last fraction of
a second; a power cut may lose more than the journal knows, which the final hash discovers.

Not thread-safe by itself but for `write_at` and `read_at`: `Transfer` holds its lock around
`filled` and `save`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path


class PartialFile:
    """One file on its way. `filled[i]` bytes of part i are there, counted from its start."""

    def __init__(self, stem: Path, size: int, part_bytes: int, validator: str) -> None:
        """Take up what an earlier process left, if it is of the same file; else begin anew."""
        self.data_path = stem.with_name(stem.name + ".data")
        self.journal_path = stem.with_name(stem.name + ".json")
        self.size = size
        self.validator = validator  # what the source calls this content: an ETag, a digest
        self.part_bytes, self.filled = self._taken_up(part_bytes)
        self._seeking = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self.data_path, flags, 0o644)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def __repr__(self) -> str:
        return f"<PartialFile {self.completed}/{self.size} in {len(self.filled)} parts>"

    @property
    def completed(self) -> int:
        """Bytes that are there."""
        return sum(self.filled)

    @property
    def is_complete(self) -> bool:
        """All bytes are there."""
        return self.completed == self.size

    @property
    def contiguous(self) -> int:
        """Bytes that are there without a gap, from the start of the file."""
        done = 0
        for index, filled in enumerate(self.filled):
            done += filled
            if filled < self.part_size(index):
                break
        return done

    def part_start(self, index: int) -> int:
        """Where part `index` begins in the file."""
        return index * self.part_bytes

    def part_size(self, index: int) -> int:
        """How many bytes part `index` has."""
        return min(self.part_bytes, self.size - self.part_start(index))

    def fill_up_to(self, position: int) -> None:
        """Everything before `position` is there: what a server without ranges has sent so far."""
        for index in range(len(self.filled)):
            there = min(self.part_size(index), position - self.part_start(index))
            self.filled[index] = max(self.filled[index], there)

    def write_at(self, view: memoryview, position: int) -> None:
        """All of the view, from that byte on. From any thread."""
        while view:
            written = self._write_some(view, position)
            view, position = view[written:], position + written

    def read_at(self, view: memoryview, position: int) -> int:
        """As many bytes from there as the system likes to give at once. From any thread."""
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [view], position)
        with self._seeking:
            os.lseek(self.descriptor, position, os.SEEK_SET)
            content = os.read(self.descriptor, len(view))
        view[: len(content)] = content
        return len(content)

    def _write_some(self, view: memoryview, position: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.descriptor, view, position)
        with self._seeking:  # Windows: the position is the descriptor's
            os.lseek(self.descriptor, position, os.SEEK_SET)
            return os.write(self.descriptor, view)

    def save(self) -> None:
        """Write the journal; nothing after `discard`."""
        if self.descriptor < 0:
            return
        fields = {
            "size": self.size,
            "part_bytes": self.part_bytes,
            "validator": self.validator,
            "filled": self.filled,
        }
        temporary = self.journal_path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(fields), encoding="utf-8")
            temporary.replace(self.journal_path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise  # the journal of a moment ago stays, and is true

    def close(self) -> None:
        """Close the data file. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def discard(self) -> None:
        """Delete both files."""
        self.close()
        self.data_path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)

    def _taken_up(self, part_bytes: int) -> tuple[int, list[int]]:
        fresh = [0] * -(-self.size // part_bytes)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(self.journal_path.read_bytes())
            old_part, filled = int(fields["part_bytes"]), [int(n) for n in fields["filled"]]
            is_same = fields["size"] == self.size and fields["validator"] == self.validator
            is_whole = old_part > 0 and len(filled) == -(-self.size // old_part)
            if is_same and is_whole and self.data_path.stat().st_size == self.size:
                limits = (min(old_part, self.size - i * old_part) for i in range(len(filled)))
                if all(0 <= n <= limit for n, limit in zip(filled, limits, strict=True)):
                    return old_part, filled
        self.data_path.unlink(missing_ok=True)
        return part_bytes, fresh


def journaled(stem: Path, size: int) -> int:
    """How many bytes an unfinished file of this size has, by its journal alone."""
    try:
        fields = json.loads(stem.with_name(stem.name + ".json").read_bytes())
        return sum(int(n) for n in fields["filled"]) if fields["size"] == size else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
