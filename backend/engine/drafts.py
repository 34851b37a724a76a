"""Guesses of the next tokens, taken from what the sequence has already said or read.

Text that is edited, quoted or formatted repeats itself. The last three tokens are looked up where
they stood before, or else the last two: a copy begins with them, and goes on behind what was
changed. What followed then is proposed now, and the runner verifies all of it in one step
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, with
prompt lookup for the draft model). A draft is kept only while the token drawn equals it, and the
noise of a draw belongs to its position; so the text is the same with and without drafts.

Each token costs two dictionary entries. How many are proposed follows from two numbers: the chance
that one more is right, learnt from those that as many tokens had led to, and what one more row
costs the step, learnt by the scheduler (step_time). A draft is added as long as it brings more
tokens per second than the step has without it. Where not even the first one behind three tokens
does, the drafter pauses, twice as long each time, so that text which does not repeat pays next to
nothing. Those behind two tokens that are not worth their rows are left out until after a pause.

Owner: the Scheduler; one Drafter per decoding sequence, made when it first decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAMS = (3, 2)  # in this order; one token agrees by chance, four miss what two would find
FIRST_CHANCE = {3: 0.7, 2: 0.5}  # of a draft behind so many tokens, before anything is known
SECOND_CHANCE = {3: 0.5, 2: 0.4}  # after a pause
LEARNING = 0.2  # weight of the newest draft in the chance
FIRST_PAUSE = 16  # tokens
MAX_PAUSE = 512


class Drafter:
    """Proposes continuations of one sequence."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        # The mutable state. `_follows` maps an n-gram to the position after its latest occurrence
        # that ends before the last token; `_num_indexed` tokens have been looked at as ends.
        self._follows: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._chance = dict(FIRST_CHANCE)
        self._length = NGRAMS[0]  # of the n-gram that the latest drafts came from
        self._pause = FIRST_PAUSE
        self._resume_at = 0

    def __repr__(self) -> str:
        chances = ", ".join(f"{chance:.0%} by {n}" for n, chance in self._chance.items())
        return f"<Drafter, right {chances}, {len(self._follows)} n-grams>"

    def propose(
        self, token_ids: Sequence[int], limit: int, row_cost: float = 0.0
    ) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow; often none.

        `row_cost` is what a draft's row adds to the step, in the time of a token without drafts.
        """
        if limit < 1 or self.is_pausing(len(token_ids)):
            return ()
        self._index(token_ids)
        for length in NGRAMS:
            start = self._follows.get(tuple(token_ids[-length:]))
            if start is not None:
                break
        else:
            return ()
        count = self._worthwhile(limit, self._chance[length], row_cost)
        if count == 0 and length == NGRAMS[0]:
            self._rest(len(token_ids))
        self._length = length
        period = len(token_ids) - start  # a loop goes round once more than was seen
        return tuple(token_ids[start + offset % period] for offset in range(count))

    def is_pausing(self, num_tokens: int) -> bool:
        """With so many tokens known it would propose nothing."""
        return num_tokens < max(self._resume_at, NGRAMS[0] + 1)

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """The runner agreed with so many of those that were proposed last."""
        chance = 1 - (1 - self._chance[self._length]) * (1 - LEARNING) ** num_accepted
        if num_accepted < num_proposed:
            chance *= 1 - LEARNING
        else:
            self._pause = FIRST_PAUSE
        self._chance[self._length] = chance

    def _worthwhile(self, limit: int, chance: float, row_cost: float) -> int:
        """Drafts to try: each brings its chance in tokens, and costs its row in time."""
        tokens = time = all_right = 1.0
        count = 0
        while count < min(limit, self._max_drafts):
            all_right *= chance
            if all_right * time <= row_cost * tokens:
                break
            tokens, time, count = tokens + all_right, time + row_cost, count + 1
        return count

    def _rest(self, num_tokens: int) -> None:
        self._resume_at = num_tokens + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._chance = dict(SECOND_CHANCE)

    def _index(self, token_ids: Sequence[int]) -> None:
        # The last token is no end yet: nothing follows it.
        for end in range(self._num_indexed + 1, len(token_ids)):
            for length in NGRAMS:
                if length <= end:
                    self._follows[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
