"""A short soak; the long one is scripts/soak, its result benchmarks/results/soak.md."""

from __future__ import annotations

from .soak import Soak


def test_many_random_requests_end_as_asked_and_leave_nothing() -> None:
    report = Soak(num_requests=150, seed=7).run()
    assert report.errors == []
    assert sum(report.ends.values()) == report.requests == 150
    assert set(report.ends) == {"stop", "length", "abort"}, "each kind of end came up"
    assert report.preemptions > 0
    assert report.cached_tokens > 0
    assert report.blocks_leaked == 0
