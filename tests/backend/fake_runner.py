"""A runner without tensors: the next id is a hash of all tokens before it.

It keeps its own copy of what each block holds, as the real one does, and computes an id only from
what it finds through the block table; so a wrong table, a wrong slot or a stale block changes ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from llmd.backend.engine.batch import Batch, Chunk, StepResult


def next_id(token_ids: Sequence[int], vocab_size: int = 50) -> int:
    """What the model says after these tokens."""
    digest = blake2b(",".join(map(str, token_ids)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


class FakeRunner:
    """Executes batches on integers. `fail_at` names steps that raise."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.batches: list[Batch] = []
        self.fail_at: set[int] = set()

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        for start in batch.starts:
            self.tables[start.row] = []
            self.tokens[start.row] = list(start.token_ids)
        if batch.step in self.fail_at:
            raise RuntimeError("the runner was told to fail")
        written: set[int] = set()
        return StepResult(batch.step, tuple(self._run(chunk, written) for chunk in batch.chunks))

    def _run(self, chunk: Chunk, written: set[int]) -> tuple[int, ...]:
        table = self.tables[chunk.row]
        table.extend(chunk.new_blocks)
        tokens = self.tokens[chunk.row]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            slot = self._slot(table, position)
            assert slot not in written, "two rows write one slot"
            written.add(slot)
            self.slots[slot] = tokens[position]
        if not chunk.samples:
            return ()
        end = chunk.start + chunk.num_tokens
        seen = [self.slots[self._slot(table, position)] for position in range(end)]
        assert seen == tokens[:end], "the cache does not hold the sequence's tokens"
        token_id = next_id(tokens[:end], self.vocab_size)
        tokens.append(token_id)
        return (token_id,)

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
