"""The spinner, without a terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from types import FrameType
from typing import Any

from llmd.cli.render import Spinner

DEADLINE_S = 10


class Interruption:
    """Raises KeyboardInterrupt at the n-th point at which a program can be interrupted."""

    def __init__(self, number: int) -> None:
        self._left = number

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Interruption:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self


def is_interrupted(spinner: Spinner, number: int) -> bool:
    """`stop`, interrupted there, and `stop` again. False if it ends before that point."""
    interruption = Interruption(number)
    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(interruption)  # what it raises ends it
        spinner.stop()
        sys.settrace(None)
    spinner.stop()
    return interruption.has_come


def test_wherever_a_ctrl_c_meets_its_end_a_spinner_can_be_ended_again() -> None:
    # Kept to the end: the interpreter drops what is raised while one of them is finalized.
    spinners: list[Spinner] = []

    def at_every_point() -> None:
        for number in itertools.count(1):
            spinners.append(Spinner("waiting"))
            if not is_interrupted(spinners[-1], number):
                return

    trial = threading.Thread(target=at_every_point, daemon=True)
    trial.start()
    trial.join(DEADLINE_S)
    assert not trial.is_alive(), f"it hung after an interruption at point {len(spinners)}"
    assert len(spinners) > 5, "stop has more points than that"
