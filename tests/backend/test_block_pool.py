"""The block pool: who gets which block, and what is found again."""

from __future__ import annotations

import random

import pytest

from llmd.backend.engine.block_pool import BlockPool, OutOfBlocks, block_key, root_key


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = BlockPool(num_blocks=2)
    head, tail = table = pool.allocate(2)
    pool.publish(head, b"head")
    pool.publish(tail, b"tail")
    pool.release(table)
    assert pool.allocate(1) == [tail]
    assert pool.find(b"tail") is None
    assert pool.find(b"head") == head


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(2)
    pool.publish(table[0], b"a")
    pool.release(table)
    assert pool.find(b"a") == table[0]
    pool.reuse(table[0])
    assert (pool.num_in_use, pool.num_cached, pool.num_blank) == (1, 0, 3)


def test_blank_blocks_are_spent_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=3)
    table = pool.allocate(2)
    pool.publish(table[0], b"a")
    pool.release(table)
    assert table[0] not in pool.allocate(2)
    assert pool.find(b"a") == table[0]


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(num_blocks=2)
    pool.allocate(1)
    before = repr(pool)
    with pytest.raises(OutOfBlocks, match="2 KV blocks wanted, 1 free"):
        pool.allocate(2)
    assert repr(pool) == before


def test_a_block_that_is_held_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=2)
    (shared,) = pool.allocate(1)
    pool.publish(shared, b"a")
    pool.reuse(shared)
    pool.release([shared])
    assert pool.allocate(1) != [shared]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_of_equal_blocks_the_first_stays_known() -> None:
    pool = BlockPool(num_blocks=2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.release([second])
    assert pool.find(b"same") == first
    assert pool.num_blank == 1


def test_kinds_of_extra_keys_cannot_be_confused() -> None:
    keys = {
        root_key(b"m", adapter="x", salt=""),
        root_key(b"m", adapter="", salt="x"),
        root_key(b"m", adapter="", salt=""),
        root_key(b"n", adapter="", salt=""),
    }
    assert len(keys) == 4


def test_a_changed_token_changes_every_later_key() -> None:
    def chain(tokens: list[int]) -> list[bytes]:
        keys = [root_key(b"m")]
        for start in range(0, len(tokens), 4):
            keys.append(block_key(keys[-1], tokens[start : start + 4]))
        return keys[1:]

    one, other = chain(list(range(12))), chain([*range(9), 99, 10, 11])
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_shrunk_pool_withdraws_blocks_as_they_fall_free() -> None:
    pool = BlockPool(num_blocks=4)
    table = pool.allocate(4)
    pool.set_num_blocks(2)
    assert (pool.num_blocks, pool.num_free) == (2, 0)
    pool.release(table[:2])
    assert pool.num_free == 0, "two are in use still"
    pool.release(table[2:])
    pool.check()
    assert pool.num_free == 2
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.set_num_blocks(4)
    assert len(pool.allocate(2)) == 2


def test_a_shrunk_pool_forgets_the_prefixes_that_were_idle_longest() -> None:
    pool = BlockPool(num_blocks=8)
    table = pool.allocate(4)
    for block_id, key in zip(table, (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(block_id, key)
    pool.release(table)  # d is freed first
    pool.set_num_blocks(3)
    assert [key for key, _ in pool.cached_keys] == [b"c", b"b", b"a"]
    assert len(pool.blank_ids) == 5
    assert len(pool.allocate(3)) == 3, "prefixes give way to what is needed"
    pool.check()


def test_reset_refuses_while_a_block_is_in_use() -> None:
    pool = BlockPool(num_blocks=2)
    table = pool.allocate(1)
    pool.publish(table[0], b"a")
    assert not pool.reset()
    assert pool.find(b"a") == table[0]
    pool.release(table)
    assert pool.reset()
    assert pool.find(b"a") is None


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks=12)
    tables: list[list[int]] = []
    for _ in range(300):
        act = rng.choice(["allocate", "publish", "reuse", "release", "evict", "resize"])
        if act == "allocate" and (count := rng.randint(1, 4)) <= pool.num_free:
            tables.append(pool.allocate(count))
        elif act == "publish" and tables:
            pool.publish(rng.choice(rng.choice(tables)), bytes([rng.randint(0, 9)]))
        elif act == "reuse" and (block := pool.find(bytes([rng.randint(0, 9)]))) is not None:
            pool.reuse(block)
            tables.append([block])
        elif act == "release" and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif act == "evict":
            pool.evict_cached(rng.randint(0, 2))
        elif act == "resize" and rng.random() < 0.2:
            pool.set_num_blocks(rng.randint(8, 14))
        pool.check()
        assert pool.num_in_use + pool.num_free >= pool.num_blocks
    for table in tables:
        pool.release(table)
    pool.check()
    assert pool.num_in_use == 0
