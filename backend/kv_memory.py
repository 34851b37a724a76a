"""How much of the machine's memory the KV cache holds, and when it is given back.

    BLANK blocks      given back when the budget shrinks, and when the engine has been idle
    CACHED blocks     kept while the engine works; after IDLE_S of rest they are saved to disk
                      (prefix_files.py) and given back; the least recently used go when the budget
                      shrinks. Without a disk budget they stay until the budget takes them
    blocks IN USE     stay

A prompt whose beginning was saved gets it back before it is admitted: the reader thread reads the
files (`saved_for`), the engine thread copies them into blocks (`restore`).

A prompt that is larger than the budget allows *now*, but not than what the cache could ever hold,
waits here, and the daemon is told what is wanted; it answers with a budget.

Owner: the engine thread, but for `saved_for`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .engine.engine import Engine
from .resident import give_back
from .runner.prefix_files import KEY_BYTES, PrefixFiles

log = logging.getLogger("llmd.worker")

IDLE_S = 3.0  # a chat's next turn often comes sooner than that; what waits longer is read back
SLICE_BLOCKS = 16  # saved between two looks into the inbox
GROWTH_BLOCKS = 4  # for each running sequence, asked for ahead


class Pages(Protocol):
    """The tensors' side: memory that can be given back block by block."""

    block_bytes: int

    @property
    def num_bytes(self) -> int: ...
    def touched(self, block_ids: Iterable[int]) -> list[int]: ...
    def touch(self, block_ids: Iterable[int]) -> None: ...
    def release(self, block_ids: Iterable[int]) -> None: ...
    def view(self, block_id: int) -> memoryview: ...
    def write(self, block_id: int, content: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """Blocks that were read from disk for the prompt that follows."""

    blocks: tuple[tuple[bytes, memoryview], ...]


class KVMemory:
    """Of one model. `files` None: nothing is saved."""

    def __init__(
        self,
        engine: Engine,
        pages: Pages,
        files: PrefixFiles | None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """`let_go` has the runner hold nothing that only a running step needs."""
        self._engine = engine
        self._pages = pages
        self._files = files
        self._let_go = let_go
        # All the mutable state.
        self._capacity = engine.num_blocks  # what was mapped; budgets are at most this
        self._idle_since: float | None = None
        self._is_rested = False  # everything that may be given back was

    def __repr__(self) -> str:
        return f"<KVMemory {self._pages.num_bytes} bytes, saved: {self._files!r}>"

    @property
    def num_bytes(self) -> int:
        """Physical memory that the cache holds now."""
        return self._pages.num_bytes

    @property
    def saved_bytes(self) -> int:
        """Of prefixes on disk."""
        return self._files.num_bytes if self._files is not None else 0

    # ------------------------------------------------------------------ budget

    def set_budget(self, budget_bytes: int) -> None:
        """Hold at most this. Prefixes beyond it are forgotten, their memory given back at once."""
        num_blocks = max(1, min(budget_bytes // self._pages.block_bytes, self._capacity))
        self._engine.set_num_blocks(num_blocks)
        self.trim()

    def trim(self) -> None:
        """Give back the blank blocks that would make the cache hold more than its budget."""
        budget_bytes = self._engine.num_blocks * self._pages.block_bytes
        surplus = (self._pages.num_bytes - budget_bytes) // self._pages.block_bytes
        if surplus > 0:
            self._pages.release(self._pages.touched(self._engine.blank_ids)[-surplus:])

    def must_wait(self, num_tokens: int) -> bool:
        """So many tokens fit the cache, but not its present budget."""
        blocks = self._engine.blocks_for(num_tokens + 1)
        return self._engine.num_blocks < blocks <= self._capacity

    def wanted_bytes(self, held_tokens: Sequence[int]) -> int:
        """What the daemon should grant so that what runs can go on and what waits can begin."""
        stats = self._engine.stats()
        blocks = stats.blocks_in_use + GROWTH_BLOCKS * (stats.running + stats.waiting)
        if stats.waiting:
            blocks += stats.blocks_in_use // max(stats.running, 1) * min(stats.waiting, 8)
        if held_tokens:
            blocks += self._engine.blocks_for(max(held_tokens) + 1)
        return min(blocks, self._capacity) * self._pages.block_bytes

    # -------------------------------------------------------------------- rest

    def worked(self) -> None:
        """The engine has just had work."""
        self._idle_since = None
        self._is_rested = False

    def rest(self, now: float) -> bool:
        """The engine has nothing to do. True: there is more to give back, call again soon."""
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < IDLE_S:
            return False
        if self._is_rested:
            return False
        if self._files is not None and self._save_and_forget(SLICE_BLOCKS):
            return True
        self._pages.release(self._pages.touched(self._engine.blank_ids))
        self._let_go()
        give_back()
        self._is_rested = True
        return False

    def seconds_to_rest(self, now: float) -> float:
        """Until `rest` has something to do."""
        if self._is_rested:
            return math.inf
        since = now if self._idle_since is None else self._idle_since
        return max(since + IDLE_S - now, 0.0)

    def save_all(self) -> None:
        """The worker ends: what is known and not saved yet is saved, as far as the budget goes."""
        while self._files is not None and self._save_and_forget(SLICE_BLOCKS):
            pass

    def _save_and_forget(self, count: int) -> bool:
        """Save the hottest prefixes, a slice at a time, then forget all. True: not done yet.

        Hottest first, because they are what the budget is for; forgotten at the end and together,
        because the pool forgets the coldest first.
        """
        assert self._files is not None
        num_saved, num_left = 0, self._files.budget_blocks(self._pages.block_bytes)
        for key, block_id in reversed(self._engine.cached_keys):
            if num_left == 0:
                break
            num_left -= 1
            if key in self._files:
                continue
            if num_saved == count:
                return True
            if not self._files.save(key, self._pages.view(block_id)):
                break
            num_saved += 1
        self._engine.reset_prefix_cache()
        return False

    # ------------------------------------------------------------------ return

    def saved_for(self, token_ids: Sequence[int], adapter: str, salt: str) -> Restored | None:
        """What of these tokens is saved and not in memory. On the reader thread.

        The look into the engine's index is a race without consequence: a block that is read and
        known meanwhile is dropped, one that is forgotten meanwhile is computed.
        """
        if self._files is None:
            return None
        blocks: list[tuple[bytes, memoryview]] = []
        for key in self._engine.prefix_keys(token_ids, adapter, salt):
            if self._engine.knows(key):
                continue
            block = self._files.read(key, self._pages.block_bytes)
            if block is not None:
                blocks.append((key, block))
            elif len(key) == KEY_BYTES:
                break  # windowed layers (longer keys) keep only their window's blocks
        return Restored(tuple(blocks)) if blocks else None

    def restore(self, restored: Restored) -> None:
        """Put the blocks where the prompt that comes next will find them."""
        self.worked()
        contents = dict(restored.blocks)
        adopted = self._engine.adopt(list(contents))
        self._pages.touch(block_id for _, block_id in adopted)
        for key, block_id in adopted:
            self._pages.write(block_id, contents[key])
