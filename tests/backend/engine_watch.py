"""A scheduler that asserts, at each change, what must be true of changes.

The invariants of a state are in backend/engine/invariants.py; here are those that compare a state
with the one before:

    I5   a held block keeps its key, and is never handed out
    I8   a table only grows at its end
    I11  what is refused changes nothing
    I12  blank blocks are reused before cached ones; of one table, the tail before the head
    I13  a sequence that ends leaves the pool as if it had never held a block
    I16  reset refuses exactly while a block is in use, and finds nothing afterwards
    I18  a step makes progress

I14 (preempt and resume give the same text) is asserted by whoever knows the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ids
from typing import Any

from llmd.backend.engine.batch import Batch, StepResult
from llmd.backend.engine.block_pool import BlockPool, OutOfBlocks
from llmd.backend.engine.plan import Plan
from llmd.backend.engine.scheduler import Advance, Scheduler, SchedulerConfig
from llmd.backend.engine.sequence import EngineRequest, Sequence, Span

MAX_IDLE_STEPS = 3  # plans and results without a token computed, before I18 is broken


class WatchedPool(BlockPool):
    """Asserts I5, I11, I12 and I16."""

    def state(self) -> tuple[Any, ...]:
        return (
            tuple(self._ref_counts),
            tuple(self._keys),
            dict(self._published),
            tuple(self._blank),
            tuple(self._cached),
            self.num_blocks,
        )

    def allocate(self, count: int) -> list[int]:
        before = self.state()
        try:
            taken = super().allocate(count)
        except OutOfBlocks:
            assert self.state() == before, "I11: a refused allocation changed the pool"
            raise
        ref_counts, keys, _, blank, cached, _ = before
        assert len(set(taken)) == count, "I5: a block is handed out twice"
        for block_id in taken:
            assert ref_counts[block_id] == 0, f"I5: block {block_id} is held and handed out"
        self._keys_are_kept(ref_counts, keys)
        forgotten = [block_id for block_id in taken if keys[block_id] is not None]
        assert forgotten == list(cached[: len(forgotten)]), "I12: not the longest idle went first"
        free_blank = min(len(blank), max(self.num_blocks - len(cached) - _held(ref_counts), 0))
        assert not forgotten or count - len(forgotten) == free_blank, "I12: cached before blank"
        return taken

    def publish(self, block_id: int, key: bytes) -> None:
        before = self._keys[block_id]
        super().publish(block_id, key)
        after = self._keys[block_id]
        assert before in (None, after), f"I5: the key of held block {block_id} changed"

    def release(self, block_table: Ids[int]) -> None:
        ref_counts, keys, _, _, cached, _ = self.state()
        super().release(block_table)
        self._keys_are_kept(self._ref_counts, keys)
        freed = [b for b in self._cached if b not in cached and ref_counts[b] > 0]
        tail_first = [b for b in reversed(block_table) if b in freed]
        assert freed == tail_first, "I12: the head of a table would be reused before its tail"

    def reset(self) -> bool:
        before, was_busy = self.state(), self.num_in_use > 0
        done = super().reset()
        assert done != was_busy, "I16: reset, and a block in use"
        if done:
            assert not self._published, "I16: a prefix is found after reset"
        else:
            assert self.state() == before, "I16: a refused reset changed the pool"
        return done

    def _keys_are_kept(self, ref_counts: Ids[int], keys: Ids[bytes | None]) -> None:
        for block_id, count in enumerate(ref_counts):
            if count and keys[block_id] is not None:
                is_kept = self._keys[block_id] == keys[block_id]
                assert is_kept, f"I5: held block {block_id} lost its key"


class WatchedScheduler(Scheduler):
    """Asserts I8, I11, I13 and I18, over a WatchedPool."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.pool: WatchedPool = WatchedPool(config.num_blocks)
        self.tables.pool = self.pool
        self._tables: dict[tuple[str, int], list[Span]] = {}
        self._num_idle = 0

    def state(self) -> tuple[Any, ...]:
        return (
            self.pool.state(),
            [(seq.id, repr(seq), seq.row, tuple(seq.block_ids)) for seq in self._running],
            [(seq.id, repr(seq), seq.row) for seq in self._waiting],
            tuple(self._free_rows),
            tuple(self._released_rows),
        )

    def add(self, request: EngineRequest, now: float) -> None:
        before = self.state()
        try:
            super().add(request, now)
        except Exception:
            assert self.state() == before, "I11: a refused sequence left something behind"
            raise

    def _admit(
        self, sequence: Sequence, hits: list[Span], twin: Sequence | None, plan: Plan
    ) -> bool:
        before = self.state()
        is_admitted = super()._admit(sequence, hits, twin, plan)
        assert is_admitted or self.state() == before, "I11: a refused admission changed something"
        return is_admitted

    def cancel(self, id: str) -> Sequence | None:
        refs = Counter(dict(enumerate(self.pool._ref_counts)))
        held = Counter(self._sequences[id].block_ids if id in self._sequences else ())
        sequence = super().cancel(id)
        refs.subtract(held)
        left = Counter(dict(enumerate(self.pool._ref_counts)))
        assert left == refs, f"I13: {id} was cancelled and its blocks were not"
        return sequence

    def schedule(self, now: float) -> Batch | None:
        batch = super().schedule(now)
        self.watch_tables()
        if batch is None and self._running and not self._in_flight:
            self._num_idle += 1
        self._assert_progress()
        return batch

    def update(self, result: StepResult, now: float) -> list[Advance]:
        before = sum(seq.num_computed for seq in self._running), self.num_preemptions
        advances = super().update(result, now)
        after = sum(seq.num_computed for seq in self._running), self.num_preemptions
        self._num_idle = 0 if advances or after != before else self._num_idle + 1
        self._assert_progress()
        return advances

    def watch_tables(self) -> None:
        """Compare each running table with what it was: it grew, and its beginning may have lost the
        windowed groups' blocks."""
        tables = {(seq.id, seq.num_lives): list(seq.block_table) for seq in self._running}
        for life, table in tables.items():
            for before, after in zip(self._tables.get(life, []), table, strict=False):
                is_kept = before[: len(after)] == after
                assert is_kept, f"I8: the table of {life} changed its beginning"
            is_whole = len(table) >= len(self._tables.get(life, []))
            assert is_whole, f"I8: the table of {life} became shorter"
        self._tables = tables

    def _assert_progress(self) -> None:
        assert self._num_idle <= MAX_IDLE_STEPS, f"I18: no progress: {self!r}"


def _held(ref_counts: Ids[int]) -> int:
    return sum(1 for count in ref_counts if count)
