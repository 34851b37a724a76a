"""One answer while it is generated: the lease, the worker's deltas, and the figures of both.

    holding(call, model, keep_alive_s) ──▶ Held ──generation(request)──▶ Generation ──deltas()──▶ …

A Generation yields Deltas and remembers what their last one said. A route gives it a Listener, for
what can be written at once (PlainPieces), which saves that the way through all the iterators and
the event loop. A failure is raised, never passed off as an answer; an answer that was ended (a
cancel, a shutdown) has a proper end that says so.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ...backend.protocol import Delta, Finished, Generate, Started, TokenLogprob, ToolCall
from ..errors import RequestFailed
from ..listener import Listener
from ..metrics import ModelFigures
from ..moment import Moment
from ..placement import NO_WISH, Wish
from .call import Call
from .durations import nanoseconds
from .lookup import Model
from .replies import encode_json
from .services import Lease


def new_id() -> str:
    """An id for a sequence; unique in this worker's life."""
    return secrets.token_hex(8)


class Generation:
    """One sequence. `deltas` may be iterated once; closing it cancels the sequence."""

    def __init__(
        self, lease: Lease, request: Generate, figures: ModelFigures, arrived: float
    ) -> None:
        self.request = request
        self._lease = lease
        self._figures = figures
        self._arrived = arrived
        # Filled while the deltas pass by.
        self.started: Started | None = None
        self.finished: Finished | None = None

    async def deltas(self, listener: Listener) -> AsyncGenerator[Delta, None]:
        """All deltas that `listener` did not take, the finished one last.

        Raises RequestFailed or WorkerDied.
        """
        listener.begin(self._figures, self._arrived)
        events = self._lease.generate(self.request, listener)
        async with aclosing(cast("AsyncGenerator[Started | Delta, None]", events)) as events:
            async for event in events:
                if isinstance(event, Started):
                    self.started = event
                    continue
                if event.finished is not None:
                    self._finish(event.finished)
                yield event

    def _finish(self, finished: Finished) -> None:
        figures = self._figures
        figures.finished[finished.reason] = figures.finished.get(finished.reason, 0) + 1
        figures.prompt_tokens += finished.num_prompt_tokens
        figures.generated_tokens += finished.num_output_tokens
        self.finished = finished
        if finished.reason == "error":
            raise RequestFailed("internal", finished.error or "the answer failed in the worker")

    async def collect(self) -> Answer:
        """Run to the end and return all of it."""
        answer = Answer()
        async with aclosing(self.deltas(Collector(answer))) as deltas:
            async for delta in deltas:
                answer.add(delta)
        return answer

    async def started_only(self) -> Started:
        """For `render_only` requests: the prompt as the model would see it."""
        await self.collect()
        assert self.started is not None, "a sequence ended without having started"
        return self.started

    @property
    def end(self) -> Finished:
        """Only after the last delta. An answer that was ended from outside counts as cut short,
        for which the contracts have one word."""
        assert self.finished is not None, "the sequence has not ended"
        if self.was_ended:
            return msgspec.structs.replace(self.finished, reason="length")
        return self.finished

    @property
    def was_ended(self) -> bool:
        """By `llmd cancel`, or because its model or the daemon had to go."""
        return self.finished is not None and self.finished.reason == "abort"

    def notes(self) -> dict[str, Any]:
        """What the contracts have no field for, and a user may want to know: the `llmd` field."""
        notes: dict[str, Any] = {}
        if self.was_ended:
            notes["ended"] = "cancelled, or the model was unloaded"
        if self.started is not None and self.started.truncated_tokens:
            notes["truncated_tokens"] = self.started.truncated_tokens
        if self.started is not None and self.started.truncated_messages:
            notes["truncated_messages"] = self.started.truncated_messages
        if self.end.num_cached_tokens:
            notes["cached_tokens"] = self.end.num_cached_tokens
        return notes


@dataclass(slots=True)
class Answer:
    """Deltas added up."""

    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.thinking += delta.thinking
        self.tool_calls.extend(delta.tool_calls)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


class Collector(Listener):
    """Adds up all deltas but the last, which is its reader's."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def write(self, delta: Delta, came: Moment) -> bool:
        self._answer.add(delta)
        return True


class PlainPieces(Listener):
    """Writes what most deltas are, text alone, as pieces that differ in nothing but that text.

    Closed, it takes nothing; a route opens it while the next piece of text looks like this. What it
    takes is on its way when `write` returns, so it is in order with what the route sends.
    """

    __slots__ = ("_frame", "_wire")

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._wire = call.wire
        self._frame = b""

    def open(self, frame: bytes) -> None:
        """The pieces look like `frame`, a whole one whose text is left open (replies.frame_of)."""
        self._frame = frame

    def close(self) -> None:
        self._frame = b""

    def write(self, delta: Delta, came: Moment) -> bool:
        if delta.thinking or delta.tool_calls or delta.logprobs or not delta.text:
            return False
        if self._wire is None or not self._frame:
            return False
        return self._wire.put(self.piece(encode_json(delta.text), came))

    def piece(self, text: bytes, came: Moment) -> bytes:
        """The whole piece with this text."""
        return self._frame % text


@dataclass(frozen=True, slots=True)
class Held:
    """A leased model, ready to answer this call."""

    call: Call
    model: Model
    lease: Lease
    load_s: float  # from the request's arrival to the lease

    def generation(self, request: Generate) -> Generation:
        figures = self.call.services.metrics.of_model(self.model.name.display)
        return Generation(self.lease, request, figures, self.call.arrived)

    def durations(self, end: Finished) -> dict[str, int]:
        """The metrics of a native final object, in nanoseconds; what is zero is left out.

        A duration whose count is not zero is at least 1: clients divide by it.
        """
        figures = {
            "total_duration": nanoseconds(time.monotonic() - self.call.arrived),
            "load_duration": nanoseconds(self.load_s),
            "prompt_eval_count": end.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(end.prefill_s) or bool(end.num_prompt_tokens),
            "eval_count": end.num_output_tokens,
            "eval_duration": nanoseconds(end.decode_s) or bool(end.num_output_tokens),
        }
        return {name: int(value) for name, value in figures.items() if value}


@asynccontextmanager
async def holding(
    call: Call, model: Model, keep_alive_s: float | None, wish: Wish = NO_WISH
) -> AsyncIterator[Held]:
    """The model, loaded, for as long as the block runs."""
    async with call.services.manager.lease(model.name, keep_alive_s, wish=wish) as lease:
        yield Held(call, model, lease, time.monotonic() - call.arrived)


def native_logprobs(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """As the native API and OpenAI's write them."""
    return [
        {
            **_logprob(entry),
            **({"top_logprobs": [_logprob(other) for other in entry.top]} if entry.top else {}),
        }
        for entry in logprobs
    ]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.bytes) or list(entry.token.encode()),
    }
