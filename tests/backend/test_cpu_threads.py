"""Threads give way to other programs, come back when these are gone, and do not flutter."""

from __future__ import annotations

from llmd.backend.kernels.cpu_threads import FIRST_PAUSE, ThreadGovernor

STEP = 0.01


def run(governor: ThreadGovernor, seconds: float, cores: float, now: float) -> tuple[float, int]:
    """Steps with so many cores for the process; the time after them, and how often it changed."""
    changes, end = 0, now + seconds
    while now < end:
        before = governor.num_threads
        now += STEP
        governor.observe(STEP, STEP * min(before, cores), now)
        changes += governor.num_threads != before
    return now, changes


def test_with_the_machine_to_itself_a_step_has_all_threads() -> None:
    governor = ThreadGovernor(8)
    assert run(governor, 60, cores=8, now=0)[1] == 0
    assert governor.num_threads == 8


def test_threads_that_get_no_core_are_dropped_and_come_back() -> None:
    governor = ThreadGovernor(8)
    now, _ = run(governor, FIRST_PAUSE / 2, cores=4, now=0)
    assert governor.num_threads <= 5
    now, _ = run(governor, 40, cores=8, now=now)
    assert governor.num_threads == 8


def test_a_lasting_rival_is_tried_less_and_less_often() -> None:
    governor = ThreadGovernor(2)
    now, early = run(governor, 20, cores=1, now=0)
    now, late = run(governor, 20, cores=1, now=now + 100)
    assert early > late
    assert run(governor, 300, cores=1, now=now)[1] < 40


def test_one_thread_stays() -> None:
    governor = ThreadGovernor(1)
    run(governor, 10, cores=0.1, now=0)
    assert governor.num_threads == 1
