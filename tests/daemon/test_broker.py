"""How KV memory is shared out."""

from __future__ import annotations

import random

import pytest

from llmd.daemon.broker import FLOOR_BYTES, Holding, grants, shared

GB = 10**9


def holding(key: str, **fields: float) -> Holding:
    values = {
        "base_bytes": GB,
        "in_use_bytes": 0,
        "cached_bytes": 0,
        "wanted_bytes": 0,
        "capacity_bytes": 16 * GB,
        "is_busy": False,
        "last_used": 0.0,
        **fields,
    }
    return Holding(key=key, **values)  # type: ignore[arg-type]


def test_one_model_may_grow_into_all_there_is() -> None:
    assert grants(8 * GB, [holding("a")]) == {"a": 7 * GB}
    assert grants(8 * GB, [holding("a", capacity_bytes=GB)]) == {"a": GB}


def test_a_model_with_work_takes_the_idle_prefixes_of_another() -> None:
    idle = holding("idle", cached_bytes=3 * GB, last_used=1)
    busy = holding("busy", in_use_bytes=GB, wanted_bytes=4 * GB, is_busy=True, last_used=2)
    budgets = grants(7 * GB, [idle, busy])
    assert budgets["busy"] >= 4 * GB
    assert budgets["idle"] <= GB


def test_prefixes_of_the_model_that_was_used_last_are_kept_longest() -> None:
    old = holding("old", cached_bytes=2 * GB, last_used=1)
    new = holding("new", cached_bytes=2 * GB, last_used=2)
    budgets = grants(2 * GB + 3 * GB, [old, new])
    assert budgets["new"] == 2 * GB
    assert FLOOR_BYTES <= budgets["old"] <= GB


def test_what_sequences_hold_is_never_taken() -> None:
    full = holding("full", in_use_bytes=5 * GB, is_busy=True)
    other = holding("other", in_use_bytes=2 * GB, wanted_bytes=9 * GB, is_busy=True)
    assert grants(6 * GB, [full, other]) == {"full": 5 * GB, "other": 2 * GB}


def test_too_little_is_shared_evenly_but_nobody_gets_more_than_it_needs() -> None:
    assert shared(9, {"a": 2, "b": 100, "c": 100}) == {"a": 2, "b": 3, "c": 4}
    assert shared(0, {"a": 2}) == {"a": 0}
    assert shared(5, {"a": 0, "b": -3}) == {}


@pytest.mark.parametrize("seed", range(50))
def test_the_sum_is_within_the_limit_and_nobody_loses_what_it_uses(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        holdings = [
            holding(
                str(number),
                base_bytes=draw.randrange(2 * GB),
                in_use_bytes=(in_use := draw.choice([0, draw.randrange(GB)])),
                cached_bytes=draw.randrange(GB),
                wanted_bytes=draw.randrange(3 * GB),
                capacity_bytes=in_use + draw.randrange(8 * GB),
                is_busy=draw.random() < 0.5,
                last_used=draw.random(),
            )
            for number in range(draw.randrange(1, 6))
        ]
        limit = draw.randrange(20 * GB)
        budgets = grants(limit, holdings)
        least = sum(each.least_bytes for each in holdings)
        total = sum(budgets.values()) + sum(each.base_bytes for each in holdings)
        assert total <= max(limit, least)
        for each in holdings:
            assert (
                each.in_use_bytes
                <= budgets[each.key]
                <= max(each.capacity_bytes, each.in_use_bytes)
            )
        assert budgets == grants(limit, holdings)
