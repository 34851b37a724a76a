"""Wakes all who wait, each time it rings. Nothing is remembered: look first, then wait.

An asyncio.Event that is set and cleared again would do, if there were one waiter: the first to
clear it could take the ring from the others.

Owner: the event loop's thread.
"""

from __future__ import annotations

import asyncio


class Bell:
    """Made anywhere, used on one event loop."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Whoever waits looks again."""
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self) -> None:
        """Until the next ring."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)
