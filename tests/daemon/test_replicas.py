"""A busy model gets workers on other GPUs if there are any; nobody waits or leaves for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmd.daemon.devices import Device, Inventory
from llmd.daemon.placement import GPU_CONTEXT_BYTES, KV_FLOOR_BYTES
from llmd.daemon.replicas import BUSY_LEASES, LOOK_PERIOD_S
from llmd.registry.names import ModelName

from ..fakes import run_virtually
from .manager_stage import GB, VirtualStage

SIZES = {"a": 2 * GB, "b": 2 * GB}
ROOM = GPU_CONTEXT_BYTES + KV_FLOOR_BYTES + GB


class Machine(Inventory):
    """So many cards, each with room for one model, and none beside those that are there."""

    def __init__(self, num_cards: int) -> None:
        super().__init__()
        self.num_cards = num_cards
        self.places: Callable[[], list[tuple[str, ...]]] = list

    def probe(self) -> tuple[Device, ...]:
        taken = {device for places in self.places() for device in places}
        names = [f"cuda:{number}" for number in range(self.num_cards)]
        cards = (Device(name, "Card", ROOM, 0 if name in taken else ROOM) for name in names)
        return (*cards, self.host())

    def host(self) -> Device:
        return Device("cpu", "a test", 100 * GB, 50 * GB)


class Cards(VirtualStage):
    def __init__(self, root: Path, num_cards: int, **settings: Any) -> None:
        machine = Machine(num_cards)
        super().__init__(root, SIZES, inventory=machine, **settings)
        machine.places = lambda: self.places

    @property
    def places(self) -> list[tuple[str, ...]]:
        return sorted(model.devices for model in self.manager.loaded())

    async def crowd(self, name: str, count: int) -> list[asyncio.Task[float]]:
        """So many requests that work for a minute."""
        tasks = [asyncio.create_task(self.use(name, 60.0)) for _ in range(count)]
        await asyncio.sleep(5)
        return tasks


def test_a_busy_model_gets_a_worker_on_each_card_up_to_the_limit(tmp_path: Path) -> None:
    async def work() -> None:
        stage = Cards(tmp_path, 3, replicas=2)
        crowd = await stage.crowd("a", BUSY_LEASES - 1)
        assert stage.places == [("cuda:0",)]
        for _ in range(3):
            await asyncio.sleep(LOOK_PERIOD_S)
            crowd += await stage.crowd("a", 1)
        assert stage.places == [("cuda:0",), ("cuda:1",)]
        crowd += await stage.crowd("a", 10)
        leases = sorted(model.num_leases for model in stage.manager.loaded())
        assert leases[0] >= 10, "who comes now goes where there is less to do"
        waits = await asyncio.gather(*crowd)
        assert sorted(waits)[-BUSY_LEASES] == 0.0, "nobody waited for the replica"
        stage.manager.check()
        await stage.manager.unload(ModelName.parse("a"))
        assert stage.places == []
        await stage.close()

    run_virtually(work)


def test_without_a_free_card_nothing_is_evicted_for_a_replica(tmp_path: Path) -> None:
    async def work() -> None:
        stage = Cards(tmp_path, 2, replicas=2)
        await stage.use("b", keep_alive_s=1e6)
        crowd = await stage.crowd("a", BUSY_LEASES)
        await asyncio.sleep(LOOK_PERIOD_S)
        crowd += await stage.crowd("a", 5)
        assert stage.loaded == {"a", "b"} and len(stage.places) == 2
        await asyncio.gather(*crowd)
        await stage.close()

    run_virtually(work)


def test_one_worker_is_enough_unless_more_are_allowed(tmp_path: Path) -> None:
    async def work() -> None:
        stage = Cards(tmp_path, 2)
        crowd = await stage.crowd("a", BUSY_LEASES)
        await asyncio.sleep(LOOK_PERIOD_S)
        crowd += await stage.crowd("a", 5)
        assert len(stage.places) == 1
        await asyncio.gather(*crowd)
        await stage.close()

    run_virtually(work)


def test_a_replica_serves_on_when_the_first_worker_dies_and_leaves_when_it_is_idle(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        stage = Cards(tmp_path, 2, replicas=2)
        first = stage.spawner.alive
        crowd = await stage.crowd("a", BUSY_LEASES)
        one = first["a:latest"]
        await asyncio.sleep(LOOK_PERIOD_S)
        crowd += await stage.crowd("a", 1)
        assert len(stage.places) == 2
        one.die()
        await asyncio.sleep(0.1)
        assert await stage.use("a") == 0.0, "nobody waits for a load while a replica is ready"
        await asyncio.gather(*crowd)
        await asyncio.sleep(3600)
        assert stage.places == [], "each goes when its own time is over"
        await stage.close()

    run_virtually(work)
