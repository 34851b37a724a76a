"""The worker process: messages in, an engine step, messages out.

Two threads and one queue. The *reader* turns lines into prompts (template, tokenize: a long prompt
must not stall those that decode) and answers what needs no engine. The *engine thread*, the main
one, owns the Engine and the streams; it steps while there is work and sleeps in the queue when
there is none. A third, the *pulse*, says once a second that the process lives and how long the
present step has taken, so that a long step is not taken for a hang.

    stdin ──▶ reader ──Prompt, Cancel, …──▶ inbox ──▶ engine thread ──Step──▶ stdout
                 └───────────── Started, Tokenized, Failed ────────────────────▲

A line is written by one `write` under a lock, so lines of the two threads don't mix. The end of
stdin ends the process: a dead daemon leaves no worker behind.
"""

from __future__ import annotations

import gc
import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

import msgspec
import psutil

from . import protocol
from .assembly import Model, load_model
from .embedder import EmbeddingJob
from .engine.engine import Engine, EngineRequest, SequenceOutput, Unservable
from .kv_memory import Restored
from .prompt import Prompt, RequestRefused
from .protocol import (
    Cancel,
    Delta,
    Embed,
    Failed,
    Finished,
    Generate,
    Load,
    Loading,
    SetKVBudget,
    Shutdown,
    Started,
    Stats,
    Step,
    Tokenize,
)
from .stream import Stream, is_silent

log = logging.getLogger("llmd.worker")

HEARTBEAT_S = 1.0  # the sign of life that the daemon's watchdog expects
STATS_PERIOD_S = 0.25  # what `ps --watch` can show
RATE_WINDOW_S = 5.0  # tokens_per_s is over the last this many seconds
HELD_S = 60.0  # a prompt that the KV budget does not allow yet is refused after this long


class Output:
    """The way to the daemon. Thread-safe; a closed pipe is remembered, not raised."""

    def __init__(self, messages: BinaryIO) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self.is_closed = False

    def send(self, event: protocol.Event) -> None:
        line = memoryview(protocol.encode(event))
        with self._lock:
            try:
                while line and not self.is_closed:
                    line = line[self._messages.write(line) or 0 :]
            except (BrokenPipeError, ValueError):
                self.is_closed = True  # the daemon is gone; the end of stdin follows


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """stdin ended."""


Item = Prompt | Restored | EmbeddingJob | Cancel | SetKVBudget | Shutdown | EndOfInput
Inbox = queue.SimpleQueue[Item]


def serve(requests: BinaryIO, messages: BinaryIO) -> int:
    """Load the model that the first line names, then serve it until stdin ends."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C in a terminal is the daemon's to handle
    output = Output(messages)
    line = requests.readline()
    if not line:
        return 0
    try:
        load = protocol.decode_request(line)
        if not isinstance(load, Load):
            raise protocol.ProtocolError(f"Load expected first, {type(load).__name__} came")
        model = _load(load, output)
    except RequestRefused as error:
        output.send(Failed(None, error.code, str(error)))
        return 1
    except Exception as error:
        log.exception("loading failed")
        output.send(Failed(None, "internal", f"loading failed: {error}"))
        return 1
    output.send(model.ready)
    worker = Worker(model, output)
    Reader(requests, model, worker.inbox, output).start()
    threading.Thread(target=worker.beat, name="pulse", daemon=True).start()
    return worker.run()


def _load(load: Load, output: Output) -> Model:
    """Load with signs of life: a weight that takes long to read must not look like a hang."""
    done = threading.Event()
    latest = [Loading(0.0, "starting")]

    def progress(fraction: float, stage: str) -> None:
        latest[0] = Loading(max(fraction, latest[0].fraction), stage)
        output.send(latest[0])

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            output.send(latest[0])

    threading.Thread(target=beat, name="loading-heartbeat", daemon=True).start()
    try:
        return load_model(load, progress)
    finally:
        done.set()


class Reader(threading.Thread):
    """Turns lines into work for the engine thread, and answers what needs none of it."""

    def __init__(self, requests: BinaryIO, model: Model, inbox: Inbox, output: Output) -> None:
        super().__init__(name="reader", daemon=True)
        self._requests = requests
        self._model = model
        self._inbox = inbox
        self._output = output

    def run(self) -> None:
        for line in self._requests:
            try:
                self._handle(protocol.decode_request(line))
            except protocol.ProtocolError as error:
                log.error("a line was not understood: %s", error)
                self._output.send(Failed(None, "bad_request", str(error)))
        self._inbox.put(EndOfInput())

    def _handle(self, request: protocol.Request) -> None:
        if isinstance(request, Generate | Embed | Tokenize):
            try:
                self._prepare(request)
            except RequestRefused as error:
                self._output.send(Failed(request.id, error.code, str(error)))
            except Exception as error:
                log.exception("request %s could not be prepared", request.id)
                self._output.send(
                    Failed(request.id, "internal", f"{type(error).__name__}: {error}")
                )
        elif isinstance(request, Load):
            raise protocol.ProtocolError("a second Load came")
        else:
            self._inbox.put(request)

    def _prepare(self, request: Generate | Embed | Tokenize) -> None:
        if isinstance(request, Tokenize):
            self._output.send(self._model.tokenize(request))
            return
        if isinstance(request, Embed):
            self._inbox.put(self._model.embedder.prepare(request))
            return
        self._model.check_adapter(request.adapter)
        prompt = self._model.prompts.build(request)
        if request.render_only:
            self._output.send(_started(prompt, rendered=prompt.rendered))
            self._output.send(Step([Delta(request.id, finished=Finished("stop"))]))
            return
        restored = self._model.memory.saved_for(
            [*prompt.prompt_ids, *request.output_ids], request.adapter, request.cache_salt
        )
        if restored is not None:
            self._inbox.put(restored)
        self._inbox.put(prompt)


def _started(prompt: Prompt, rendered: str = "") -> Started:
    return Started(
        id=prompt.request.id,
        prompt_ids=list(prompt.prompt_ids),
        seed=prompt.seed,
        max_tokens=prompt.max_tokens,
        num_ctx=prompt.num_ctx,
        truncated_tokens=prompt.truncated_tokens,
        truncated_messages=prompt.truncated_messages,
        rendered=rendered,
    )


class Running:
    """One sequence from admission to its final delta.

    A stream may outlive an engine sequence: when the window is full and `shift` is allowed, the
    newest half goes on as a new sequence, under the same id.
    """

    def __init__(self, prompt: Prompt, stream: Stream) -> None:
        self.prompt = prompt
        self.stream = stream
        # Tokens known to the engine's present sequence, and how many were drawn in all.
        self.token_ids: list[int] = [*prompt.prompt_ids, *prompt.request.output_ids]
        self.num_output_tokens = len(prompt.request.output_ids)

    def append(self, ids: tuple[int, ...]) -> None:
        self.token_ids.extend(ids)
        self.num_output_tokens += len(ids)

    @property
    def is_window_full(self) -> bool:
        return len(self.token_ids) >= self.prompt.num_ctx

    def shifted(self) -> list[int]:
        """The tokens that stay when the window slides: the first num_keep, the newest half."""
        keep = min(max(self.prompt.request.num_keep, 0), self.prompt.num_ctx // 4)
        tail = (len(self.token_ids) - keep) // 2
        return [*self.token_ids[:keep], *self.token_ids[-max(tail, 1) :]]


class Worker:
    """The engine thread's side. All state here is its own; `beat` only reads some of it."""

    def __init__(self, model: Model, output: Output, clock: Callable[[], float] = time.monotonic):
        self.inbox: Inbox = queue.SimpleQueue()
        self._model = model
        self._engine: Engine = model.engine
        self._output = output
        self._clock = clock
        self._process = psutil.Process()
        self._memory = model.memory
        self._embedder = model.embedder
        self._running: dict[str, Running] = {}
        self._held: dict[str, tuple[Prompt, float]] = {}  # wait for KV memory, since when
        self._step_began: float | None = None
        self._last_stats = Stats()
        self._deadline: float | None = None  # set by Shutdown: nothing runs on after it
        self._has_ended = False
        self._stats_sent_at = 0.0
        self._last_counts: tuple[int, ...] = ()
        self._rates: deque[tuple[float, int]] = deque()

    def __repr__(self) -> str:
        return f"<Worker {len(self._running)} running | {self._engine!r}>"

    def run(self) -> int:
        """Serve until stdin ends or a Shutdown is done. Returns the exit code."""
        gc.collect()
        gc.freeze()  # the model stays; don't walk it again
        gc.disable()  # a collection in the step loop is a hiccup of every stream
        while not self._has_ended:
            self._take_in()
            if self._engine.has_work:
                self._step()
            for event in self._embedder.step():
                self._output.send(event)
            self._send_stats_if_due()
        self._model.close()
        return 0

    def beat(self) -> None:
        """The pulse's thread: a sign of life each second, whatever the engine thread is doing."""
        while not self._output.is_closed:
            time.sleep(HEARTBEAT_S)
            began = self._step_began
            step_s = 0.0 if began is None else self._clock() - began
            rss_bytes = self._process.memory_info().rss
            self._output.send(
                msgspec.structs.replace(self._last_stats, step_s=step_s, rss_bytes=rss_bytes)
            )

    # ------------------------------------------------------------------ in

    def _take_in(self) -> None:
        """Handle what is in the inbox; sleep there while there is nothing to compute."""
        if not self._engine.has_work and not self._embedder.has_work:
            self._end_if_drained()
            if self._has_ended:
                return
            gc.collect(0)
            try:
                self._handle(self.inbox.get(timeout=self._rest()))
            except queue.Empty:
                return
        while not self._has_ended:
            try:
                self._handle(self.inbox.get_nowait())
            except queue.Empty:
                break
        self._end_if_drained()

    def _rest(self) -> float:
        """Give memory back. Returns how long there is nothing more to do."""
        now = self._clock()
        self._refuse_the_overdue(now)
        if self._memory.rest(now):
            return 0.0
        self._send_stats_if_due()
        left = self._memory.seconds_to_rest(now)
        return min(left or HEARTBEAT_S, HEARTBEAT_S)

    def _handle(self, item: Item) -> None:
        if isinstance(item, Prompt):
            self._admit(item)
        elif isinstance(item, Restored):
            self._memory.restore(item)
        elif isinstance(item, Cancel):
            self._cancel(item.id)
        elif isinstance(item, EmbeddingJob):
            self._embedder.add(item)
        elif isinstance(item, SetKVBudget):
            self._memory.set_budget(item.budget_bytes)
            held, self._held = self._held, {}
            for prompt, since in held.values():
                self._admit(prompt, since)
            self._send_stats()
        elif isinstance(item, Shutdown):
            self._deadline = self._clock() + item.drain_s
        else:
            self._has_ended = True

    def _admit(self, prompt: Prompt, since: float | None = None) -> None:
        """Begin a sequence; or hold it, if it has to wait for memory that the daemon may grant."""
        request = prompt.request
        if self._deadline is not None:
            self._output.send(Failed(request.id, "internal", "the model is being unloaded"))
            return
        if request.id in self._running or request.id in self._held:
            self._output.send(Failed(request.id, "bad_request", f"id {request.id} is in use"))
            return
        if self._memory.must_wait(len(prompt.prompt_ids) + len(request.output_ids)):
            self._held[request.id] = (prompt, self._clock() if since is None else since)
            self._send_stats()
            return
        running = Running(prompt, self._stream_for(prompt))
        already = self._replay(running)
        num_left = prompt.max_tokens - running.num_output_tokens
        if num_left <= 0 or running.is_window_full or (already and already.finished):
            self._output.send(_started(prompt))
            final = already if already and already.finished else None
            self._output.send(Step([final or running.stream.stop(self._at_once(running))]))
            return
        try:
            self._engine.add(self._engine_request(running, prompt.max_tokens))
        except Unservable as error:
            self._output.send(Failed(request.id, "too_long", str(error)))
            return
        except (RequestRefused, ValueError) as error:
            self._output.send(Failed(request.id, "bad_request", str(error)))
            return
        self._running[request.id] = running
        self._output.send(_started(prompt))
        if already and not is_silent(already):
            self._output.send(Step([already]))

    def _stream_for(self, prompt: Prompt) -> Stream:
        return Stream(
            prompt.request.id,
            self._model.tokenizer,
            prompt.prompt_ids,
            prompt.request.stop,
            prompt.answer.parser,
            wants_logprobs=prompt.request.sampling.num_logprobs >= 0,
        )

    def _replay(self, running: Running) -> Delta | None:
        """Tell again what an earlier worker generated (see protocol.Delta)."""
        output_ids = running.prompt.request.output_ids
        if not output_ids:
            return None
        delta, stop = running.stream.push(output_ids)
        if stop is None:
            return delta
        final = running.stream.stop(Finished("stop", stop, len(running.prompt.prompt_ids)))
        return protocol.merged(delta, final)

    @staticmethod
    def _at_once(running: Running) -> Finished:
        return Finished(
            "length",
            num_prompt_tokens=len(running.prompt.prompt_ids),
            num_output_tokens=running.num_output_tokens,
        )

    def _engine_request(self, running: Running, max_tokens: int) -> EngineRequest:
        prompt = running.prompt
        request = prompt.request
        num_prompt = len(running.token_ids) - len(request.output_ids)
        room = prompt.num_ctx - num_prompt
        grammar = prompt.answer.grammar
        sampling = request.sampling
        if grammar is not None:  # the form says where the answer ends, not these
            sampling = msgspec.structs.replace(sampling, min_tokens=0, ignore_eos=False)
        stop_ids = frozenset(request.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._model.tokenizer.eos_ids
        return EngineRequest(
            id=request.id,
            token_ids=tuple(running.token_ids),
            num_prompt_tokens=num_prompt,
            max_tokens=min(max_tokens, room),
            sampling=sampling,
            seed=prompt.seed,
            stop_ids=stop_ids,
            priority=request.priority,
            client=request.client,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            grammar=grammar,
        )

    def _cancel(self, id: str) -> None:
        if self._held.pop(id, None) is not None:
            self._output.send(Step([Delta(id, finished=Finished("abort"))]))
            return
        if self._embedder.cancel(id):
            return
        running = self._running.pop(id, None)
        if running is None:
            return  # it has ended, or was never here
        output = self._engine.cancel(id)
        finished = _finished("abort", running, output)
        self._output.send(Step([running.stream.finish((), (), None, finished)]))

    # ---------------------------------------------------------------- step

    def _step(self) -> None:
        self._memory.worked()
        self._step_began = self._clock()
        outputs = self._engine.step()
        self._step_began = None
        self._memory.trim()
        if self._held:
            self._refuse_the_overdue(self._clock())
        deltas = [delta for output in outputs for delta in self._deltas_of(output)]
        if deltas:
            now = self._clock()
            stats = self._stats(now) if self._counts() != self._last_counts else None
            self._output.send(Step(deltas, stats))

    def _deltas_of(self, output: SequenceOutput) -> list[Delta]:
        running = self._running.get(output.id)
        if running is None:
            return []  # cancelled while the step ran
        running.append(output.token_ids)
        if output.finish_reason is not None:
            return self._end_of_sequence(running, output)
        delta, stop = running.stream.push(output.token_ids, output.logprobs)
        if stop is None:
            return [] if is_silent(delta) else [delta]
        del self._running[output.id]
        figures = self._engine.cancel(output.id)
        finished = _finished("stop", running, figures, stop)
        return [protocol.merged(delta, running.stream.stop(finished))]

    def _end_of_sequence(self, running: Running, output: SequenceOutput) -> list[Delta]:
        if output.finish_reason == "length" and self._shift(running):
            delta, _ = running.stream.push(output.token_ids, output.logprobs)
            return [] if is_silent(delta) else [delta]
        del self._running[output.id]
        finished = _finished(output.finish_reason or "error", running, output)
        return [
            running.stream.finish(output.token_ids, output.logprobs, output.stop_token, finished)
        ]

    def _shift(self, running: Running) -> bool:
        """Go on with the newest half, if the window ended the sequence and the caller allows it.

        Only for those who asked for more tokens than the window holds: without a number, the end of
        the window is the end of the answer.
        """
        prompt = running.prompt
        if prompt.answer.grammar is not None:
            return False  # half a form is no beginning of one
        left = prompt.max_tokens - running.num_output_tokens
        if not (prompt.request.shift and running.is_window_full and left > 0):
            return False
        if prompt.request.max_tokens is None:
            return False
        running.token_ids = running.shifted()
        log.info("context of %s shifted to %d tokens", prompt.request.id, len(running.token_ids))
        request = self._engine_request(running, left)
        self._engine.add(replace(request, num_prompt_tokens=len(running.token_ids)))
        return True

    # --------------------------------------------------------------- stats

    def _end_if_drained(self) -> None:
        if self._deadline is None:
            return
        if self._clock() >= self._deadline:
            for id in [*self._running, *self._held]:
                self._cancel(id)
            self._embedder.clear()
        self._has_ended = not (self._running or self._held or self._embedder.has_work)

    def _refuse_the_overdue(self, now: float) -> None:
        for id, (prompt, since) in list(self._held.items()):
            if now - since > HELD_S:
                del self._held[id]
                num_tokens = len(prompt.prompt_ids)
                text = (
                    f"the prompt's {num_tokens} tokens need more memory than other models and "
                    "programs leave; end one of them or shorten the prompt"
                )
                self._output.send(Failed(id, "no_memory", text))

    def _counts(self) -> tuple[int, ...]:
        stats = self._engine.stats()
        return (
            stats.running,
            stats.waiting + len(self._held),
            stats.blocks_in_use,
            stats.blocks_cached,
            self._memory.num_bytes,
        )

    def _send_stats_if_due(self) -> None:
        now = self._clock()
        since = now - self._stats_sent_at
        if since >= HEARTBEAT_S or (
            since >= STATS_PERIOD_S and self._counts() != self._last_counts
        ):
            self._send_stats()

    def _send_stats(self) -> None:
        self._output.send(self._stats(self._clock()))

    def _stats(self, now: float) -> Stats:
        self._stats_sent_at = now
        self._last_counts = self._counts()
        stats = self._engine.stats()
        held = [len(prompt.prompt_ids) for prompt, _ in self._held.values()]
        self._last_stats = Stats(
            running=stats.running,
            waiting=stats.waiting + len(held),
            blocks_total=stats.blocks_total,
            blocks_in_use=stats.blocks_in_use,
            blocks_cached=stats.blocks_cached,
            blocks_free=stats.blocks_free,
            kv_bytes=self._model.kv_bytes,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            blocks_left_behind=stats.blocks_left_behind,
            tokens_per_s=self._rate(now, stats.output_tokens),
            rss_bytes=self._process.memory_info().rss,
            kv_wanted_bytes=self._memory.wanted_bytes(held),
            saved_bytes=self._memory.saved_bytes,
        )
        return self._last_stats

    def _rate(self, now: float, output_tokens: int) -> float:
        self._rates.append((now, output_tokens))
        while now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()
        since, before = self._rates[0]
        return (output_tokens - before) / (now - since) if now > since else 0.0


def _finished(
    reason: str, running: Running, output: SequenceOutput | None, stop: str | None = None
) -> Finished:
    return Finished(
        reason=reason,
        stop_reason=stop if stop is not None else (output.stop_token if output else None),
        num_prompt_tokens=len(running.prompt.prompt_ids),
        num_cached_tokens=output.num_cached_tokens if output else 0,
        num_output_tokens=running.num_output_tokens,
        num_preemptions=output.num_preemptions if output else 0,
        queue_s=output.queue_s if output else 0.0,
        prefill_s=output.prefill_s if output else 0.0,
        decode_s=output.decode_s if output else 0.0,
        error=output.error if output and reason == "error" else "",
    )
