"""A stream that outlives its worker.

The worker tells ids with the text (protocol.Delta). If it dies, a fresh worker gets the prompt's
ids, the ids that were told and the seed, and goes on at the exact token; it tells the stream from
its beginning, and what the reader has already is dropped here. A request during which two workers
die is not given a third, unless it got on in between: what kills a worker, kills at one point.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import msgspec

from ..backend.protocol import Delta, Generate, Started
from .errors import WorkerDied
from .listener import Listener
from .running import RunningRequest
from .worker_process import WorkerProcess

log = logging.getLogger("llmd.failover")

MAX_RESUMPTIONS = 1  # without a new token since the last one
MAX_RESTARTS = 3  # of a request that no worker had begun; it may have waited behind the culprit

T = TypeVar("T")


class _Repetition:
    """What a fresh worker tells again: as much as the listener has been told already."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        # How much of it is still to be dropped.
        self._text, self._thinking = listener.num_text, listener.num_thinking
        self._calls, self._ids = listener.num_calls, len(listener.token_ids)
        self._look()

    def _look(self) -> None:
        self._listener.is_ahead = bool(self._text or self._thinking or self._calls or self._ids)

    def news(self, delta: Delta) -> Delta:
        """The delta without what the listener has."""
        if not self._listener.is_ahead:
            return delta
        text = delta.text[self._text :]
        thinking = delta.thinking[self._thinking :]
        calls = delta.tool_calls[self._calls :]
        ids = delta.token_ids[self._ids :]
        self._text -= len(delta.text) - len(text)
        self._thinking -= len(delta.thinking) - len(thinking)
        self._calls -= len(delta.tool_calls) - len(calls)
        self._ids -= len(delta.token_ids) - len(ids)
        self._look()
        return msgspec.structs.replace(
            delta, text=text, thinking=thinking, tool_calls=calls, token_ids=ids
        )


async def resumed(
    worker: WorkerProcess,
    request: Generate,
    replacement: Callable[[], Awaitable[WorkerProcess]],
    running: RunningRequest,
    listener: Listener,
) -> AsyncGenerator[Started | Delta]:
    """The worker's answers to the request, and a replacement's after them if it dies.

    `listener` is offered what it has not been told yet; what it takes is not yielded. The request
    is listed as running meanwhile. Raises RequestFailed, WorkerDied. Closing it cancels the
    sequence.
    """
    started: Started | None = None
    repetition = _Repetition(listener)
    num_deaths = num_told = 0
    running.begin(listener.token_ids)
    try:
        while True:
            try:
                stream = worker.generate(request, listener)
                async with contextlib.aclosing(stream):
                    async for answer in stream:
                        if isinstance(answer, Started):
                            if running.is_cancelled:
                                running.cancel()  # the worker that was told so is gone
                            if started is None:
                                started = answer
                                running.num_prompt_tokens = len(answer.prompt_ids)
                                yield answer
                            continue
                        news = repetition.news(answer)
                        listener.count(news, time.monotonic())
                        if _is_news(news):
                            yield news
                        if news.finished is not None:
                            if news.finished.reason in ("stop", "length"):
                                running.completed()
                            return
            except WorkerDied as death:
                has_got_on = len(listener.token_ids) > num_told
                num_told = len(listener.token_ids)
                num_deaths = 1 if has_got_on else num_deaths + 1
                if num_deaths > (MAX_RESTARTS if started is None else MAX_RESUMPTIONS):
                    raise
                log.warning("%s; going on after %d tokens", death, num_told)
                if started is not None:
                    request = _resumption(request, started, listener)
                repetition = _Repetition(listener)
                worker = await replacement()
    finally:
        running.end()


def _resumption(request: Generate, started: Started, listener: Listener) -> Generate:
    """The request for the next worker: as far as the listener has been told."""
    return msgspec.structs.replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, seed=started.seed),
        output_ids=list(listener.token_ids),
        truncate=True,
    )


async def retried(
    worker: WorkerProcess,
    ask: Callable[[WorkerProcess], Awaitable[T]],
    replacement: Callable[[], Awaitable[WorkerProcess]],
) -> T:
    """The answer to a request that is answered at once; asked again, once, if the worker dies."""
    try:
        return await ask(worker)
    except WorkerDied as death:
        log.warning("%s; asking again", death)
        return await ask(await replacement())


def _is_news(delta: Delta) -> bool:
    return bool(
        delta.text or delta.thinking or delta.tool_calls or delta.token_ids or delta.finished
    )
