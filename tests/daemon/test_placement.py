"""Where models go: tables of machines, and what holds on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from llmd.daemon.devices import Device
from llmd.daemon.placement import (
    GPU_CONTEXT_BYTES,
    KV_FLOOR_BYTES,
    WORKER_BYTES,
    Need,
    Resident,
    Room,
    Verdict,
    Wish,
    parts_for,
    place,
)

GB = 10**9


def room(*gpu_gb: float, host_gb: float = 64) -> Room:
    gpus = tuple(
        Device(f"cuda:{number}", "card", int(size * GB), int(size * GB), "cuda")
        for number, size in enumerate(gpu_gb)
    )
    return Room(int(host_gb * GB), gpus)


def need(weights_gb: float, num_layers: int = 32, host_gb: float | None = None) -> Need:
    host = weights_gb * 1.2 + 1 if host_gb is None else host_gb
    return Need(int(weights_gb * GB), num_layers, int(host * GB))


def layers(need: Need, room: Room, wish: Wish | None = None) -> dict[str, int] | None:
    parts = parts_for(need, room, wish or Wish())
    return None if parts is None else {part.device: part.num_layers for part in parts}


TABLE: Sequence[tuple[str, Need, Room, Wish, dict[str, int] | None]] = [
    ("no card", need(4), room(), Wish(), {}),
    ("one card that fits", need(4), room(8), Wish(), {"cuda:0": 32}),
    ("the fuller of two that fit", need(4), room(24, 8), Wish(), {"cuda:1": 32}),
    ("the main card", need(4), room(24, 8), Wish(main_gpu=0), {"cuda:0": 32}),
    ("a main card that is too small", need(8), room(6, 24), Wish(main_gpu=0), {"cuda:1": 32}),
    ("a main card that is not there", need(4), room(8), Wish(main_gpu=7), {"cuda:0": 32}),
    ("two cards together", need(12), room(8, 8), Wish(), {"cuda:0": 19, "cuda:1": 13}),
    ("all cards, as asked", need(4), room(24, 24), Wish(spread=True), {"cuda:0": 16, "cuda:1": 16}),
    ("the last layers on the CPU", need(12), room(8), Wish(), {"cuda:0": 19, "cpu": 13}),
    ("so many layers", need(4), room(24), Wish(num_gpu=10), {"cuda:0": 10, "cpu": 22}),
    ("more layers than there are", need(4), room(24), Wish(num_gpu=999), {"cuda:0": 32}),
    ("none on a card", need(4), room(24), Wish(num_gpu=0), {}),
    ("a full card", need(4), room(0.5), Wish(), {}),
    ("a card or nothing", need(12), room(8), Wish(require_gpu=True), None),
    ("a card or nothing, without one", need(4), room(), Wish(require_gpu=True), None),
    ("too large for everything", need(80), room(8, host_gb=16), Wish(), None),
    (
        "others' share of the card",
        need(4),
        room(8),
        Wish(gpu_overhead_bytes=7 * GB),
        {"cuda:0": 3, "cpu": 29},
    ),
]


@pytest.mark.parametrize(("name", "what", "where", "wish", "expected"), TABLE)
def test_a_model_goes_where_the_table_says(
    name: str, what: Need, where: Room, wish: Wish, expected: dict[str, int] | None
) -> None:
    assert layers(what, where, wish) == expected


def test_a_gpu_is_made_free_before_the_cpu_is_taken() -> None:
    resident = Resident("old", GB, {"cuda:0": 5 * GB})
    verdict = place(need(6), room(3), [resident], ["old"])
    assert (verdict.fits, verdict.evict) == (True, ("old",))
    assert [part.device for part in verdict.parts] == ["cuda:0"]


def test_a_busy_model_on_the_gpu_is_not_waited_for_while_the_cpu_can_help() -> None:
    resident = Resident("busy", GB, {"cuda:0": 5 * GB})
    verdict = place(need(6), room(3), [resident], [])
    assert verdict.fits and not verdict.evict
    assert [part.device for part in verdict.parts] == ["cuda:0", "cpu"]


def test_who_does_not_fit_beside_a_busy_model_waits_and_who_never_fits_is_told() -> None:
    resident = Resident("busy", 6 * GB)
    host = Room(2 * GB)
    assert place(need(4, host_gb=5), host, [resident], []).must_wait
    verdict = place(need(40, host_gb=50), host, [resident], [])
    assert (verdict.fits, verdict.must_wait) == (False, False)
    assert (verdict.needed_bytes, verdict.available_bytes) == (50 * GB, 8 * GB)


def test_no_more_models_than_allowed() -> None:
    residents = [Resident("a", GB), Resident("b", GB)]
    assert place(need(1), room(), residents, ["a"], 2).evict == ("a",)
    assert place(need(1), room(), residents, [], 2).must_wait
    assert place(need(1), room(), residents, ["a"], 3).evict == ()


def machine(draw: random.Random) -> Room:
    gpus = [draw.choice([0.4, 4, 8, 24, 80]) for _ in range(draw.randrange(4))]
    return room(*gpus, host_gb=draw.choice([2, 8, 64]))


@pytest.mark.parametrize("seed", range(40))
def test_on_every_machine(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        what = need(draw.uniform(0.1, 60), draw.randrange(1, 90))
        where = machine(draw)
        residents = [
            Resident(
                str(number),
                draw.randrange(4 * GB),
                {gpu.id: draw.randrange(4 * GB) for gpu in where.gpus if draw.random() < 0.5},
            )
            for number in range(draw.randrange(4))
        ]
        idle = [each.key for each in residents if draw.random() < 0.6]
        wish = Wish(
            num_gpu=draw.choice([None, None, 0, 5, 999]),
            main_gpu=draw.choice([None, 0, 1]),
            require_gpu=draw.random() < 0.2,
            spread=draw.random() < 0.3,
        )
        verdict = place(what, where, residents, idle, 0, wish)
        assert verdict == place(what, where, residents, idle, 0, wish), "it is deterministic"
        assert set(verdict.evict) <= set(idle)
        if verdict.fits:
            check_capacity(what, where, residents, verdict)
            check_best(what, where, residents, verdict, wish)


def check_capacity(
    what: Need, where: Room, residents: Sequence[Resident], verdict: Verdict
) -> None:
    for resident in residents:
        if resident.key in verdict.evict:
            where = where.without(resident)
    free = {gpu.id: gpu.free_bytes for gpu in where.gpus}
    on_gpus = [part for part in verdict.parts if part.device != "cpu"]
    for part in on_gpus:
        assert part.num_layers * what.layer_bytes + GPU_CONTEXT_BYTES <= free[part.device]
    if verdict.parts:
        assert sum(part.num_layers for part in verdict.parts) == what.num_layers
        on_cpu = what.num_layers - sum(part.num_layers for part in on_gpus)
        assert WORKER_BYTES + on_cpu * what.layer_bytes <= where.host_bytes
    else:
        assert what.host_bytes <= where.host_bytes


def check_best(
    what: Need, where: Room, residents: Sequence[Resident], verdict: Verdict, wish: Wish
) -> None:
    """Never the CPU while a GPU alone could hold it."""
    size = what.num_layers * what.layer_bytes + GPU_CONTEXT_BYTES
    holds = any(gpu.free_bytes >= size for gpu in where.gpus)
    if holds and wish.num_gpu in (None, 999) and where.host_bytes >= WORKER_BYTES:
        assert verdict.parts and all(part.device != "cpu" for part in verdict.parts)
    if wish.require_gpu:
        assert verdict.parts and all(part.device != "cpu" for part in verdict.parts)


def test_the_floor_for_kv_counts() -> None:
    just = (4 * GB + KV_FLOOR_BYTES + GPU_CONTEXT_BYTES) / GB + 1e-6
    assert layers(need(4), room(just)) == {"cuda:0": 32}
    assert layers(need(4), room(just - 0.2)) == {"cuda:0": 30, "cpu": 2}
