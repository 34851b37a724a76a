"""Blocks that begin like a prompt's next one."""

from __future__ import annotations

from llmd.backend.engine.partial_blocks import MOST_FOLLOWERS, MOST_PARENTS, PartialBlocks

PARENT = b"parent"


def known(key: bytes) -> bool:
    return True


def test_the_block_with_the_longest_common_beginning_is_best() -> None:
    partial = PartialBlocks()
    partial.add(PARENT, b"a", [1, 2, 3, 9])
    partial.add(PARENT, b"b", [1, 2, 3, 4])
    partial.add(b"another", b"c", [1, 2, 3, 4])
    assert partial.best(PARENT, [1, 2, 3, 4, 5], known) == (b"b", 4)
    assert partial.best(PARENT, [1, 2, 3, 9], known) == (b"a", 4)
    assert partial.best(b"nobody", [1, 2, 3, 4], known) is None


def test_one_token_is_not_worth_a_copy() -> None:
    partial = PartialBlocks()
    partial.add(PARENT, b"a", [1, 2, 3, 4])
    assert partial.best(PARENT, [1, 9], known) is None
    assert partial.best(PARENT, [1, 2], known) == (b"a", 2)


def test_a_block_that_is_gone_is_not_named_and_not_kept() -> None:
    partial = PartialBlocks()
    partial.add(PARENT, b"a", [1, 2, 3, 4])
    assert partial.best(PARENT, [1, 2, 3, 4], lambda key: False) is None
    assert partial.best(PARENT, [1, 2, 3, 4], known) is None


def test_it_remembers_no_more_than_it_promises() -> None:
    partial = PartialBlocks()
    for index in range(MOST_FOLLOWERS + 1):
        partial.add(PARENT, bytes([index]), [1, 2, 3, index])
    assert partial.best(PARENT, [1, 2, 3, 0], known) != (bytes([0]), 4)
    assert partial.best(PARENT, [1, 2, 3, 1], known) == (bytes([1]), 4)
    for index in range(MOST_PARENTS):
        partial.add(index.to_bytes(4, "big"), b"k", [1, 2, 3, 4])
    assert partial.best(PARENT, [1, 2, 3, 4], known) is None


def test_it_is_told_to_keep_as_few_as_the_pool_has() -> None:
    partial = PartialBlocks()
    for index in range(10):
        partial.add(bytes([index]), b"k", [1, 2, 3, 4])
    partial.trim(3)
    kept = [index for index in range(10) if partial.best(bytes([index]), [1, 2, 3, 4], known)]
    assert kept == [7, 8, 9]
