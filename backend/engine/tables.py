"""What blocks a sequence holds: the table as spans, and how it takes, shares and gives back blocks.

A span is `block_size` tokens of a sequence; it has one block for each group of layers (see
batch.BlockGroups). For a model without windows that is one, and a span is a block. A windowed
group's block is needed from its first token until `window` tokens later:

    spans     0    1    2    3    4    5
    full      #    #    #    #    #    #
    windowed  .    .    .    #    #    #      `num_behind` spans have given theirs back

What was given back stays in the prefix cache like any other block. A prefix is found as far as all
groups have it: everything from the first token on for the full ones, the last window for the rest.

Owner: the Scheduler. These functions decide nothing: they say what fits, and do what is asked.
"""

from __future__ import annotations

from .batch import BlockGroups
from .block_pool import BlockPool, group_key
from .partial_blocks import PartialBlocks
from .sequence import Sequence, Span

ENDLESS = 1 << 20  # spans; of a model all of whose layers have windows


class BlockTables:
    """The tables of all sequences over one pool."""

    def __init__(
        self, pool: BlockPool, block_size: int, groups: BlockGroups, max_chunk: int
    ) -> None:
        self.pool = pool
        self.groups = groups
        self._size = block_size
        # Spans that a windowed group holds at once: the window before a step, and the tokens of
        # two steps, one of which is planned ahead.
        self._max_windowed = self.num_spans(groups.window + 2 * max_chunk) + 1
        self.num_left_behind = 0  # blocks given back because the window had passed; only grows
        self.partial = PartialBlocks()

    def __repr__(self) -> str:
        return f"<BlockTables {self.groups.num_groups} groups | {self.pool!r}>"

    # -------------------------------------------------------------- arithmetic

    def num_spans(self, num_tokens: int) -> int:
        """Spans that so many tokens begin."""
        return -(-num_tokens // self._size)

    def growth(self, held: int, spans: int) -> int:
        """Blocks, at most, that a table of `held` spans takes until it has `spans`."""
        more = max(spans - held, 0)
        groups = self.groups
        return groups.num_full * more + groups.num_windowed * min(more, self._max_windowed)

    @property
    def max_sequence_tokens(self) -> int:
        """What one sequence alone could hold."""
        groups, num_blocks = self.groups, self.pool.num_blocks
        spans = num_blocks // groups.num_groups
        if groups.num_windowed and spans > self._max_windowed:
            rest = num_blocks - groups.num_windowed * self._max_windowed
            spans = rest // groups.num_full if groups.num_full else ENDLESS
        return spans * self._size

    def wanted(self, sequence: Sequence, num_tokens: int) -> int:
        """Spans that the table lacks for the next `num_tokens`; none while drafts' are left."""
        spans = self.num_spans(sequence.num_planned + num_tokens)
        return max(spans - len(sequence.block_table), 0)

    # ------------------------------------------------------------ take and share

    def extend(self, sequence: Sequence, num_spans: int) -> None:
        """Raises OutOfBlocks, having taken none."""
        count = self.groups.num_groups
        taken = self.pool.allocate(num_spans * count)
        spans = (tuple(taken[at : at + count]) for at in range(0, len(taken), count))
        sequence.block_table.extend(spans)

    def find_prefix(self, sequence: Sequence) -> list[Span]:
        """The longest known prefix; one token at least is left to compute. Takes nothing."""
        hits: list[Span] = []
        if not self.groups.is_shareable:
            return hits
        full = range(self.groups.num_full)
        for key in sequence.block_keys[: (sequence.num_tokens - 1) // self._size]:
            span = self._find(key, full)
            if span is None:
                break
            hits.append(span)
        return self._with_window(sequence, hits) if self.groups.num_windowed else hits

    def share(self, sequence: Sequence, hits: list[Span]) -> None:
        """The sequence, which holds nothing, begins with this prefix."""
        for span in hits:
            for block_id in span:
                self.pool.reuse(block_id)
        sequence.block_table = list(hits)
        sequence.num_behind = sum(len(span) < self.groups.num_groups for span in hits)
        sequence.set_progress(len(hits) * self._size)
        sequence.num_published = len(hits)
        sequence.num_sent_spans = 0

    def copy_last(self, twin: Sequence, sequence: Sequence) -> list[tuple[int, int]]:
        """Begin with a copy of the twin's last shared span, which is not full.

        Returns what to copy: nothing if a span before it was not found, or the twin's window has
        passed it.
        """
        index, rest = divmod(sequence.num_tokens - 1, self._size)
        is_held = index >= twin.num_behind
        if index != len(sequence.block_table) or not rest or not is_held:
            return []
        self.extend(sequence, 1)
        sequence.set_progress(sequence.num_tokens - 1)
        return list(zip(twin.block_table[index], sequence.block_table[index], strict=True))

    def copy_partial(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Begin the next span, of which nothing is computed, with a copy of a known block.

        Returns what to copy: nothing if no block begins like it.
        """
        index = len(sequence.block_table)
        start = index * self._size
        if not self.groups.is_shareable or sequence.num_computed != start:
            return []
        # one token at least is left to compute
        end = min(start + self._size, sequence.num_tokens - 1)
        groups = range(self.groups.num_groups)
        found = self.partial.best(
            sequence.parent_key(index),
            sequence.token_ids[start:end],
            lambda key: self._find(key, groups) is not None,
        )
        source = self._find(found[0], groups) if found else None
        if found is None or source is None or not self._can_hold(source):
            return []
        for block_id in source:  # or the copy's own block could be taken from there
            self.pool.reuse(block_id)
        self.extend(sequence, 1)
        self.pool.release(source)
        sequence.set_progress(start + found[1])
        return list(zip(source, sequence.block_table[index], strict=True))

    def _can_hold(self, span: Span) -> bool:
        """One span more can be taken while this one is held."""
        num_idle = sum(self.pool.is_idle(block_id) for block_id in span)
        return self.groups.num_groups + num_idle <= self.pool.num_free

    # -------------------------------------------------------- publish, give back

    def publish(self, sequence: Sequence) -> None:
        """Let others find what is full, and give back what the window has passed."""
        num_full = sequence.num_computed // self._size
        for index in range(sequence.num_published, num_full):
            key = sequence.block_keys[index]
            for group, block_id in enumerate(sequence.block_table[index]):
                self.pool.publish(block_id, group_key(key, group))
            begin = index * self._size
            tokens = sequence.token_ids[begin : begin + self._size]
            self.partial.add(sequence.parent_key(index), key, tokens)
            self.partial.trim(self.pool.num_ids)
        sequence.num_published = max(sequence.num_published, num_full)
        if self.groups.num_windowed:
            self._leave_behind(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """All that it holds."""
        self.pool.release(sequence.block_ids)
        sequence.block_table = []
        sequence.num_behind = 0

    def first_needed(self, num_computed: int) -> int:
        """The first span that a windowed layer reads for the next token."""
        return max(num_computed - self.groups.window + 1, 0) // self._size

    def _leave_behind(self, sequence: Sequence) -> None:
        num_full = self.groups.num_full
        gone: list[int] = []
        first_needed = self.first_needed(sequence.num_computed)
        for index in range(sequence.num_behind, first_needed):
            span = sequence.block_table[index]
            gone.extend(span[num_full:])
            sequence.block_table[index] = span[:num_full]
        sequence.num_behind = max(sequence.num_behind, first_needed)
        self.pool.release(gone)
        self.num_left_behind += len(gone)

    def _with_window(self, sequence: Sequence, hits: list[Span]) -> list[Span]:
        """As many of the hits as end with a whole window that is known to the windowed groups."""
        groups = range(self.groups.num_full, self.groups.num_groups)
        length = len(hits) if self.groups.num_full else self._num_candidates(sequence)
        while length:
            first = self.first_needed(length * self._size)
            tail: list[Span] = []
            for index in reversed(range(first, length)):
                span = self._find(sequence.block_keys[index], groups)
                if span is None:
                    length = index  # no prefix that needs this span is whole
                    break
                tail.append(span)
            else:
                heads = hits[:length] or [()] * length
                windows = [()] * first + tail[::-1]
                return [head + window for head, window in zip(heads, windows, strict=True)]
        return []

    def _num_candidates(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self._size

    def _find(self, key: bytes, groups: range) -> Span | None:
        span: list[int] = []
        for group in groups:
            block_id = self.pool.find(group_key(key, group))
            if block_id is None:
                return None
            span.append(block_id)
        return tuple(span)
