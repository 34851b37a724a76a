"""Which known block begins like the one that a prompt fills next.

Blocks are shared whole, by key. Where a prompt leaves the known text in the middle of a block (a
system message ends, a question begins), its first tokens are those of a block that is known, but
its key is another. Such a block can be copied, and the copy written from there on: a copy costs
about what one token costs on a CPU. The idea is copy-on-write of the last block (Kwon et al.,
section 4.4), for prompts that do not run any more.

    parent key ──▶ the few blocks published last behind it, with their tokens

Nothing here says whether a block is still in memory: the pool knows. Entries of blocks that are
gone are dropped as they are met, and the parents that were not asked for the longest as new ones
come.

Owner: BlockTables, on the engine thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_FOLLOWERS = 8  # of one parent: what differs behind a system message differs every time
MOST_PARENTS = 4096
MIN_COPIED = 2  # tokens: one is computed as soon


class PartialBlocks:
    """The beginnings that can be copied, behind the MOST_PARENTS prefixes asked for last."""

    def __init__(self) -> None:
        # The mutable state: per parent key, block keys and tokens, the oldest first.
        self._followers: OrderedDict[bytes, OrderedDict[bytes, array[int]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PartialBlocks behind {len(self._followers)} prefixes>"

    def add(self, parent: bytes, key: bytes, token_ids: Sequence[int]) -> None:
        """A full block was published behind the prefix that `parent` names."""
        followers = self._followers.setdefault(parent, OrderedDict())
        self._followers.move_to_end(parent)
        followers[key] = array("I", token_ids)
        followers.move_to_end(key)
        if len(followers) > MOST_FOLLOWERS:
            followers.popitem(last=False)
        self.trim(MOST_PARENTS)

    def trim(self, most: int) -> None:
        """Keep no more parents than this: a pool of few blocks has as few that can be copied."""
        while len(self._followers) > most:
            self._followers.popitem(last=False)

    def best(
        self, parent: bytes, token_ids: Sequence[int], is_known: Callable[[bytes], bool]
    ) -> tuple[bytes, int] | None:
        """The key of the block that begins with most of these tokens, and with how many.

        None if no block that `is_known` has MIN_COPIED of them.
        """
        followers = self._followers.get(parent)
        if followers is None:
            return None
        for key in [key for key in followers if not is_known(key)]:
            del followers[key]
        if not followers:
            del self._followers[parent]
            return None
        common = {key: _num_common(known, token_ids) for key, known in followers.items()}
        key = max(common, key=lambda key: common[key])
        if common[key] < MIN_COPIED:
            return None
        self._followers.move_to_end(parent)
        followers.move_to_end(key)
        return key, common[key]


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
