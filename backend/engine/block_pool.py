"""Which KV-cache blocks are free, which are shared, and which still hold a known prefix.

A block is `block_size` consecutive token slots in the key and value tensors of every layer.
This file deals in block ids alone, ints in [0, num_blocks). The tensors belong to the model
runner, and ids and tensors meet only in a sequence's block table; so nothing here needs torch.

    BLANK ──allocate──▶ IN USE ──release──▶ BLANK     its content was never published
                         │  ▲
                  release│  │reuse
                         ▼  │
                        CACHED ──allocate──▶ IN USE   its old content is forgotten first

`allocate` spends BLANK blocks first, then the CACHED block that has been idle longest. A pool may
be told to hold fewer blocks than it has: IN USE and CACHED together then stay within that number,
whatever their ids, and the memory of BLANK blocks can be given back to the system.

Owner: the engine's Scheduler, on the engine thread. No one else calls in, hence no locks.

Sources: blocks, tables and reference counts follow Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention" (SOSP 2023), section 4. Names follow vLLM.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. The pool is unchanged; preempt, or wait."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} KV blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


def root_key(seed: bytes, **extra: str) -> bytes:
    """The parent key of a prompt's first block.

    `seed` names what decides the meaning of keys and values (model digest, dtype). `extra` are
    tagged, so that an adapter called "x" and a salt called "x" cannot be taken for each other.
    """
    tagged = "\0".join(f"{tag}={len(value)}:{value}" for tag, value in sorted(extra.items()))
    return blake2b(seed + b"\0" + tagged.encode(), digest_size=16).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name the content of a full block: its own tokens and, through `parent`, all before them.

    The keys and values of a token depend on every earlier token, so two blocks may stand in for
    each other only if their whole prefixes agree. Chaining makes one comparison enough.
    128 bits leave no practical chance that two prompts of different users collide.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def group_key(key: bytes, group: int) -> bytes:
    """Names the block of one group of layers in the span that `key` names."""
    return key + bytes([group]) if group else key


class BlockPool:
    """Hands out block ids, counts who holds them, and finds them again by content."""

    def __init__(self, num_blocks: int) -> None:
        # All the mutable state there is. A block is in `_blank` or `_cached` exactly when its count
        # is 0; one that is CACHED has a key, one that is BLANK has none. CACHED blocks exist only
        # within the limit.
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}  # the inverse of _keys
        self._limit = num_blocks  # so many may be IN USE and CACHED together
        self._num_in_use = 0  # counts that are not 0

        # BLANK: a stack, so that the same memory is touched again. CACHED: the longest idle first.
        # Not a deque: `reuse` takes blocks out of the middle, which costs a deque O(n).
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.num_in_use} in use, {self.num_cached} cached, "
            f"{self.num_blank} blank of {self._limit}>"
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that may be handed out in all."""
        return self._limit

    @property
    def num_ids(self) -> int:
        """Block ids are below this; more than `num_blocks` while the pool is kept small."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, the CACHED ones included."""
        return max(self._limit - self._num_in_use, 0)

    @property
    def num_blank(self) -> int:
        """Blocks that `allocate` can hand out without forgetting a prefix."""
        return self.num_free - len(self._cached)

    @property
    def blank_ids(self) -> Collection[int]:
        """The blocks that hold nothing worth keeping, those outside the limit too."""
        return self._blank.keys()

    @property
    def cached_keys(self) -> list[tuple[bytes, int]]:
        """Keys and ids of the CACHED blocks, the longest idle first."""
        return [(key, block_id) for block_id in self._cached if (key := self._keys[block_id])]

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a known prefix."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one reference."""
        return self._num_in_use

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. Their content is undefined.

        Raises OutOfBlocks, having taken none, if fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        return [self._take() for _ in range(count)]

    def publish(self, block_id: int, key: bytes) -> None:
        """Let later prompts find this block, which must be in use, full and never written again.

        If two sequences computed the same content side by side, the first one published stays:
        others may share it already, and the second frees itself when its sequence ends.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free"
        if key not in self._published:
            self._forget(block_id)
            self._keys[block_id] = key
            self._published[key] = block_id

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Take back what was published of these blocks: the step that was to fill them failed."""
        for block_id in block_ids:
            self._forget(block_id)

    def find(self, key: bytes) -> int | None:
        """The block published under `key`, or None. Takes no reference."""
        return self._published.get(key)

    def is_idle(self, block_id: int) -> bool:
        """Nobody holds this block, so that reusing it takes one away from the free ones."""
        return self._ref_counts[block_id] == 0

    def reuse(self, block_id: int) -> None:
        """Take one more reference to a block that `find` has just named."""
        assert self._keys[block_id] is not None, f"block {block_id} holds no known prefix"
        if self._ref_counts[block_id] == 0:
            self._cached.pop(block_id, None)
            self._num_in_use += 1
        self._ref_counts[block_id] += 1

    def release(self, block_table: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, in the order of its table.

        Freed back to front: a prompt's tail is then evicted before its head, and the head is
        what other prompts (the same system message, say) are likely to share.
        """
        for block_id in reversed(block_table):
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._num_in_use -= 1
                self._set_free(block_id)
        self._trim()

    def evict_cached(self, count: int) -> list[int]:
        """Forget up to `count` CACHED blocks, the longest idle first; they are BLANK afterwards."""
        evicted: list[int] = []
        while self._cached and len(evicted) < count:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
            self._set_free(block_id)
            evicted.append(block_id)
        return evicted

    def set_num_blocks(self, num_blocks: int) -> None:
        """Hold at most this many: prefixes beyond are forgotten now, blocks in use as they fall
        free."""
        new_ids = range(len(self._ref_counts), num_blocks)
        self._ref_counts.extend(0 for _ in new_ids)
        self._keys.extend(None for _ in new_ids)
        self._blank.update(dict.fromkeys(new_ids))
        self._limit = num_blocks
        self._trim()

    def reset(self) -> bool:
        """Forget every prefix. False, and nothing changed, while a block is in use."""
        if self.num_in_use:
            return False
        self.evict_cached(len(self._cached))
        return True

    def check(self) -> None:
        """Assert the invariants; O(num_blocks). For tests, and for the engine when it is idle."""
        idle = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert all(count >= 0 for count in self._ref_counts), "a count is negative"
        assert not self._blank.keys() & self._cached.keys(), "a block is blank and cached"
        free = self._blank.keys() | self._cached.keys()
        assert idle == free, "the free blocks disagree with the reference counts"
        assert all(self._keys[block_id] is None for block_id in self._blank), "blank with a key"
        assert all(self._keys[block_id] for block_id in self._cached), "cached without a key"
        in_use = sum(1 for count in self._ref_counts if count)
        assert in_use == self._num_in_use, "the number of blocks in use is off"
        assert not self._cached or self.num_blank >= 0, "prefixes are kept beyond the limit"
        named = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert named == self._published, "the prefix index disagrees with the blocks"

    def _take(self) -> int:
        if self._num_in_use + len(self._cached) < self._limit:
            block_id, _ = self._blank.popitem()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        self._num_in_use += 1
        return block_id

    def _set_free(self, block_id: int) -> None:
        if self._keys[block_id] is None:
            self._blank[block_id] = None
        else:
            self._cached[block_id] = None

    def _trim(self) -> None:
        surplus = self._num_in_use + len(self._cached) - self._limit
        if surplus > 0:
            self.evict_cached(surplus)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._published[key]
            self._keys[block_id] = None
            if block_id in self._cached:
                del self._cached[block_id]
                self._blank[block_id] = None
