"""A stream that outlives its worker.

The worker tells ids with the text (protocol.Delta). If it dies, a fresh worker gets the prompt's
ids, the ids that were told and the seed, and goes on at the exact token; it tells the stream from
its beginning, and what the reader has already is dropped here. A request during which two workers
die is not given a third, unless it got on in between: what kills a worker, kills at one point.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import msgspec

from ..backend.protocol import Delta, Generate, Started
from .errors import WorkerDied
from .running import RunningRequest
from .worker_process import Shortcut, WorkerProcess

log = logging.getLogger("llmd.failover")

MAX_RESUMPTIONS = 1  # without a new token since the last one
MAX_RESTARTS = 3  # of a request that no worker had begun; it may have waited behind the culprit

T = TypeVar("T")


class _Told:
    """What the reader of one stream has."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.token_ids: list[int] = []
        self.num_text = 0
        self.num_thinking = 0
        self.num_calls = 0
        # How much of a repeated stream is still to be dropped.
        self.is_repeating = False
        self._skip_text = self._skip_thinking = self._skip_calls = self._skip_ids = 0

    def resume(self, request: Generate) -> Generate:
        """The request for the next worker; from now on its repetition is dropped."""
        self._skip_text, self._skip_thinking = self.num_text, self.num_thinking
        self._skip_calls, self._skip_ids = self.num_calls, len(self.token_ids)
        self.is_repeating = self._has_to_skip()
        if self.started is None:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self.started.seed)
        return msgspec.structs.replace(
            request, sampling=sampling, output_ids=list(self.token_ids), truncate=True
        )

    def _has_to_skip(self) -> bool:
        return bool(self._skip_text or self._skip_thinking or self._skip_calls or self._skip_ids)

    def news(self, delta: Delta) -> Delta:
        """The delta without what the reader has; counts what is passed on."""
        if not self.is_repeating:
            self.count(delta)
            return delta
        text = delta.text[self._skip_text :]
        thinking = delta.thinking[self._skip_thinking :]
        calls = delta.tool_calls[self._skip_calls :]
        ids = delta.token_ids[self._skip_ids :]
        self._skip_text -= len(delta.text) - len(text)
        self._skip_thinking -= len(delta.thinking) - len(thinking)
        self._skip_calls -= len(delta.tool_calls) - len(calls)
        self._skip_ids -= len(delta.token_ids) - len(ids)
        self.is_repeating = self._has_to_skip()
        news = msgspec.structs.replace(
            delta, text=text, thinking=thinking, tool_calls=calls, token_ids=ids
        )
        self.count(news)
        return news

    def count(self, news: Delta) -> None:
        self.num_text += len(news.text)
        self.num_thinking += len(news.thinking)
        self.num_calls += len(news.tool_calls)
        self.token_ids.extend(news.token_ids)


async def resumed(
    worker: WorkerProcess,
    request: Generate,
    replacement: Callable[[], Awaitable[WorkerProcess]],
    running: RunningRequest,
    shortcut: Shortcut | None = None,
) -> AsyncGenerator[Started | Delta]:
    """The worker's answers to the request, and a replacement's after them if it dies.

    `shortcut` is offered what nobody has been told yet. The request is listed as running meanwhile.
    Raises RequestFailed, WorkerDied. Closing it cancels the sequence.
    """
    told = _Told()
    num_deaths = num_told = 0

    def passes_by(delta: Delta) -> bool:
        if shortcut is None or told.is_repeating or not shortcut(delta):
            return False
        told.count(delta)
        return True

    running.begin(told.token_ids)
    try:
        while True:
            try:
                stream = worker.generate(request, passes_by)
                async with contextlib.aclosing(stream):
                    async for answer in stream:
                        if isinstance(answer, Started):
                            if running.is_cancelled:
                                running.cancel()  # the worker that was told so is gone
                            if told.started is None:
                                told.started = answer
                                running.num_prompt_tokens = len(answer.prompt_ids)
                                yield answer
                            continue
                        news = told.news(answer)
                        if _is_news(news):
                            yield news
                        if news.finished is not None:
                            if news.finished.reason in ("stop", "length"):
                                running.completed()
                            return
            except WorkerDied as death:
                has_got_on = len(told.token_ids) > num_told
                num_told = len(told.token_ids)
                num_deaths = 1 if has_got_on else num_deaths + 1
                if num_deaths > (MAX_RESTARTS if told.started is None else MAX_RESUMPTIONS):
                    raise
                log.warning("%s; going on after %d tokens", death, len(told.token_ids))
                request = told.resume(request)
                worker = await replacement()
    finally:
        running.end()


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
