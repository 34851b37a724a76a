"""Blocking work in a thread that tells its steps as lines; the client's leaving ends it.

    in_steps(call.send_line, work) ──▶ thread: work(tell) ──tell(line)──▶ event loop: send the line

A thread cannot be stopped from outside, so `tell` raises in it once nobody listens any more: work
that tells something now and then ends soon.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ...registry.download import in_thread

log = logging.getLogger("llmd.routes")

T = TypeVar("T")
Line = dict[str, Any]
Tell = Callable[[Line], None]
Steps = Callable[[Tell], T]


class _Left(Exception):
    """Nobody listens any more."""


async def in_steps(send: Callable[[Line], Awaitable[None]], work: Steps[T]) -> T:
    """What the work returns, or raises."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[Line | None] = asyncio.Queue()
    has_left = threading.Event()

    def tell(line: Line) -> None:
        if has_left.is_set():
            raise _Left
        loop.call_soon_threadsafe(lines.put_nowait, line)

    def body() -> T:
        try:
            return work(tell)
        finally:
            loop.call_soon_threadsafe(lines.put_nowait, None)

    running = asyncio.create_task(in_thread(body))
    try:
        while (line := await lines.get()) is not None:
            await send(line)
        return await running
    finally:
        has_left.set()
        await asyncio.wait((running,))
        if not running.cancelled() and isinstance(running.exception(), _Left):
            log.info("stopped: the client has left")
