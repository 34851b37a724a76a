"""Who holds a model and until when it stays, by tables of times."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.daemon.holdoff import FIRST_S, LONGEST_S, WINDOW_S, HoldOff
from llmd.daemon.keepalive import KeepAlive


def test_the_duration_runs_from_the_last_release() -> None:
    holds = KeepAlive(300)
    holds.acquire("a", 0, 10)
    holds.acquire("a", 1, None)
    holds.release("a", 2)
    assert holds.next_expiry() is None and holds.expired(1e9) == []
    holds.release("a", 5)
    assert holds.next_expiry() == 15
    assert holds.expired(14.9) == [] and holds.expired(15) == ["a"]


def test_a_request_without_keep_alive_leaves_the_duration_as_it_is() -> None:
    holds = KeepAlive(300)
    holds.acquire("a", 0, math.inf)
    holds.release("a", 1)
    holds.acquire("a", 2, None)
    holds.release("a", 3)
    assert holds.next_expiry() is None and holds.expires_at("a", 4) == math.inf
    holds.acquire("a", 5, 0)
    holds.release("a", 6)
    assert holds.expired(6) == ["a"]


def test_the_least_recently_used_gives_way_first_and_what_stays_forever_last() -> None:
    holds = KeepAlive(300)
    for now, (key, keep_alive_s) in enumerate([("x", math.inf), ("a", 5), ("b", 900), ("c", 1)]):
        holds.acquire(key, now, keep_alive_s)
        holds.release(key, now)
    holds.acquire("a", 10, None)
    holds.release("a", 11)
    assert holds.by_age() == ["b", "c", "a", "x"]
    holds.acquire("b", 12, None)
    assert holds.by_age() == ["c", "a", "x"], "a busy model does not give way"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["acquire", "release", "expire", "forget"]),
            st.floats(0, 50),
            st.sampled_from([None, 0.0, 5.0, math.inf]),
        ),
        max_size=60,
    )
)
def test_no_held_model_is_ever_named(
    steps: list[tuple[str, str, float, float | None]],
) -> None:
    holds, leases, now = KeepAlive(30), dict.fromkeys("abc", 0), 0.0
    for key, what, passed_s, keep_alive_s in steps:
        now += passed_s
        if what == "acquire":
            holds.acquire(key, now, keep_alive_s)
            leases[key] += 1
        elif what == "release" and leases[key]:
            holds.release(key, now)
            leases[key] -= 1
        elif what == "expire":
            holds.expire_now(key)
        elif what == "forget" and not leases[key]:
            holds.forget(key)
        holds.check()
        held = {key for key, num in leases.items() if num}
        assert not held & {*holds.expired(now), *holds.by_age()}
        assert holds.total_leases == sum(leases.values())
        expiry = holds.next_expiry()
        assert expiry is None or expiry <= now or holds.expired(expiry)


def test_deaths_cost_time_that_doubles_up_to_a_limit_and_is_forgotten() -> None:
    hold_off = HoldOff()
    held = []
    for _ in range(9):
        hold_off.died("a", 100.0, "boom")
        held.append(hold_off.held_s("a", 100.0))
    assert held == [0, 0, FIRST_S, 10, 20, 40, 80, LONGEST_S, LONGEST_S]
    assert hold_off.held_s("b", 100.0) == 0
    assert hold_off.held_s("a", 100.0 + LONGEST_S) == 0
    hold_off.died("a", 100.0 + WINDOW_S, "boom")
    assert hold_off.held_s("a", 100.0 + WINDOW_S) == 0
