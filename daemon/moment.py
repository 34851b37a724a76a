"""A Moment: when something came, on both clocks, read once for all whom it concerns."""

from __future__ import annotations

import time
from functools import lru_cache


class Moment:
    """Now, when it is made."""

    __slots__ = ("created_at", "monotonic")

    def __init__(self) -> None:
        self.monotonic = time.monotonic()
        self.created_at = f'"{now_text()}"'.encode()  # as JSON

    def __repr__(self) -> str:
        return f"<Moment {self.created_at.decode()}>"


def now_text() -> str:
    """The time now in UTC, RFC 3339 with nanoseconds: every chunk's `created_at`."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return f"{_second_text(seconds)}.{nanoseconds:09d}Z"


@lru_cache(maxsize=2)
def _second_text(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
