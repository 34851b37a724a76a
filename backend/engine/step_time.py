"""How long the next step will take, learnt from those that ran; so how long a chunk may be.

A prompt that is read while others stream makes their next token late. With a step of pure decoding
known to take `decode_s`, and a prompt token known to add `token_s`, a chunk of

    (ratio - 1) * decode_s / token_s     tokens

makes the gap `ratio` times what the streams are used to, and no more. At a ratio of 2 the prompt
gets half of each step: it takes at most twice as long as it would alone.

Where more prompts wait than streams decode, that would keep the many waiting for the few, and the
few are what a step is worst at. So each prompt may count as much as a stream does (`num_prompts`),
as long as the step stays within LONGEST_STEP_S.

Where many decode, a step of a CPU is as long as there are rows in it: at two hundred a token comes
twice a second, no more of them in all than with sixty, and who asks waits for a whole step. So from
LONGEST_STEP_S on nobody else is let in (`is_full`), unless that is what one sequence takes too.

A draft's row is verified beside the token it may follow, and adds a time of its own: `draft_cost`
tells it as a share of what a token takes without drafts.

All are smoothed averages and not a regression over many features: the costs differ between sizes
and contexts, and an average of the last steps is right for the *present* ones, whatever the curve.
While a long prompt is read no step is pure, and the streams' contexts grow: now and then one step
without a prompt is asked for, or what they cost would be taken for the prompt's.

Owner: the Scheduler. Pure: it is told durations and calls no clock. The idea of bounding the step
by what decoders can bear is Sarathi-Serve's (Agrawal et al., OSDI 2024, section 4).
"""

from __future__ import annotations

from typing import NamedTuple

SMOOTHING = 0.2  # weight of the newest step: ten steps forget the past
STALE_STEPS = 24  # beside a prompt: then decoding is measured alone again,
STALE_SMOOTHING = 0.6  # ... and what was known before weighs less
NEW_STEPS = 4  # ... the same where so many sequences were never measured alone
MAX_OUTLIER = 4.0  # a pause of the machine counts as no more than this many usual steps
MIN_CHUNK = 4  # tokens: one tile of the CPU kernels, which computes fewer no faster
FIRST_CHUNK = 64  # tokens, while the cost of a prompt token is not known
FIRST_CROWD = 32  # sequences, while no step of decodes alone was seen
LONGEST_STEP_S = 0.1  # of decodes: a step of more sequences keeps everybody waiting
MOST_SLOWDOWN = 4.0  # ... of the shortest step seen: up to it, more at once are nearly free
FIRST_DRAFT_COST = 0.2  # of a step of one row, before it is known


class _Measured(NamedTuple):
    """Steps of decodes alone, smoothed: of how many sequences, and how long."""

    sequences: float
    seconds: float


class StepTime:
    """Smoothed durations of steps, by their number of decoding sequences."""

    def __init__(self) -> None:
        # The mutable state. Keys are bit lengths: 1, 2-3, 4-7, ... decoding sequences.
        self._decodes: dict[int, _Measured] = {}
        # Of steps with prompts: what they took beyond decoding, and their tokens. Smoothed apart,
        # so that a step of few tokens, whose share is mostly noise, weighs little.
        self._prompt_s: float | None = None
        self._prompt_tokens = 0.0
        self._draft_s: float | None = None
        self._num_mixed = 0  # steps with decodes and prompts since one of decodes alone

    def __repr__(self) -> str:
        steps = ", ".join(
            f"{step.sequences:.0f}: {step.seconds * 1e3:.1f} ms" for step in self._decodes.values()
        )
        token = "?" if self._token_s is None else f"{self._token_s * 1e6:.0f} us"
        return f"<StepTime decode {{{steps}}}, prompt token {token}>"

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, duration_s: float, num_drafts: int = 0
    ) -> None:
        """A step took this long. One of both prompts and drafts teaches nothing."""
        if num_drafts:
            decode_s = self.decode_s(num_decodes)
            if num_prompt_tokens == 0:
                self._num_mixed = 0  # nobody waits for a step without drafts: it may not come
            if decode_s is not None and num_prompt_tokens == 0:
                draft_s = max(duration_s - decode_s, 0.0) / num_drafts
                self._draft_s = _smooth(self._draft_s, draft_s)
        elif num_prompt_tokens == 0:
            key = num_decodes.bit_length()
            weight = STALE_SMOOTHING if self._num_mixed >= STALE_STEPS else SMOOTHING
            old = self._decodes.get(key)
            self._decodes[key] = _Measured(
                _smooth(old and old.sequences, num_decodes, weight),
                _smooth(old and old.seconds, duration_s, weight),
            )
            self._num_mixed = 0
        else:
            self._num_mixed += bool(num_decodes)
            beyond_s = duration_s - (self.decode_s(num_decodes) or 0.0)
            if self._prompt_s is None:
                self._prompt_s, self._prompt_tokens = max(beyond_s, 0.0), num_prompt_tokens
                return
            most_s = MAX_OUTLIER * (self._token_s or beyond_s) * num_prompt_tokens
            self._prompt_s += SMOOTHING * (min(beyond_s, most_s) - self._prompt_s)
            self._prompt_tokens += SMOOTHING * (num_prompt_tokens - self._prompt_tokens)

    @property
    def _token_s(self) -> float | None:
        if self._prompt_s is None:
            return None
        return max(self._prompt_s, 0.0) / self._prompt_tokens

    def _is_stale(self, num_decodes: int) -> bool:
        is_new = num_decodes.bit_length() not in self._decodes
        return self._num_mixed >= (NEW_STEPS if is_new else STALE_STEPS)

    def decode_s(self, num_decodes: int) -> float | None:
        """What a step of so many decodes takes: between the sizes that were seen on a straight
        line, beyond them as the last one."""
        if not num_decodes or not self._decodes:
            return None
        seen = sorted((step.sequences, step.seconds) for step in self._decodes.values())
        below = [step for step in seen if step[0] <= num_decodes] or seen[:1]
        above = [step for step in seen if step[0] >= num_decodes] or seen[-1:]
        (low, low_s), (high, high_s) = below[-1], above[0]
        if high <= low:
            return high_s
        return low_s + (high_s - low_s) * (num_decodes - low) / (high - low)

    def is_full(self, num_decodes: int) -> bool:
        """One sequence more would lengthen every step, and bring next to nothing in exchange."""
        decode_s = self.decode_s(num_decodes)
        if decode_s is None:
            return num_decodes >= FIRST_CROWD
        shortest_s = min(step.seconds for step in self._decodes.values())
        most = max(step.sequences for step in self._decodes.values())
        # of more than were seen: as if each took its own time, until it is known better
        decode_s *= max(num_decodes / most, 1.0)
        return decode_s > max(LONGEST_STEP_S, MOST_SLOWDOWN * shortest_s)

    def draft_cost(self, num_decodes: int) -> float:
        """What a draft's row adds to a step of so many decodes, in the time of one token of it."""
        decode_s = self.decode_s(num_decodes)
        if not decode_s or self._draft_s is None:
            return FIRST_DRAFT_COST
        return self._draft_s * num_decodes / decode_s

    def max_prompt_tokens(self, num_decodes: int, ratio: float, num_prompts: int = 1) -> int | None:
        """Prompt tokens that keep the step within `ratio` times a decode step; None: no limit.

        With more prompts than decodes, a step of up to LONGEST_STEP_S is as good. 0 now and then,
        so that decoding is measured alone.
        """
        if num_decodes and self._is_stale(num_decodes):
            return 0
        decode_s = self.decode_s(num_decodes)
        if decode_s is None:
            return None
        if not self._token_s:
            return FIRST_CHUNK
        usual_s = (ratio - 1.0) * decode_s
        fair_s = usual_s * max(num_prompts / num_decodes, 1.0)
        most_s = min(fair_s, max(LONGEST_STEP_S - decode_s, usual_s))
        return max(int(most_s / self._token_s), MIN_CHUNK)


def _smooth(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    if old is None:
        return new
    if old > 0.0:
        new = min(new, MAX_OUTLIER * old)
    return old + weight * (new - old)
