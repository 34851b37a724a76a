"""When KV memory is given back, and what of it is found again; a runner that computes integers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llmd.backend.engine.engine import Engine
from llmd.backend.kv_memory import IDLE_S, KVMemory
from llmd.backend.runner.prefix_files import PrefixFiles

from .fake_runner import FakeRunner
from .test_scheduler import BLOCK, drain, expected, make_engine, request

NUM_BLOCKS = 32
BLOCK_BYTES = BLOCK  # a token is a byte
PROMPT = list(range(1, 31))


class FakePages:
    """The runner's slots as bytes. What was released reads as zeros."""

    block_bytes = BLOCK_BYTES

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._held: set[int] = set()
        self.num_releases = 0

    @property
    def num_bytes(self) -> int:
        written = {index // BLOCK for index, slot in enumerate(self._runner.slots) if slot}
        return len(written | self._held) * BLOCK_BYTES

    def touched(self, block_ids: Iterable[int]) -> list[int]:
        return [block_id for block_id in block_ids if any(self.view(block_id))]

    def touch(self, block_ids: Iterable[int]) -> None:
        self._held.update(block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.num_releases += 1
            self._held.discard(block_id)
            self._runner.slots[block_id * BLOCK : (block_id + 1) * BLOCK] = [None] * BLOCK

    def view(self, block_id: int) -> memoryview:
        slots = self._runner.slots[block_id * BLOCK : (block_id + 1) * BLOCK]
        return memoryview(bytes(slot or 0 for slot in slots))

    def write(self, block_id: int, content: memoryview) -> None:
        self._runner.slots[block_id * BLOCK : (block_id + 1) * BLOCK] = list(content)


def stage(folder: Path | None) -> tuple[Engine, FakePages, KVMemory]:
    engine, runner, _ = make_engine(NUM_BLOCKS)
    pages = FakePages(runner)
    files = PrefixFiles(folder, b"meaning", 10_000) if folder is not None else None
    return engine, pages, KVMemory(engine, pages, files)


def rest(memory: KVMemory, now: float = 100.0) -> None:
    memory.rest(now)
    while memory.rest(now + IDLE_S):
        pass


def test_at_rest_nothing_is_held_and_the_prefixes_are_on_disk(tmp_path: Path) -> None:
    engine, pages, memory = stage(tmp_path)
    engine.add(request("a", PROMPT))
    drain(engine)
    assert pages.num_bytes >= len(PROMPT) // BLOCK * BLOCK
    memory.rest(100.0)
    assert engine.stats().blocks_cached > 0, "a pause between two questions is no rest"
    rest(memory)
    assert pages.num_bytes == 0
    assert engine.stats().blocks_cached == 0
    assert memory.saved_bytes > 0
    releases = pages.num_releases
    rest(memory, 200.0)
    assert pages.num_releases == releases, "there is nothing to give back twice"


def test_the_next_life_finds_what_was_saved_and_says_the_same(tmp_path: Path) -> None:
    engine, _, memory = stage(tmp_path)
    engine.add(request("a", PROMPT))
    drain(engine)
    memory.save_all()

    engine, _, memory = stage(tmp_path)
    longer = [*PROMPT, 41, 42]
    restored = memory.saved_for(longer, "", "")
    assert restored is not None
    memory.restore(restored)
    engine.add(request("b", longer))
    outputs = engine.step()
    assert outputs[0].num_cached_tokens == len(PROMPT) // BLOCK * BLOCK
    assert [*outputs[0].token_ids, *drain(engine)["b"]] == expected(longer, 8)
    assert memory.saved_for(longer, "", "") is None, "what is in memory is not read"


def test_prefixes_of_another_salt_are_not_found(tmp_path: Path) -> None:
    engine, _, memory = stage(tmp_path)
    engine.add(request("a", PROMPT, cache_salt="one"))
    drain(engine)
    memory.save_all()
    assert memory.saved_for([*PROMPT, 1], "", "two") is None
    assert memory.saved_for([*PROMPT, 1], "", "") is None


def test_without_a_disk_budget_prefixes_stay_until_the_budget_takes_them() -> None:
    engine, pages, memory = stage(None)
    engine.add(request("a", PROMPT))
    drain(engine)
    rest(memory)
    cached = engine.stats().blocks_cached
    assert cached >= len(PROMPT) // BLOCK
    memory.set_budget(2 * BLOCK_BYTES)
    assert engine.stats().blocks_cached == 2
    assert pages.num_bytes == 2 * BLOCK_BYTES


def test_a_prompt_beyond_the_present_budget_waits_and_one_beyond_all_does_not() -> None:
    _, _, memory = stage(None)
    memory.set_budget(4 * BLOCK_BYTES)
    assert not memory.must_wait(3 * BLOCK)
    assert memory.must_wait(4 * BLOCK)
    assert not memory.must_wait(NUM_BLOCKS * BLOCK), "it can never fit: the engine refuses it"
    assert memory.wanted_bytes([6 * BLOCK]) >= 7 * BLOCK_BYTES
    memory.set_budget(10**9)
    assert not memory.must_wait(4 * BLOCK)
