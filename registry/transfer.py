"""Transfer: the download of one file, in ranged parts, by a few threads, hashed as it grows.

    waiting ──take──▶ in work ──all bytes──▶ done          one part
                       │   ▲
                 failure   └─ after a pause, from the byte it had reached: nothing is rolled back

Each part is asked for by its own range at the file's first address, and the redirect followed anew:
signed links of content networks hold for one range only, and expire. A server that ignores ranges
(status 200) is read by one thread from the start, over what is already there.

The hash follows behind: a thread reads the gapless beginning of the file while the rest is still
coming, so that verification costs no time of its own. A wrong hash throws everything away once and
fetches again; the second time it is a DigestMismatch.

Ends by: all bytes there; a refusal (401, 403, 404, 410); no space; `max_failures` failures in a row
without one new byte; or `cancel`. Whatever the end, the journal has what arrived.

Threads: `run` starts and joins them; `_lock` guards `_partial.filled`, the queue and the counters.
`completed` and `stage` may be read from anywhere.
"""

from __future__ import annotations

import errno
import hashlib
import random
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import (
    AccessDenied,
    DigestMismatch,
    ModelNotFound,
    NotEnoughSpace,
    RegistryError,
    SourceUnavailable,
)
from .locking import FileLock
from .partial import PartialFile, journaled
from .settings import PullSettings
from .web import NETWORK_ERRORS, Reply, Session, origin_of

READ_BYTES = 1 << 20
MIN_READ_BYTES = 16 << 10
SAVE_PERIOD_S = 0.1  # what a killed process may lose
HASH_READ_BYTES = 1 << 20
TURN_POLL_S = 0.2
CHECKED_BYTES = (256 << 10, 4 << 20, 16 << 20)
CheckStart = Callable[[bytes, int, str], bool]  # first bytes, size, name; has it seen enough?
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What to fetch, and how to know that it is right."""

    url: str
    size: int
    name: str  # for messages
    sha256: str | None = None
    git_sha1: str | None = None  # of a small file of a repository, when there is no sha256
    headers: Mapping[str, str] = field(default_factory=dict)  # Authorization, for this origin only
    validator: str = ""  # what the source calls this content, when there is no sha256

    @property
    def key(self) -> str:
        """64 hex digits that the unfinished file goes by."""
        unnamed = f"{self.url}\n{self.validator}\n{self.size}"
        return self.sha256 or hashlib.sha256(unnamed.encode()).hexdigest()


class Cancelled(Exception):
    """`cancel` was called. What has arrived is kept."""


class _Refetch(Exception):
    """The content changed under us: nothing of it can be used."""


class Transfer:
    """One run of one download."""

    def __init__(
        self,
        file: RemoteFile,
        stem: Path,
        settings: PullSettings,
        budget: Budget | None = None,
        check: CheckStart | None = None,
    ) -> None:
        """`check` sees the file's first bytes before the rest is fetched, and may refuse it."""
        self.file = file
        self.stage = "pulling"  # then "verifying"
        self._stem = stem
        self._check = check
        self._settings = settings
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)  # notified when bytes arrive, or at the end
        # All below is guarded by _lock.
        self._partial: PartialFile | None = None
        self._waiting: deque[int] = deque()
        self._num_in_work = 0
        self._failures = 0  # in a row, over all parts, without a new byte
        self._error: BaseException | None = None
        self._serial: int | None = None  # the thread that reads a server without ranges
        self._saved_at = 0.0
        self._most = 0  # the highest count of bytes that was ever saved
        self._sessions: list[Session] = []
        self._budget = budget or Budget(settings.rate_limit)

    @property
    def completed(self) -> int:
        """Bytes that have arrived and stand in the journal, earlier runs included.

        Never falls, not even in the eyes of one who sees this process killed and the next one
        take over.
        """
        with self._lock:
            return self._most

    def cancel(self) -> None:
        """Make `run` end with Cancelled soon. From any thread."""
        self._stop.set()
        with self._lock:
            sessions = list(self._sessions)
            self._grown.notify_all()
        for session in sessions:
            session.abort()

    @contextmanager
    def its_turn(self) -> Iterator[None]:
        """Wait while another process fetches the same file, showing its progress as ours.

        Raises Cancelled.
        """
        lock = FileLock(self._stem.with_name(self._stem.name + ".lock"))
        while not lock.take():
            completed = journaled(self._stem, self.file.size)
            with self._lock:
                self._most = max(self._most, completed)
            if self._stop.wait(TURN_POLL_S):
                raise Cancelled
        try:
            yield
        finally:
            lock.path.unlink(missing_ok=True)  # who waits for it makes another, and finds the blob
            lock.release()

    def run(self) -> tuple[Path, str]:
        """Fetch and verify. Blocking. Returns the finished file and its sha256.

        Raises a RegistryError or Cancelled; OSError if the disk fails.
        """
        last: DigestMismatch | None = None
        for _ in range(2):
            try:
                return self._attempt()
            except DigestMismatch as mismatch:
                last = mismatch
            except _Refetch:
                last = None
        raise last or SourceUnavailable(f"{self.file.name} keeps changing at its source")

    # ------------------------------------------------------------------ one attempt

    def _attempt(self) -> tuple[Path, str]:
        self._begin()
        partial = self._partial
        assert partial is not None
        try:
            self._check_start(partial)
        except BaseException:
            self._close(partial)
            raise
        hasher = _FollowingHash(self, partial)
        threads = [
            threading.Thread(target=self._work, args=(number,), name=f"pull-{number}", daemon=True)
            for number in range(min(self._settings.connections, max(1, len(self._waiting))))
        ]
        try:
            for thread in [*threads, hasher.thread]:
                thread.start()
            for thread in threads:
                thread.join()
            self.stage = "verifying"
            self._end_of_growth()
            hasher.thread.join()
        finally:
            self._close(partial)
        self._raise_error(hasher)
        return self._checked(partial, hasher.hexdigest())

    def _close(self, partial: PartialFile) -> None:
        """A full disk takes no newer journal either; that must not hide what went wrong."""
        try:
            partial.save()
        except OSError as error:
            self._error = self._error or error
        finally:
            partial.close()

    def _begin(self) -> None:
        file, settings = self.file, self._settings
        validator = file.sha256 or file.validator
        self.stage = "pulling"
        self._error, self._failures, self._serial, self._num_in_work = None, 0, None, 0
        with self._lock:
            self._partial = PartialFile(self._stem, file.size, settings.part_bytes, validator)
            self._most = max(self._most, self._partial.completed)
            self._waiting = deque(
                index
                for index, filled in enumerate(self._partial.filled)
                if filled < self._partial.part_size(index)
            )

    def _check_start(self, partial: PartialFile) -> None:
        """Fetch the first bytes, more and more of them, until the check has seen enough.

        They count like all others: nothing is fetched twice. Where that does not go smoothly the
        check is left out, and the threads deal with the source's troubles.
        """
        if self._check is None or not partial.filled:
            return
        with Session(self._settings) as session:
            with self._lock:
                self._sessions.append(session)
            for goal in CHECKED_BYTES:
                goal = min(goal, partial.part_size(0))
                if partial.filled[0] < goal and not self._fetch_start(session, partial, goal):
                    return
                with partial.data_path.open("rb") as file:
                    data = file.read(goal)
                try:
                    if self._check(data, self.file.size, self.file.name):
                        return
                except RegistryError:
                    partial.discard()
                    raise

    def _fetch_start(self, session: Session, partial: PartialFile, end: int) -> bool:
        """Bring the first part up to `end`; False where the source has other ideas."""
        start = partial.filled[0]
        try:
            reply = session.get(
                self.file.url, {**self.file.headers, "Range": f"bytes={start}-{end - 1}"}
            )
            if reply.status != 206:
                return False
            self._check_reply(reply, start)
            self._read_range(reply, 0, start, end)
        except (*NETWORK_ERRORS, SourceUnavailable, _Refetch):
            if self._stop.is_set():
                raise Cancelled from None
            return False
        return True

    def _raise_error(self, hasher: _FollowingHash) -> None:
        if self._stop.is_set():
            raise Cancelled
        error = self._error or hasher.error
        if isinstance(error, _Refetch) and self._partial is not None:
            self._partial.discard()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(self._stem.parent, self.file.size - self._most) from error
        if error is not None:
            raise error

    def _checked(self, partial: PartialFile, found: str) -> tuple[Path, str]:
        if self.file.sha256 is not None and found != self.file.sha256:
            partial.discard()
            raise DigestMismatch(self.file.sha256, found, self.file.name)
        partial.journal_path.unlink(missing_ok=True)
        return partial.data_path, found

    def _end_of_growth(self) -> None:
        with self._lock:
            if self._partial is not None and not self._partial.is_complete and not self._error:
                self._error = SourceUnavailable(f"{self.file.name} did not arrive whole")
            self._grown.notify_all()

    # ------------------------------------------------------------------ the threads

    def _work(self, number: int) -> None:
        """Fetch parts until none is left or something ends the transfer."""
        with Session(self._settings) as session:
            with self._lock:
                self._sessions.append(session)
            while (index := self._take(number)) is not None:
                try:
                    self._fetch_part(session, index, number)
                except BaseException as error:
                    session.close()
                    pause = self._note_failure(index, error)
                    if pause is not None:
                        self._stop.wait(pause)

    def _take(self, number: int) -> int | None:
        """The next part to fetch. Waits while others may still give one back."""
        with self._lock:
            while not self._stop.is_set() and self._error is None:
                may_work = self._serial in (None, number)
                if may_work and self._waiting:
                    self._num_in_work += 1
                    return self._waiting.popleft()
                if not self._num_in_work and not self._waiting:
                    return None
                self._grown.wait(0.5)
            return None

    def _give_back(self, index: int) -> None:
        """Under the lock: the part is done, or waits again."""
        assert self._partial is not None
        self._num_in_work -= 1
        if self._partial.filled[index] < self._partial.part_size(index):
            self._waiting.appendleft(index)
        elif self._serial is not None:
            done = self._partial
            self._waiting = deque(i for i in self._waiting if done.filled[i] < done.part_size(i))
        self._grown.notify_all()

    def _fetch_part(self, session: Session, index: int, number: int) -> None:
        partial = self._partial
        assert partial is not None
        with self._lock:
            start = partial.part_start(index) + partial.filled[index]
        end = partial.part_start(index) + partial.part_size(index)
        if start == end:
            with self._lock:
                self._give_back(index)
            return
        headers = {**self.file.headers, "Range": f"bytes={start}-{end - 1}"}
        reply = session.get(self.file.url, headers)
        self._check_reply(reply, start)
        if reply.status == 206:
            self._read_range(reply, index, start, end)
        elif self._become_serial(number):
            self._read_all(reply)
            session.close()
        else:
            session.close()
        with self._lock:
            self._give_back(index)

    def _check_reply(self, reply: Reply, start: int) -> None:
        """Raises unless the body is a piece of the right file."""
        raise_for_status(reply, self.file.name)
        length = reply.headers.get("content-length", "")
        if reply.status == 200 and length.isdigit() and int(length) != self.file.size:
            raise _Refetch
        linked = reply.first_headers.get("x-linked-etag", "").strip('"')
        if self.file.sha256 and len(linked) == 64 and linked != self.file.sha256:
            raise _Refetch
        if (
            not self.file.sha256
            and self.file.validator
            and validator_of(reply)
            not in (
                "",
                self.file.validator,
            )
        ):
            raise _Refetch
        if reply.status == 206:
            match = _CONTENT_RANGE.match(reply.headers.get("content-range", ""))
            if not match or int(match[1]) != start or int(match[3]) != self.file.size:
                raise SourceUnavailable(
                    f"{origin_of(reply.url)} sent another part of {self.file.name} than was asked"
                )

    def _read_range(self, reply: Reply, index: int, start: int, end: int) -> None:
        partial = self._partial
        assert partial is not None
        position = start
        buffer = memoryview(bytearray(self._read_bytes))
        while position < end:
            piece = self._read(reply, buffer[: end - position])
            partial.write_at(piece, position)
            position += len(piece)
            with self._lock:
                partial.filled[index] = position - partial.part_start(index)
                self._note_growth()
        reply.body.close()  # frees the connection for the next range

    def _read_all(self, reply: Reply) -> None:
        partial = self._partial
        assert partial is not None
        position = 0
        buffer = memoryview(bytearray(self._read_bytes))
        while position < partial.size:
            piece = self._read(reply, buffer[: partial.size - position])
            partial.write_at(piece, position)
            position += len(piece)
            with self._lock:
                before = partial.completed
                partial.fill_up_to(position)
                if partial.completed > before:
                    self._note_growth()

    def _read(self, reply: Reply, buffer: memoryview) -> memoryview:
        """The next bytes of the body, in the buffer's beginning."""
        size = reply.read_into(buffer)
        if self._stop.is_set():
            raise Cancelled
        if not size:
            raise ConnectionError("the connection was closed in the middle")
        self._budget.spend(size, self._stop)
        return buffer[:size]

    @property
    def _read_bytes(self) -> int:
        """Less at a time under a cap, so that the waits between are short."""
        rate = self._settings.rate_limit
        return max(MIN_READ_BYTES, min(READ_BYTES, rate // 20)) if rate else READ_BYTES

    def _become_serial(self, number: int) -> bool:
        with self._lock:
            if self._serial is None:
                self._serial = number
            return self._serial == number

    def _note_growth(self) -> None:
        """Under the lock: new bytes are in the file."""
        self._failures = 0
        now = time.monotonic()
        if now - self._saved_at >= SAVE_PERIOD_S and self._partial is not None:
            self._saved_at = now
            self._partial.save()
            self._most = max(self._most, self._partial.completed)
            self._grown.notify_all()  # not for each chunk, which would keep the threads switching

    def _note_failure(self, index: int, error: BaseException) -> float | None:
        """What a failed part means: a pause in seconds before going on, or None for the end."""
        with self._lock:
            self._give_back(index)
            self._failures += 1
            if isinstance(error, Busy):
                if self._failures <= self._settings.max_failures * 4:
                    return min(error.delay_s, self._settings.max_retry_after_s)
                error = SourceUnavailable(str(error))
            is_passing = isinstance(error, (*NETWORK_ERRORS, SourceUnavailable))
            if _is_disk_error(error):
                is_passing = False
            if is_passing and self._failures <= self._settings.max_failures:
                doubled = self._settings.backoff_s * 2.0 ** (self._failures - 1)
                return min(self._settings.max_backoff_s, doubled) * random.uniform(0.5, 1.0)
            if is_passing:
                error = SourceUnavailable(
                    f"{origin_of(self.file.url)} stopped serving {self.file.name}: {error}"
                )
            self._error = self._error or error
            self._grown.notify_all()
            return None

    def wait_for_growth(self, known: int) -> tuple[int, bool]:
        """Wait until more than `known` bytes stand without a gap; and whether that is the end."""
        with self._lock:
            assert self._partial is not None
            while not self._stop.is_set() and self._error is None:
                there = self._partial.contiguous
                if there == self._partial.size:
                    return there, True
                if there > known:
                    return there, False
                self._grown.wait(0.5)
            return known, True


class _FollowingHash:
    """The thread that hashes the file behind the downloads."""

    def __init__(self, transfer: Transfer, partial: PartialFile) -> None:
        self._transfer = transfer
        self._partial = partial
        self._digest = hashlib.sha256()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="pull-hash", daemon=True)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _run(self) -> None:
        try:
            done, is_over = 0, False
            buffer = memoryview(bytearray(HASH_READ_BYTES))
            while not is_over:
                there, is_over = self._transfer.wait_for_growth(done)
                while done < there:
                    size = self._partial.read_at(buffer[: there - done], done)
                    if not size:
                        raise OSError("the unfinished file became shorter")
                    self._digest.update(buffer[:size])
                    done += size
        except BaseException as error:
            self.error = error


class Budget:
    """A bandwidth cap that all threads share: each chunk moves the time when the next may come."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, size: int, stop: threading.Event) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / self._bytes_per_s
        stop.wait(start - now)


class Busy(SourceUnavailable):
    """The server asks to come back after `delay_s` seconds."""

    def __init__(self, message: str, delay_s: float) -> None:
        super().__init__(message)
        self.delay_s = delay_s


def raise_for_status(reply: Reply, what: str) -> None:
    """Raises what a status other than 200 and 206 means for the one who asked for `what`."""
    if reply.status in (200, 206):
        return
    host = origin_of(reply.url)
    said = reply.headers.get("x-error-message", "")[:300]
    suffix = f": {said}" if said else ""
    if reply.status in (401, 403):
        raise AccessDenied(f"{host} denies access to {what} (status {reply.status}){suffix}")
    if reply.status in (404, 410):
        raise ModelNotFound(what, f"{what} does not exist at {host}{suffix}")
    if reply.status in (429, 503):
        raise Busy(f"{host} is busy (status {reply.status}){suffix}", _delay_of(reply))
    if reply.status == 416:
        raise _Refetch
    raise SourceUnavailable(f"{host} answered {what} with status {reply.status}{suffix}")


def validator_of(reply: Reply) -> str:
    """What the first host calls the content: the hub's digest, else its ETag."""
    tag = reply.first_headers.get("x-linked-etag") or reply.first_headers.get("etag") or ""
    return tag.removeprefix("W/").strip('"')


def no_space(folder: Path, needed: int) -> RegistryError:
    """The error that names both sizes."""
    return NotEnoughSpace(needed, shutil.disk_usage(folder).free, str(folder))


def _delay_of(reply: Reply) -> float:
    """Retry-After, or the hub's `ratelimit: "api";r=0;t=55`; else one second."""
    plain = reply.headers.get("retry-after", "").strip()
    match = re.search(r"\bt=(\d+)", reply.headers.get("ratelimit", ""))
    if plain.isdigit():
        return float(plain)
    return float(match[1]) if match else 1.0


def _is_disk_error(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.EFBIG,
    )
