"""What is true of a scheduler and its pool between any two operations, by name.

`check` asserts them all and names the one that is broken. A friend of Scheduler and BlockPool: it
reads their state and changes nothing. What is true of *changes* (a held block keeps its key, a
refused allocation changes nothing, preempt and resume give the same text) cannot be seen in one
state: I5, I11 to I14, I16 and I18 are watched in tests/backend/engine_watch.py.

    I1   free and held blocks are all blocks, and the counters agree
    I2   a block's references are the tables that hold it
    I3   a block is free exactly if nobody holds it: blank without a key, cached with one
    I4   the prefix index is the inverse of the blocks' keys
    I6   a block with a key is full, and the key is that of each holder's own tokens
    I7   what the steps in flight write is theirs alone and has no key
    I8   a table holds what is planned, and no more than drafts could use
    I9   a prefix found is whole blocks in order, and leaves a token to compute
    I10  prefixes are shared between equal tokens of one salt and adapter, and nothing else
    I15  between none and all of the memory is in use; none, if nobody runs
    I17  steps and rows keep their limits, and a sequence is in one list
    I19  nobody is preempted more often than the rule allows
    I20  a windowed group holds all that the next token needs, and nothing older
    I21  a block that may be copied in part holds the tokens that are said of it

The numbers are those of issue 2. The costs are those of a test: all sequences, in pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from .block_pool import block_key, group_key, root_key
from .sequence import MAX_PREEMPTIONS, Sequence, Span, Status

if TYPE_CHECKING:
    from .scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert every invariant; the error names all that are broken."""
    broken: list[str] = []
    for invariant in INVARIANTS:
        try:
            invariant(scheduler)
        except AssertionError as error:
            broken.append(str(error))
    assert not broken, "; ".join(broken)


def i1_free_and_held_blocks_are_all(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = sum(1 for count in pool._ref_counts if count != 0)
    free = len(pool._blank) + len(pool._cached)
    assert free + held == pool.num_ids, f"I1: {free} free and {held} held of {pool.num_ids}"
    assert held == pool.num_in_use, f"I1: {held} held, the counter says {pool.num_in_use}"
    parts = pool.num_in_use + pool.num_cached + pool.num_blank
    assert parts == max(pool.num_blocks, pool.num_in_use), f"I1: the parts of {pool!r} are off"


def i2_references_are_the_tables_that_hold_a_block(scheduler: Scheduler) -> None:
    holders = Counter(block for seq in scheduler._running for block in seq.block_ids)
    for block_id, count in enumerate(scheduler.pool._ref_counts):
        assert count == holders[block_id], (
            f"I2: block {block_id} counts {count}, {holders[block_id]} tables hold it"
        )


def i3_a_block_is_free_exactly_if_nobody_holds_it(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    for block_id, count in enumerate(pool._ref_counts):
        lists = (block_id in pool._blank) + (block_id in pool._cached)
        assert lists == (count == 0), f"I3: block {block_id} counts {count}, is {lists} times free"
    for block_id in pool._blank:
        assert pool._keys[block_id] is None, f"I3: block {block_id} is blank and has a key"
    for block_id in pool._cached:
        assert pool._keys[block_id] is not None, f"I3: block {block_id} is cached without a key"


def i4_the_index_is_the_inverse_of_the_keys(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    named = {key: block_id for block_id, key in enumerate(pool._keys) if key is not None}
    assert named == pool._published, "I4: the prefix index disagrees with the blocks' keys"


def i6_a_key_says_what_each_holders_tokens_say(scheduler: Scheduler) -> None:
    size = scheduler.config.block_size
    for sequence in scheduler._running:
        own_keys = _keys_of(scheduler, sequence)
        assert own_keys == sequence.block_keys, f"I6: the keys of {sequence!r} are not its tokens'"
        for index, span in enumerate(sequence.block_table):
            for block_id, group in _with_groups(scheduler, span):
                key = scheduler.pool._keys[block_id]
                if key is None:
                    continue
                is_full = (index + 1) * size <= sequence.num_computed
                assert is_full, f"I6: block {block_id} has a key before it is full"
                own = group_key(own_keys[index], group)
                assert key == own, f"I6: block {block_id} has the key of other tokens"


def i7_what_is_written_has_one_holder_and_no_key(scheduler: Scheduler) -> None:
    for in_flight in scheduler._in_flight:
        slots: set[int] = set()
        for chunk, (sequence, life) in zip(in_flight.batch.chunks, in_flight.members, strict=True):
            if sequence.status is not Status.RUNNING or sequence.num_lives != life:
                continue
            end = chunk.start + chunk.num_tokens + len(chunk.draft_ids)
            for slot in _slots(scheduler, sequence, chunk.start, end):
                block_id = slot // scheduler.config.block_size
                holders = scheduler.pool.ref_count(block_id)
                assert holders == 1, f"I7: block {block_id} is written to, {holders} hold it"
                key = scheduler.pool._keys[block_id]
                assert key is None, f"I7: block {block_id} is written to and published"
                assert slot not in slots, f"I7: slot {slot} is written by two rows"
                slots.add(slot)


def i8_a_table_holds_what_is_planned(scheduler: Scheduler) -> None:
    for sequence in scheduler._running:
        held = len(sequence.block_table)
        least = scheduler.tables.num_spans(sequence.num_planned)
        most = scheduler.tables.num_spans(sequence.num_tokens + scheduler.config.max_drafts + 1)
        assert least <= held <= most, f"I8: {sequence!r} needs {least} to {most} spans"
        ids = sequence.block_ids
        assert len(set(ids)) == len(ids), f"I8: {sequence!r} holds a block twice"
    for sequence in scheduler._waiting:
        assert not sequence.block_table, f"I8: {sequence!r} waits and holds blocks"


def i9_a_prefix_found_leaves_a_token_to_compute(scheduler: Scheduler) -> None:
    for sequence in _live(scheduler):
        hits = scheduler.tables.find_prefix(sequence)
        num_tokens = len(hits) * scheduler.config.block_size
        assert num_tokens <= sequence.num_tokens - 1, f"I9: {sequence!r} finds all its tokens"
        for span, key in zip(hits, _keys_of(scheduler, sequence), strict=False):
            for block_id, group in _with_groups(scheduler, span):
                is_own = scheduler.pool._keys[block_id] == group_key(key, group)
                assert is_own, f"I9: {sequence!r} finds blocks that are not its prefix in order"
        has_progress = 0 <= sequence.num_computed <= sequence.num_planned
        assert has_progress, f"I9: {sequence!r} has planned less than it has computed"
        assert sequence.num_uncomputed >= 1, f"I9: {sequence!r} has nothing left to compute"


def i10_prefixes_are_shared_by_equals_only(scheduler: Scheduler) -> None:
    size = scheduler.config.block_size
    found = [(sequence, scheduler.tables.find_prefix(sequence)) for sequence in _live(scheduler)]
    is_windowed = scheduler.config.groups.num_windowed > 0
    for (one, hits), (other, others) in combinations(found, 2):
        if _owner(one) != _owner(other):
            assert not _ids(hits) & _ids(others), f"I10: {one!r} and {other!r} share across owners"
            continue
        equal = 0
        while equal < min(one.num_tokens, other.num_tokens) and (
            one.token_ids[equal] == other.token_ids[equal]
        ):
            equal += 1
        common = min(equal // size, (one.num_tokens - 1) // size, (other.num_tokens - 1) // size)
        # The window of one may be gone where that of the other is there.
        is_same = is_windowed or hits[:common] == others[:common]
        assert is_same, f"I10: {one!r} and {other!r} find other blocks"
        assert not _ids(hits[common:]) & _ids(others[common:]), (
            f"I10: {one!r} and {other!r} share blocks of unequal tokens"
        )


def i15_usage_is_a_share(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    assert 0 <= pool.num_in_use <= pool.num_ids, f"I15: the usage of {pool!r} is no share"
    assert scheduler._running or not pool.num_in_use, f"I15: nobody runs, and {pool!r}"


def i17_limits_are_kept_and_a_sequence_is_in_one_list(scheduler: Scheduler) -> None:
    config = scheduler.config
    assert len(scheduler._running) <= config.max_num_seqs, f"I17: too many run: {scheduler!r}"
    for in_flight in scheduler._in_flight:
        num_tokens = in_flight.batch.num_tokens
        assert num_tokens <= config.max_batch_tokens, f"I17: a step of {num_tokens} tokens"
    ids = Counter(sequence.id for sequence in _live(scheduler))
    twice = [id for id, count in ids.items() if count > 1]
    assert not twice, f"I17: in two lists: {twice}"
    assert set(ids) == set(scheduler._sequences), "I17: a live sequence is in no list"
    for status, sequences in (
        (Status.WAITING, scheduler._waiting),
        (Status.RUNNING, scheduler._running),
    ):
        for sequence in sequences:
            assert sequence.status is status, f"I17: {sequence!r} is in the list of the {status}"
    rows = [sequence.row for sequence in scheduler._running]
    every = list(range(config.max_num_seqs))
    assert sorted(rows + scheduler._free_rows) == every, "I17: a row has two owners, or none"


def i19_nobody_is_preempted_too_often(scheduler: Scheduler) -> None:
    for sequence in _live(scheduler):
        count = sequence.num_preemptions
        assert count <= MAX_PREEMPTIONS, f"I19: {sequence!r} was preempted {count} times"


def i20_a_windowed_group_holds_its_window(scheduler: Scheduler) -> None:
    groups = scheduler.config.groups
    for sequence in scheduler._running:
        for index, span in enumerate(sequence.block_table):
            is_behind = index < sequence.num_behind
            expected = groups.num_full if is_behind else groups.num_groups
            assert len(span) == expected, f"I20: {sequence!r} holds {span} at {index}"
        if groups.num_windowed:
            needed = scheduler.tables.first_needed(sequence.num_computed)
            behind = sequence.num_behind
            assert behind <= needed, f"I20: {sequence!r} lacks what its next token needs"
            assert behind >= needed - 1, f"I20: {sequence!r} holds what its window has passed"


def i21_what_may_be_copied_is_what_its_key_says(scheduler: Scheduler) -> None:
    for parent, followers in scheduler.tables.partial._followers.items():
        for key, token_ids in followers.items():
            assert key == block_key(parent, token_ids), "I21: a block is said to hold other tokens"


def _live(scheduler: Scheduler) -> Iterator[Sequence]:
    yield from scheduler._waiting
    yield from scheduler._running


def _owner(sequence: Sequence) -> tuple[str, str]:
    return sequence.request.cache_salt, sequence.request.adapter


def _keys_of(scheduler: Scheduler, sequence: Sequence) -> list[bytes]:
    """The keys of its full blocks, from nothing but its tokens and its owner."""
    salt, adapter = _owner(sequence)
    size = scheduler.config.block_size
    keys = [root_key(scheduler.config.cache_seed, adapter=adapter, salt=salt)]
    for end in range(size, sequence.num_tokens + 1, size):
        keys.append(block_key(keys[-1], sequence.token_ids[end - size : end]))
    return keys[1:]


def _with_groups(scheduler: Scheduler, span: Span) -> Iterator[tuple[int, int]]:
    """The blocks of a span and their groups; behind the window only the full ones are left."""
    yield from zip(span, range(scheduler.config.groups.num_groups), strict=False)


def _ids(spans: list[Span]) -> set[int]:
    return {block_id for span in spans for block_id in span}


def _slots(scheduler: Scheduler, sequence: Sequence, start: int, end: int) -> Iterator[int]:
    size = scheduler.config.block_size
    for position in range(start, end):
        for block_id in sequence.block_table[position // size]:
            yield block_id * size + position % size


INVARIANTS: tuple[Callable[[Scheduler], None], ...] = (
    i1_free_and_held_blocks_are_all,
    i2_references_are_the_tables_that_hold_a_block,
    i3_a_block_is_free_exactly_if_nobody_holds_it,
    i4_the_index_is_the_inverse_of_the_keys,
    i6_a_key_says_what_each_holders_tokens_say,
    i7_what_is_written_has_one_holder_and_no_key,
    i8_a_table_holds_what_is_planned,
    i9_a_prefix_found_leaves_a_token_to_compute,
    i10_prefixes_are_shared_by_equals_only,
    i15_usage_is_a_share,
    i17_limits_are_kept_and_a_sequence_is_in_one_list,
    i19_nobody_is_preempted_too_often,
    i20_a_windowed_group_holds_its_window,
    i21_what_may_be_copied_is_what_its_key_says,
)
