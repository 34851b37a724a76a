"""Guesses of the next tokens, taken from what the sequence has already said or read.

Text that is edited, quoted or formatted repeats itself. The last NGRAM tokens are looked up where
they stood before; what followed then is proposed now, and the runner verifies all of it in one step
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, with
prompt lookup for the draft model). A draft is kept only while the token drawn equals it, and the
noise of a draw belongs to its position; so the text is the same with and without drafts.

Each token costs one dictionary entry. How many are proposed adapts: doubled when all were right,
halved when none was; at none the drafter pauses, twice as long each time, so that text which does
not repeat pays next to nothing.

Owner: the Scheduler; one Drafter per decoding sequence, made when it first decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3  # shorter ones agree by chance, longer ones miss the first tokens of a copy
FIRST_SIZE = 4
FIRST_PAUSE = 16  # tokens
MAX_PAUSE = 512


class Drafter:
    """Proposes continuations of one sequence."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        # The mutable state. `_follows` maps an n-gram to the position after its latest occurrence
        # that ends before the last token; `_num_indexed` tokens have been looked at as ends.
        self._follows: dict[tuple[int, ...], int] = {}
        self._num_indexed = NGRAM - 1
        self._size = min(FIRST_SIZE, max_drafts)
        self._pause = FIRST_PAUSE
        self._resume_at = 0

    def __repr__(self) -> str:
        return f"<Drafter of {self._size}, {len(self._follows)} n-grams>"

    def propose(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow; often none."""
        if limit < 1 or self.is_pausing(len(token_ids)):
            return ()
        self._index(token_ids)
        start = self._follows.get(tuple(token_ids[-NGRAM:]))
        if start is None:
            return ()
        period = len(token_ids) - start  # a loop goes round once more than was seen
        count = min(limit, self._size)
        return tuple(token_ids[start + offset % period] for offset in range(count))

    def is_pausing(self, num_tokens: int) -> bool:
        """With so many tokens known it would propose nothing."""
        return num_tokens < max(self._resume_at, NGRAM + 1)

    def record(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        """The runner agreed with so many of them; the sequence has `num_tokens` tokens now."""
        if num_accepted == num_proposed:
            self._size = min(max(2 * self._size, 1), self._max_drafts)
            self._pause = FIRST_PAUSE
        elif num_accepted == 0:
            self._size //= 2
            if self._size == 0:
                self._size = 1
                self._resume_at = num_tokens + self._pause
                self._pause = min(2 * self._pause, MAX_PAUSE)

    def _index(self, token_ids: Sequence[int]) -> None:
        # The last token is no end yet: nothing follows it.
        for end in range(self._num_indexed, len(token_ids) - 1):
            self._follows[tuple(token_ids[end - NGRAM + 1 : end + 1])] = end + 1
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
