"""A Listener: what the reader of one stream has been told, and a short way to tell it more.

    worker's line ──▶ WorkerProcess ──▶ Listener.take ─────────────────────────▶ socket   plain text
                           └─▶ mailbox ──▶ failover ──▶ Generation ──▶ route ──▶ socket   the rest

Most deltas are a piece of text for a client that keeps up. For those the long way, a queue and five
coroutines, would be most of what a token costs here (benchmarks/daemon_overhead.py). So a stream
whose reader waits offers each delta to its Listener first: one call of one object, which holds all
that a plain delta needs. Whatever it does not take goes the long way, in the same order.

By either way, what was told is counted here once: failover resumes from it, the metrics and
`ps -v` read it.

Owner: the stream's one reader, on the event loop.
"""

from __future__ import annotations

import time

from ..backend.protocol import Delta
from .metrics import ModelFigures
from .moment import Moment


class Listener:
    """Of one stream. This one takes nothing: a kind that does has its own `write`."""

    __slots__ = (
        "_gap_s",
        "_ttft_s",
        "is_ahead",
        "num_calls",
        "num_text",
        "num_thinking",
        "token_ids",
        "told_at",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_text = 0
        self.num_thinking = 0
        self.num_calls = 0
        self.is_ahead = False  # of a fresh worker, which repeats what has been told already
        self.begin(ModelFigures(), time.monotonic())

    def __repr__(self) -> str:
        ahead = ", ahead" if self.is_ahead else ""
        return f"<{type(self).__name__} {len(self.token_ids)} tokens told{ahead}>"

    def begin(self, figures: ModelFigures, arrived: float) -> None:
        """Where its times are noted, and from when it waits for the first token."""
        self._ttft_s = figures.ttft_s
        self._gap_s = figures.inter_token_s
        self.told_at = arrived  # monotonic; later, when the last tokens came

    def take(self, delta: Delta, came: Moment) -> bool:
        """Tell it now. False: it was not told, and is to be told the long way."""
        if self.is_ahead or not self.write(delta, came):
            return False
        self.count(delta, came.monotonic)
        return True

    def write(self, delta: Delta, came: Moment) -> bool:
        """Pass on all of the delta, or nothing."""
        return False

    def count(self, news: Delta, now: float) -> None:
        """It is told this."""
        self.num_text += len(news.text)
        if news.thinking:
            self.num_thinking += len(news.thinking)
        if news.tool_calls:
            self.num_calls += len(news.tool_calls)
        ids = news.token_ids
        if ids:
            if self.token_ids:
                self._gap_s.observe((now - self.told_at) / len(ids), len(ids))
            else:
                self._ttft_s.observe(now - self.told_at)
            self.told_at = now
            self.token_ids += ids
