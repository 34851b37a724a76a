"""A worker without a model, started before the daemon itself is: its first load need not wait for
torch.

    start ──▶ WAITING ──take──▶ some model's worker
                 └──end, or it has died──▶ GONE

A worker is the same for every model until the Load message comes: nothing in its command or its
environment speaks of one. Importing torch is most of what it takes to be there, and a second core
does that while the daemon imports its web server.

Nobody may ever want it: so it is for a time (`LLMD_SPARE_WORKER`), and only where there is a model
to load and a core to spare. Like every worker it ends with the daemon, however that ends.

Only the standard library is imported here, and of that what is quick. Owner: the main thread. On
Linux a worker dies with the *thread* that started it (prctl(2), PR_SET_PDEATHSIG), and the main
thread is the one that lives as long as the daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def worker_command() -> list[str]:
    """How a real worker is started."""
    return [sys.executable, "-P", "-m", f"{__package__.split('.')[0]}.backend"]


def worker_environ() -> dict[str, str]:
    """What each worker has of the daemon's environment: all of it, and its log line by line."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


class SpareWorker:
    """At most one process that has no model yet."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process  # None: GONE, or none was started

    def __repr__(self) -> str:
        return f"<SpareWorker {'gone' if self._process is None else self._process.pid}>"

    @classmethod
    def start(cls, command: Sequence[str]) -> SpareWorker:
        """Raises OSError."""
        return cls(
            subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl+C in the daemon's terminal is the daemon's
                env=worker_environ(),
            )
        )

    @property
    def pid(self) -> int | None:
        """None: there is none."""
        return None if self._process is None else self._process.pid

    @property
    def private_bytes(self) -> int:
        """Memory that it alone holds; 0 without one."""
        if self._process is None:
            return 0
        import psutil  # not above: it is not wanted so early

        try:
            memory = psutil.Process(self._process.pid).memory_info()
        except psutil.Error:
            return 0  # it has died
        return int(memory.rss - getattr(memory, "shared", 0))

    def take(self) -> subprocess.Popen[bytes] | None:
        """It is the caller's now. None: there is none, or it has died."""
        process = self._process
        if process is None:
            return None
        if process.poll() is not None:
            self.end()
            return None
        self._process = None
        return process

    def end(self) -> bool:
        """No process is left. False: there was none.

        Blocks until the system has taken it down, some hundredths of a second.
        """
        process, self._process = self._process, None
        if process is None:
            return False
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        return True
