"""ModelManager in virtual time: who is loaded when, who has to go, who waits for whom."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from llmd.backend.protocol import Stats
from llmd.daemon.devices import Device, Inventory
from llmd.daemon.errors import DiedInLoad, LoadFailed, NoMemory, ServerBusy
from llmd.daemon.holdoff import FIRST_S, HoldOff
from llmd.daemon.manager import PATIENCE_S, ModelManager
from llmd.daemon.settings import Settings
from llmd.registry.errors import ModelNotFound
from llmd.registry.names import ModelName

from ..fakes import FakeSpawner, gathered, run_virtually
from .manager_stage import GB, VirtualStage

# What the manager thinks that a model of the test store needs before it was ever loaded.
SIZES = {"a": 2 * GB, "b": 2 * GB, "c": 2 * GB}


class HostOf(Inventory):
    """A machine without a GPU and with so much free memory."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        super().__init__()
        self._free_bytes = free_bytes

    def probe(self) -> tuple[Device, ...]:
        return (self.host(),)

    def host(self) -> Device:
        return Device("cpu", "a test", 100 * GB, max(self._free_bytes(), 0))


def test_requests_of_the_same_tick_share_one_load(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        waits = await asyncio.gather(*(stage.use("a") for _ in range(20)))
        assert stage.loads == ["a"]
        assert waits == [2.0] * 20
        await stage.close()

    run_virtually(work)


def test_models_that_fit_are_loaded_side_by_side(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        waits = await asyncio.gather(*(stage.use(name) for name in "abc"))
        assert waits == [2.0, 2.0, 2.0]
        assert stage.loaded == {"a", "b", "c"}
        await stage.close()

    run_virtually(work)


def test_a_ready_model_never_waits_behind_a_load_or_an_eviction(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=2)
        await stage.use("b")
        await stage.use("a")
        loading = asyncio.create_task(stage.use("c"))  # b has to go first
        waits = []
        while not loading.done():
            waits.append(await stage.use("a"))
            await asyncio.sleep(0.1)
        assert len(waits) > 10 and set(waits) == {0.0}
        assert stage.loaded == {"a", "c"}
        await stage.close()

    run_virtually(work)


def test_random_requests_over_ten_minutes_load_as_rarely_as_lru_allows(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=2)
        draw = random.Random(5)
        cached: OrderedDict[str, None] = OrderedDict()
        misses = 0
        for _ in range(200):
            name = draw.choice("aaabbc")
            misses += name not in cached
            cached[name] = None
            cached.move_to_end(name)
            if len(cached) > 2:
                cached.popitem(last=False)
            await stage.use(name, work_s=0.5)
            await asyncio.sleep(draw.uniform(0, 2))
            assert stage.loaded == set(cached)
            stage.manager.check()
        assert len(stage.loads) == misses
        await stage.close()

    run_virtually(work)


def test_crowds_never_exceed_the_memory_and_nobody_fails(tmp_path: Path) -> None:
    async def work() -> None:
        sizes = dict.fromkeys("abc", int(1.2 * GB))  # the first estimate is a little above
        stage = VirtualStage(tmp_path, sizes, memory_limit_bytes=int(2.7 * GB), dtype="float32")
        draw = random.Random(11)
        most = 0

        async def client() -> None:
            nonlocal most
            for _ in range(10):
                await asyncio.sleep(draw.uniform(0, 5))
                await stage.use(draw.choice("abc"), work_s=draw.uniform(0, 3))
                most = max(most, stage.spawner.used_bytes)
                stage.manager.check()

        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(12))), 3600)
        assert 2 * GB < most <= 2.7 * GB
        await stage.close()

    run_virtually(work)


def test_clients_that_leave_at_random_leave_no_lease_and_no_load(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=2)
        draw = random.Random(3)
        tasks = []
        for _ in range(150):
            tasks.append(asyncio.create_task(stage.use(draw.choice("abc"), draw.uniform(0, 2))))
            await asyncio.sleep(draw.uniform(0, 1))
            if draw.random() < 0.5:
                draw.choice(tasks).cancel()
            stage.manager.check()
        results = await gathered(*tasks)
        bad = [r for r in results if not isinstance(r, float | asyncio.CancelledError)]
        assert not bad
        assert repr(stage.manager).endswith("| 0 leases>")
        await stage.close()

    run_virtually(work)


def test_the_last_who_wanted_a_load_ends_it_and_the_next_one_loads_afresh(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        first = asyncio.create_task(stage.use("a"))
        await asyncio.sleep(0.5)
        first.cancel()
        second = asyncio.create_task(stage.use("a"))  # while the first load is being ended
        assert await second == pytest.approx(2.0)
        assert stage.loads == ["a", "a"]
        await stage.close()

    run_virtually(work)


def test_one_who_leaves_does_not_end_the_load_of_another(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        first, second = (asyncio.create_task(stage.use("a")) for _ in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second == pytest.approx(2.0)
        assert stage.loads == ["a"]
        await stage.close()

    run_virtually(work)


@pytest.mark.parametrize(("keep_alive_s", "stays_s"), [(None, 300), (60, 60), (0, 0), (1.5, 1.5)])
def test_an_idle_model_stays_as_long_as_it_was_told(
    tmp_path: Path, keep_alive_s: float | None, stays_s: float
) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        await stage.use("a", keep_alive_s=keep_alive_s)
        if stays_s:
            await asyncio.sleep(stays_s - 0.1)
            assert stage.loaded == {"a"}
        await asyncio.sleep(0.2)
        assert stage.loaded == set()
        assert stage.manager.history()[-1].reason == "keep_alive is over"
        await stage.close()

    run_virtually(work)


def test_a_model_that_is_kept_forever_outlives_a_year(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=2)
        await stage.use("a", keep_alive_s=math.inf)
        await asyncio.sleep(365 * 86400)
        assert stage.loaded == {"a"}
        assert stage.manager.loaded()[0].expires_at is None
        await stage.use("b")
        await stage.use("c")
        assert stage.loaded == {"a", "c"}, "it gives way last"
        await stage.close()

    run_virtually(work)


def test_keep_alive_zero_while_busy_unloads_at_the_end_and_not_before(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        long = asyncio.create_task(stage.use("a", work_s=10))
        await asyncio.sleep(4)
        await stage.use("a", keep_alive_s=0)
        assert stage.loaded == {"a"}
        await long
        await asyncio.sleep(0.1)
        assert stage.loaded == set()
        await stage.close()

    run_virtually(work)


def test_a_busy_model_is_waited_for_and_not_ended(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=1)
        busy = asyncio.create_task(stage.use("a", work_s=30))
        await asyncio.sleep(5)
        waited = await stage.use("b")
        assert busy.done() and busy.result() == 2.0
        assert waited == pytest.approx(27 + 0.5 + 2.0)
        await stage.close()

    run_virtually(work)


def test_a_model_that_never_fits_is_refused_with_both_sizes(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, memory_limit_bytes=GB // 2)
        with pytest.raises(NoMemory, match=r"needs about 0\.6 GB and llmd may use 0\.5 GB"):
            await stage.use("a")
        assert stage.loads == []
        await stage.close()

    run_virtually(work)


def test_memory_that_other_programs_hold_is_not_taken(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        spawner = FakeSpawner({f"{name}:latest": size for name, size in SIZES.items()})
        others = [0]
        manager = ModelManager(
            Settings(models=tmp_path),
            stage.store,
            spawner,
            clock=asyncio.get_running_loop().time,
            inventory=HostOf(lambda: 5 * GB - spawner.used_bytes - others[0]),
        )
        manager._memory.limit_bytes = 100 * GB
        async with manager.lease(ModelName.parse("a")):
            others[0] = 2 * GB  # a and b together would no longer fit
        async with manager.lease(ModelName.parse("b")):
            pass
        assert [model.manifest.name.model for model in manager.loaded()] == ["b"]
        await manager.shutdown()

    run_virtually(work)


def test_what_a_model_took_is_remembered_once_its_worker_has_told_it(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, {"a": 0})  # it has told no figures yet
        await stage.use("a")
        (digest,) = (model.digest for model in stage.store.list())
        path = tmp_path / "derived" / digest / "memory.json"
        assert not path.exists(), "the size of its files is no measure"
        stage.spawner.alive["a:latest"].stats = Stats(rss_bytes=3 * GB)
        await stage.manager.unload(ModelName.parse("a"))
        assert json.loads(path.read_text()) == {"auto": 3 * GB}
        await stage.close()

    run_virtually(work)


def test_a_load_that_waits_for_a_busy_model_is_passed_by_smaller_ones_but_not_for_ever(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        sizes = {"busy": 2 * GB, "large": 2 * GB, "small": GB // 4, "late": GB // 4}
        stage = VirtualStage(tmp_path, sizes, memory_limit_bytes=3 * GB)
        for name in ("large", "small", "late"):  # their sizes are known from now on
            await stage.use(name, keep_alive_s=0)
        await asyncio.sleep(1)
        busy = asyncio.create_task(stage.use("busy", work_s=60))
        await asyncio.sleep(5)
        large = asyncio.create_task(stage.use("large", work_s=30))
        await asyncio.sleep(1)
        assert await stage.use("small", keep_alive_s=0) == pytest.approx(2.0)
        await asyncio.sleep(PATIENCE_S)
        late = await stage.use("late")
        assert busy.done(), "nobody passes it any more"
        assert late > 30
        assert await large > 50
        await stage.close()

    run_virtually(work)


def test_an_idle_model_leaves_when_other_programs_need_the_memory(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        spawner = FakeSpawner({f"{name}:latest": size for name, size in SIZES.items()})
        free = [20 * GB]
        manager = ModelManager(
            Settings(models=tmp_path),
            stage.store,
            spawner,
            clock=asyncio.get_running_loop().time,
            inventory=HostOf(lambda: free[0]),
        )
        for name in "ab":
            async with manager.lease(ModelName.parse(name)):
                await asyncio.sleep(1)
        async with manager.lease(ModelName.parse("c")):
            free[0] = GB
            for _ in range(40):
                await asyncio.sleep(0.5)
                spawner.alive["c:latest"].tell()
            left = [entry for entry in manager.history() if entry.event == "unloaded"]
            assert [entry.model for entry in left] == ["a:latest", "b:latest"]
            assert left[0].reason == "other programs need memory: 1.0 GB are free"
            assert [model.manifest.name.model for model in manager.loaded()] == ["c"]
        await manager.shutdown()

    run_virtually(work)


def test_a_model_that_works_between_its_deaths_is_not_held_off() -> None:
    hold_off = HoldOff()
    for now in range(20):
        hold_off.died("a", float(now), "killed")
        hold_off.worked("a")
        assert hold_off.held_s("a", float(now)) == 0
    for now in range(20, 23):
        hold_off.died("a", float(now), "killed")
    assert hold_off.held_s("a", 23.0) > 0


def test_a_failed_load_tells_all_who_wait_and_is_tried_again(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        stage.spawner.failure = LoadFailed("no such tensor")
        results = await gathered(*(stage.use("a") for _ in range(5)))
        assert [str(result) for result in results] == ["no such tensor"] * 5
        assert stage.loads == ["a"]
        stage.spawner.failure = None
        assert await stage.use("a") == 2.0
        with pytest.raises(ModelNotFound):
            await stage.use("nothing")
        await stage.close()

    run_virtually(work)


def test_exactly_the_overflow_of_the_queue_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        results = await gathered(*(stage.use("a") for _ in range(600)))
        refused = [result for result in results if isinstance(result, ServerBusy)]
        assert len(refused) == 600 - 512
        assert results.count(2.0) == 512
        assert refused[0].retry_after_s >= 1
        assert "maximum pending requests exceeded" in str(refused[0])
        await stage.close()

    run_virtually(work)


def test_a_model_that_keeps_dying_is_held_off_and_others_are_not(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        for _ in range(3):
            await stage.use("a")
            stage.spawner.alive["a:latest"].die()
            await asyncio.sleep(0.1)
        with pytest.raises(LoadFailed, match=r"died 3 times in a row and is held off for 5 s"):
            await stage.use("a")
        assert await stage.use("b") == 2.0
        await asyncio.sleep(FIRST_S)
        assert await stage.use("a") == 2.0
        assert [entry.event for entry in stage.manager.history()].count("died") == 3
        await stage.close()

    run_virtually(work)


def test_a_model_whose_loads_die_is_held_off_and_one_that_says_why_is_not(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        for failure in (LoadFailed("no such tensor"), DiedInLoad("ended (signal 9)")):
            stage.spawner.failure = failure
            for _ in range(3):
                with pytest.raises(LoadFailed, match=re.escape(str(failure))):
                    await stage.use("a")
        assert len(stage.loads) == 6
        with pytest.raises(LoadFailed, match=r"died 3 times in a row .* 5 s; the last time: ended"):
            await stage.use("a")
        assert len(stage.loads) == 6, "and nothing was started"
        stage.spawner.failure = None
        assert await stage.use("b") == 2.0
        await asyncio.sleep(FIRST_S)
        assert await stage.use("a") == 2.0
        await stage.close()

    run_virtually(work)


def test_a_death_under_a_lease_while_another_waits_for_room_is_no_deadlock(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES, max_loaded_models=1)
        name = ModelName.parse("a")
        async with stage.manager.lease(name) as lease:
            waiting = asyncio.create_task(stage.use("b"))
            await asyncio.sleep(1)
            stage.spawner.alive["a:latest"].die()
            await stage.manager.worker_for(lease.manifest)
        assert await waiting > 0
        await stage.close()

    run_virtually(work)


def test_shutdown_answers_who_waits_for_a_load(tmp_path: Path) -> None:
    async def work() -> None:
        stage = VirtualStage(tmp_path, SIZES)
        waiting = asyncio.create_task(stage.use("a"))
        await asyncio.sleep(0.5)
        await stage.manager.shutdown()
        (result,) = await gathered(waiting)
        assert str(result) == "llmd is shutting down"
        await stage.close()

    run_virtually(work)
