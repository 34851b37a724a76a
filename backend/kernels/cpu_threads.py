"""How many threads a step gets while other programs want the processor too.

Threads meet after every operation, so one that the system has set aside keeps all others waiting.
That shows: waiting threads are busy, and a set-aside one is not, so a step's processor time falls
short of its wall time times its threads. Then fewer threads do the same work sooner. After a while
all of them are tried again, less often each time it does not pay.

Pure: times come in as numbers.
"""

from __future__ import annotations

WINDOW_SECONDS = 0.1  # of steps, before anything is judged
BUSY_SHARE = 0.7  # below, a thread is missing for so long that the others wait for nothing
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds until all threads are tried again


class ThreadGovernor:
    """`num_threads` of at most `max_threads`, by what the last steps were like."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = self.num_threads = max_threads
        self._wall = self._busy = 0.0
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0

    def __repr__(self) -> str:
        return f"<ThreadGovernor {self.num_threads} of {self.max_threads}>"

    def observe(self, wall: float, busy: float, now: float) -> None:
        """A step took `wall` seconds and the process `busy` seconds of processor time in it."""
        self._wall += wall
        self._busy += busy
        if self._wall < WINDOW_SECONDS:
            return
        share = self._busy / (self._wall * self.num_threads)
        self._wall = self._busy = 0.0
        if share < BUSY_SHARE and self.num_threads > 1:
            self.num_threads -= max(1, self.num_threads // 4)
            self._retry_at = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.num_threads < self.max_threads and now >= self._retry_at:
            self.num_threads = self.max_threads
        elif self.num_threads == self.max_threads:
            self._pause = FIRST_PAUSE
