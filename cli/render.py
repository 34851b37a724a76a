"""What moves on the terminal: a spinner, one progress bar for a pull, plain lines elsewhere.

All of it goes to stderr; stdout belongs to answers and tables. Where stderr is no terminal there is
no spinner, and a pull is told in plain lines: one for each status, one for each tenth.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .units import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S = 0.1
_HIDDEN_S = 0.25  # what is done sooner needs no spinner
_TENTH = 10


class Spinner:
    """Shows that something goes on, and for how long.

    `stop` may be called again, also after a Ctrl+C in the middle of it. That is why its thread is
    told by a SimpleQueue: what threading.Event waits for stays locked if one comes at a bad time.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_over = False
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()  # something is in it: end
        self._thread = threading.Thread(target=self._turn, daemon=True)

    def __enter__(self) -> Spinner:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Return when nothing of it is on the terminal any more."""
        if self._is_over:
            return
        self._ends.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._is_over = True

    @property
    def is_turning(self) -> bool:
        """Until `stop`."""
        return not self._is_over

    def say(self, text: str) -> None:
        """Show another text from now on."""
        self._text = text

    def print(self, line: str) -> None:
        """A line on stdout, with the spinner out of its way."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        print(line, flush=True)

    def _turn(self) -> None:
        began = time.monotonic()
        if self._is_ended_within(_HIDDEN_S):
            return
        number = 0
        while not self._is_ended_within(_FRAME_S):
            number += 1
            frame, seconds = _FRAMES[number % len(_FRAMES)], int(time.monotonic() - began)
            shown = f" {seconds} s" if seconds else ""
            sys.stderr.write(f"\r\x1b[K{frame} {self._text}{shown}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    def _is_ended_within(self, seconds: float) -> bool:
        try:
            self._ends.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


def pull_display(name: str, verb: str = "pulling") -> PullDisplay:
    """The one that fits stderr."""
    return PullBar(name, verb) if sys.stderr.isatty() else PullLines(name, verb)


class PullDisplay(ABC):
    """Shows the lines of /api/pull as they come."""

    def __init__(self, name: str, verb: str = "pulling") -> None:
        self.name = name
        self.verb = verb
        self._sizes: dict[str, tuple[int, int]] = {}  # digest -> completed, total
        self._source = ""

    def __enter__(self) -> PullDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, line: dict[str, Any]) -> None:
        source = line.get("source") or ""
        if source and source != self._source:
            self._source = source
            self.say(f"{self.name} comes from {source}")
        if "total" not in line:
            self.say(str(line.get("status", "")))
            return
        digest = str(line.get("digest") or line.get("status"))
        self._sizes[digest] = (line.get("completed", 0), line["total"])
        overall = line.get("overall")
        if overall:
            self.advance(overall["completed"], overall["total"])
        else:
            completed, total = (sum(numbers) for numbers in zip(*self._sizes.values(), strict=True))
            self.advance(completed, total)

    @abstractmethod
    def say(self, status: str) -> None:
        """A step that has no bytes."""

    @abstractmethod
    def advance(self, completed: int, total: int) -> None:
        """Bytes of all files together."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will come."""


class PullLines(PullDisplay):
    """For pipes and logs."""

    def __init__(self, name: str, verb: str = "pulling") -> None:
        super().__init__(name, verb)
        self._said = ""
        self._tenth = -1

    def say(self, status: str) -> None:
        if status and status != self._said:
            self._said = status
            print(status, file=sys.stderr, flush=True)

    def advance(self, completed: int, total: int) -> None:
        tenth = _TENTH * completed // total if total else _TENTH
        if tenth > self._tenth:
            self._tenth = tenth
            percent = 100 * tenth // _TENTH
            of_total = f"{size_text(completed)}/{size_text(total)}"
            print(f"{self.verb} {self.name}: {percent}% {of_total}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Every line has been ended."""


class PullBar(PullDisplay):
    """One bar for the whole pull, with rate and time left."""

    def __init__(self, name: str, verb: str = "pulling") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        super().__init__(name, verb)
        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, highlight=False),
        )
        self._task: TaskID | None = None
        self._said = ""
        self._progress.start()

    def say(self, status: str) -> None:
        if status and status != self._said:
            self._said = status
            self._progress.console.print(status, markup=False)

    def advance(self, completed: int, total: int) -> None:
        if self._task is None:
            # What lies here already from an earlier try is in the bar, but not in the rate.
            self._task = self._progress.add_task(
                f"{self.verb} {self.name}", completed=completed, total=total
            )
        self._progress.update(self._task, completed=completed, total=total)

    def close(self) -> None:
        self._progress.stop()
