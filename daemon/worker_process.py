"""WorkerProcess: the daemon's end of one worker. Spawn, talk, notice death, stop.

    start ──▶ LOADING ──Ready──▶ READY ──stop──▶ DRAINING ──▶ DEAD
                 └──Failed, silence, exit──▶ DEAD ◀──exit, silence───┘

Death is seen at once: the end of the child's stdout. A ready child that is alive but says nothing
for `silence_s` (it sends Stats every second, from a thread of its own) is taken for hung and
killed; one that was stopped by a signal, much sooner; one whose step does not end, after
`STEP_LIMIT_S`. In each case every open stream gets WorkerDied, with the last lines of the log.

The child ends by itself when its stdin ends, and on Linux by a signal of the kernel when the daemon
dies; so a daemon that is killed leaves no worker.

A reader of a stream that is slow gets merged deltas: memory is bounded by the answer's length, and
nobody makes the others wait. What comes while a reader waits is offered to its Listener first, at
once, and wakes nobody.

Owner: itself, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec
import psutil

from ..backend import protocol
from ..backend.protocol import (
    Cancel,
    Delta,
    Embed,
    Embedded,
    Failed,
    Generate,
    Load,
    Loading,
    Ready,
    SetKVBudget,
    Shutdown,
    Started,
    Stats,
    Step,
    Tokenize,
    Tokenized,
)
from .child import Child, adopt, spawn
from .errors import DaemonError, DiedInLoad, LoadFailed, NoMemory, RequestFailed, WorkerDied
from .listener import Listener
from .moment import Moment

log = logging.getLogger("llmd.worker_process")

MAX_LINE_BYTES = 2**28  # a prompt of a million ids is 8 MB; beyond this the child is out of order
LOG_LINES_KEPT = 50
LOG_LINES_TOLD = 3  # of them, in an error
SILENCE_S = 15.0  # without a sign of life; a machine that swaps can be as slow as that
STEP_LIMIT_S = 600.0  # of one engine step; the longest prompts on the slowest machines take less
STOPPED_SILENCE_S = 3.0  # the same for a process that the system says is stopped
LAST_WORDS_S = 0.2  # how long the end of a dead child's log is waited for
KILL_AFTER_S = 5.0  # from asking a child to end to killing it

Answer = Started | Delta | Embedded | Tokenized
Progress = Callable[[float, str], None]


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class _Mailbox:
    """What has come for one request and was not read yet."""

    __slots__ = ("_items", "_listener", "_reader", "_taker", "is_over")

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self._taker: Listener | None = None  # that, while the reader has had all and waits for more
        self._items: deque[Answer | DaemonError] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for the next answer
        self.is_over = False  # nothing more will come from the worker

    def put(self, item: Answer | DaemonError) -> None:
        """For the reader, behind what is here already."""
        last = self._items[-1] if self._items else None
        if isinstance(item, Delta) and isinstance(last, Delta) and _can_merge(last, item):
            self._items[-1] = protocol.merged(last, item)
        else:
            self._items.append(item)
        is_final = isinstance(item, Delta) and item.finished is not None
        self.is_over = self.is_over or is_final or not isinstance(item, Started | Delta)
        self._taker = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def put_delta(self, delta: Delta, came: Moment) -> None:
        """The same; but a listener whose reader waits has it at once, unless it is the last."""
        if self._taker is not None and delta.finished is None:
            try:
                if self._taker.take(delta, came):
                    return
            except Exception:
                log.exception("a listener failed; the deltas go to its reader")
                self._listener = None
        self.put(delta)

    async def get(self) -> Answer:
        """The next answer. Raises the error that came instead."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            self._taker = self._listener
            await self._reader
        item = self._items.popleft()
        if isinstance(item, DaemonError):
            raise item
        return item


def _can_merge(first: Delta, second: Delta) -> bool:
    """Joined, they read the same: within a delta thinking comes before text, then calls."""
    return not first.tool_calls and not (first.text and second.thinking)


class WorkerProcess:
    """One child. Made by `start`, which returns when the model is ready."""

    def __init__(self, name: str, child: Child, silence_s: float) -> None:
        self.name = name
        self._child = child
        self._silence_s = silence_s
        # All the mutable state.
        self.state = State.LOADING
        self.ready: Ready | None = None
        self.stats = Stats()
        self.on_stats: Callable[[], None] | None = None  # told when `stats` has changed
        self._mailboxes: dict[str, _Mailbox] = {}
        self._sequences: dict[str, str] = {}  # the caller's ids of Generates, and the worker's
        self._log_lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._last_sign = time.monotonic()
        self._has_spoken = False  # a first event came: it has read the Load
        self._failure: DaemonError | None = None  # what a Failed without id said
        self._is_loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._on_loading: list[Progress] = []
        self._ids = itertools.count()
        self._died = asyncio.Event()
        self._log_task = asyncio.create_task(self._read_log(), name=f"{name}: log")
        self._tasks = [
            asyncio.create_task(self._read_events(), name=f"{name}: events"),
            self._log_task,
            asyncio.create_task(self._watch(), name=f"{name}: watchdog"),
        ]

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name} {self.state.value}, {len(self._mailboxes)} open>"

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def num_open(self) -> int:
        """Requests that wait for something from this worker."""
        return len(self._mailboxes)

    @classmethod
    async def start(
        cls,
        load: Load,
        command: Sequence[str],
        on_loading: Progress | None = None,
        load_timeout_s: float = 300.0,
        silence_s: float = SILENCE_S,
        spare: subprocess.Popen[bytes] | None = None,
    ) -> WorkerProcess:
        """Spawn, load, return when ready. `spare` is taken instead, if it lives to read the Load.

        `load_timeout_s` bounds the time without any progress. Raises LoadFailed or NoMemory; no
        child is left then, nor when this is cancelled.
        """
        limit = MAX_LINE_BYTES
        child = await (spawn(command, limit) if spare is None else adopt(spare, limit))
        worker = cls(load.name, child, silence_s)
        if on_loading is not None:
            worker._on_loading.append(on_loading)
        try:
            await worker._send(load)
            await worker._loaded(load_timeout_s)
        except BaseException as error:
            await worker.kill()
            if spare is None or worker._has_spoken or not isinstance(error, DiedInLoad):
                raise
            log.info("the spare worker had died; another is started")
            return await cls.start(load, command, on_loading, load_timeout_s, silence_s)
        return worker

    async def _loaded(self, timeout_s: float) -> None:
        progressed_at, latest = time.monotonic(), -1.0
        fractions = [0.0]
        self._on_loading.append(lambda fraction, stage: fractions.append(fraction))
        while not self._is_loaded.done():
            await asyncio.wait([self._is_loaded], timeout=0.2)
            if fractions[-1] > latest:
                progressed_at, latest = time.monotonic(), fractions[-1]
            elif time.monotonic() - progressed_at > timeout_s > 0:
                raise LoadFailed(
                    f"loading {self.name} made no progress for {timeout_s:g} s{self._last_words()}"
                )
        self.ready = self._is_loaded.result()
        self.state = State.READY
        self._on_loading.clear()

    # ---------------------------------------------------------------- requests

    async def generate(
        self, request: Generate, listener: Listener | None = None
    ) -> AsyncGenerator[Started | Delta, None]:
        """Started, then Deltas up to the one with `finished`. Closing it cancels the sequence.

        The request's id is replaced by one of this worker's. `listener` is offered each delta but
        the last that comes while the reader waits. Raises RequestFailed, WorkerDied.
        """
        own = msgspec.structs.replace(request, id=f"g{next(self._ids)}")
        async with self._mailbox(own, listener) as mailbox:
            self._sequences[request.id] = own.id
            try:
                while True:
                    answer = await mailbox.get()
                    assert isinstance(answer, Started | Delta), answer
                    yield answer
                    if isinstance(answer, Delta) and answer.finished is not None:
                        return
            finally:
                self._sequences.pop(request.id, None)

    def cancel(self, id: str) -> None:
        """End the sequence of this request: its stream goes on to a final delta, "abort"."""
        own_id = self._sequences.get(id)
        if own_id is not None:
            self._write(Cancel(own_id))

    async def embed(self, request: Embed) -> Embedded:
        """Raises RequestFailed, WorkerDied."""
        request = msgspec.structs.replace(request, id=f"e{next(self._ids)}")
        async with self._mailbox(request) as mailbox:
            answer = await mailbox.get()
        assert isinstance(answer, Embedded), answer
        return answer

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Raises RequestFailed, WorkerDied."""
        request = msgspec.structs.replace(request, id=f"t{next(self._ids)}")
        async with self._mailbox(request) as mailbox:
            answer = await mailbox.get()
        assert isinstance(answer, Tokenized), answer
        return answer

    async def set_kv_budget(self, budget_bytes: int) -> None:
        """The worker's KV memory may be at most this."""
        await self._send(SetKVBudget(budget_bytes))

    @contextlib.asynccontextmanager
    async def _mailbox(
        self, request: Generate | Embed | Tokenize, listener: Listener | None = None
    ) -> AsyncIterator[_Mailbox]:
        if self.state is State.DEAD:
            raise self.death()
        mailbox = self._mailboxes[request.id] = _Mailbox(listener)
        try:
            await self._send(request)
            yield mailbox
        finally:
            del self._mailboxes[request.id]
            if not mailbox.is_over and isinstance(request, Generate):
                self._write(Cancel(request.id))

    async def _send(self, request: protocol.Request) -> None:
        self._write(request)
        with contextlib.suppress(ConnectionError):  # the end of its stdout tells what happened
            await self._child.stdin.drain()

    def _write(self, request: protocol.Request) -> None:
        if not self._child.stdin.is_closing():
            self._child.stdin.write(protocol.encode(request))

    # ------------------------------------------------------------------ events

    async def _read_events(self) -> None:
        try:
            async for line in self._child.stdout:
                came = Moment()
                self._last_sign = came.monotonic
                self._has_spoken = True
                self._take(protocol.decode_event(line), came)
        except (protocol.ProtocolError, ValueError) as error:
            log.error("%s speaks out of order: %s", self.name, error)
        finally:
            self._kill_now()
            await self._child.wait()
            await asyncio.wait([self._log_task], timeout=LAST_WORDS_S)
            self._end()

    def _take(self, event: protocol.Event, came: Moment) -> None:
        if isinstance(event, Step):
            for delta in event.deltas:
                mailbox = self._mailboxes.get(delta.id)
                if mailbox is not None:
                    mailbox.put_delta(delta, came)
            if event.stats is not None:
                self._take_stats(event.stats)
        elif isinstance(event, Stats):
            self._take_stats(event)
        elif isinstance(event, Started | Embedded | Tokenized):
            self._deliver(event.id, event)
        elif isinstance(event, Loading):
            for tell in list(self._on_loading):
                tell(event.fraction, event.stage)
        elif isinstance(event, Ready):
            if not self._is_loaded.done():
                self._is_loaded.set_result(event)
        else:
            self._fail(event)

    def _take_stats(self, stats: Stats) -> None:
        self.stats = stats
        if self.on_stats is not None:
            self.on_stats()

    def _fail(self, event: Failed) -> None:
        if event.id is not None:
            self._deliver(event.id, RequestFailed(event.code, event.message))
        elif self.state is State.LOADING:
            kind = NoMemory if event.code == "no_memory" else LoadFailed
            self._failure = kind(event.message)
        else:
            log.error("%s: %s: %s", self.name, event.code, event.message)

    def _deliver(self, id: str, item: Answer | DaemonError) -> None:
        mailbox = self._mailboxes.get(id)
        if mailbox is not None:  # else its reader has left
            mailbox.put(item)

    def _end(self) -> None:
        """The child is gone: tell everyone who waits."""
        self.state = State.DEAD
        death = self.death()
        for mailbox in list(self._mailboxes.values()):
            if not mailbox.is_over:
                mailbox.put(death)
        if not self._is_loaded.done():
            self._is_loaded.set_exception(self._failure or DiedInLoad(str(death)))
            self._is_loaded.exception()  # seen: whoever waits gets it, and maybe nobody does
        self._died.set()

    def death(self) -> DaemonError:
        """What ended it, as those are told who waited for its answers."""
        if self._failure is not None:
            return self._failure
        code = self._child.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerDied(
            f"the worker of {self.name} ended unexpectedly ({how}){self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = [line for line in self._log_lines if not line.startswith("INFO ")]
        lines = lines[-LOG_LINES_TOLD:]
        return f"; its log ends: {' | '.join(lines)}" if lines else ""

    async def _read_log(self) -> None:
        async for raw in self._child.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                self._log_lines.append(line)
                log.info("%s: %s", self.name, line)

    async def _watch(self) -> None:
        """A ready child without a sign of life is as good as dead."""
        while True:
            await asyncio.sleep(min(self._silence_s / 4, STOPPED_SILENCE_S / 2))
            if self.state is not State.LOADING and self._is_hung():
                await asyncio.sleep(0.05)  # if it was us who slept, its lines are read now
                if self._is_hung():
                    self._log_lines.append(f"{self._symptom()}; killed")
                    log.error("%s: %s", self.name, self._log_lines[-1])
                    self._kill_now()
                    return

    def _is_hung(self) -> bool:
        silent_s = time.monotonic() - self._last_sign
        if silent_s > self._silence_s or self.stats.step_s > STEP_LIMIT_S:
            return True
        return silent_s > STOPPED_SILENCE_S and _is_stopped(self.pid)

    def _symptom(self) -> str:
        if self.stats.step_s > STEP_LIMIT_S:
            return f"a step did not end within {self.stats.step_s:.0f} s"
        return f"no sign of life for {time.monotonic() - self._last_sign:.1f} s"

    # -------------------------------------------------------------------- end

    async def wait_dead(self) -> None:
        """Return when the child is gone."""
        await self._died.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Ask it to end: what runs may go on for `drain_s`, then ends with reason "abort"."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING
            await self._send(Shutdown(drain_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._died.wait(), drain_s + KILL_AFTER_S)
        await self.kill()

    async def kill(self) -> None:
        """End it now. Returns when it is gone and its tasks are over."""
        self._kill_now()
        await self._died.wait()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._child.close()

    def _kill_now(self) -> None:
        if self._child.returncode is None:
            # Not Process.kill: it polls, and so takes the exit code from asyncio's watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.state is not State.READY or self.ready is not None
        assert self.state is not State.DEAD or self._died.is_set()


def _is_stopped(pid: int) -> bool:
    """Whether the system says that the process does not run."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False  # gone, which the end of its stdout tells
