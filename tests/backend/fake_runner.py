"""A runner without tensors: the next id is a hash of all tokens before it.

It keeps its own copy of what each block holds, as the real one does, and computes an id only from
what it finds through the block table; so a wrong table, a wrong slot or a stale block changes ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from llmd.backend.engine.batch import Batch, BlockGroups, Chunk, StepResult


def next_id(token_ids: Sequence[int], vocab_size: int = 50) -> int:
    """What the model says after these tokens."""
    digest = blake2b(",".join(map(str, token_ids)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


class FakeRunner:
    """Executes batches on integers. `fail_at` names steps that raise.

    With `groups`, each group of layers writes its own blocks; a windowed one must find the window's
    tokens there, and may find anything before it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        groups: BlockGroups | None = None,
    ) -> None:
        self.block_size = block_size
        self.groups = groups or BlockGroups()
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.batches: list[Batch] = []
        self.fail_at: set[int] = set()
        self.lost: set[int] = set()  # rows of a failed step: what was planned on it is void

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        self._take_rows(batch)
        if batch.step in self.fail_at:
            self.lost.update(chunk.row for chunk in batch.chunks)
            raise RuntimeError("the runner was told to fail")
        written: set[int] = set()
        return StepResult(batch.step, tuple(self._run(chunk, written) for chunk in batch.chunks))

    def _take_rows(self, batch: Batch) -> None:
        for row in batch.releases:
            del self.tables[row], self.tokens[row]
        for source, target in batch.copies:
            size = self.block_size
            held = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = held
        for start in batch.starts:
            self.tables[start.row] = []
            self.tokens[start.row] = list(start.token_ids)
            self.lost.discard(start.row)

    def next_id(self, token_ids: Sequence[int]) -> int:
        """The model; a test may put another in its place."""
        return next_id(token_ids, self.vocab_size)

    def _run(self, chunk: Chunk, written: set[int]) -> tuple[int, ...]:
        if chunk.row in self.lost:
            return (0,) if chunk.samples else ()
        table = self.tables[chunk.row]
        table.extend(chunk.new_blocks)
        tokens = self.tokens[chunk.row]
        end = chunk.start + chunk.num_tokens
        ids = (*tokens[chunk.start : end], *chunk.draft_ids)
        for position, token_id in enumerate(ids, chunk.start):
            for group in range(self.groups.num_groups):
                slot = self._slot(table, position, group)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = token_id
            if self.groups.num_windowed:  # what has left the window later was there now
                self._assert_seen(table, [*tokens[: chunk.start], *ids], position)
        if not chunk.samples:
            return ()
        assert end == len(tokens), "a chunk that samples ends with the last known token"
        drawn: list[int] = []
        for draft in (*chunk.draft_ids, None):
            self._assert_seen(table, tokens, len(tokens) - 1)
            drawn.append(self.next_id(tokens))
            tokens.append(drawn[-1])
            if draft != drawn[-1]:
                break
        return tuple(drawn)

    def _assert_seen(self, table: Sequence[int], tokens: Sequence[int], last: int) -> None:
        """Each group's layers find what they look at when they compute the token at `last`."""
        groups = self.groups
        for group in range(groups.num_groups):
            is_windowed = group >= groups.num_full
            first = max(last - groups.window + 1, 0) if is_windowed else 0
            slots = [self._slot(table, position, group) for position in range(first, last + 1)]
            seen = [self.slots[slot] for slot in slots]
            wanted = list(tokens[first : last + 1])
            assert seen == wanted, f"group {group} does not hold the sequence's tokens"

    def _slot(self, table: Sequence[int], position: int, group: int) -> int:
        span, offset = divmod(position, self.block_size)
        return table[span * self.groups.num_groups + group] * self.block_size + offset


class PipelinedFakeRunner(FakeRunner):
    """The same, two steps deep. `is_eager` runs a step as it is handed over, else when asked for:
    the two ends of what a device may do in between."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        is_eager: bool = False,
        groups: BlockGroups | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, groups=groups)
        self.is_eager = is_eager
        self.most_in_flight = 0
        self.num_in_flight = 0

    def submit(self, batch: Batch) -> PendingStep:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return PendingStep(self, batch, self.execute(batch) if self.is_eager else None)


@dataclass
class PendingStep:
    runner: PipelinedFakeRunner
    batch: Batch
    done: StepResult | None

    def result(self) -> StepResult:
        self.runner.num_in_flight -= 1
        return self.done or self.runner.execute(self.batch)
