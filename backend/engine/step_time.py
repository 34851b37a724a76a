"""How long the next step will take, learnt from those that ran; so how long a chunk may be.

A prompt that is read while others stream makes their next token late. With a step of pure decoding
known to take `decode_s`, and a prompt token known to add `token_s`, a chunk of

    (ratio - 1) * decode_s / token_s     tokens

makes the gap `ratio` times what the streams are used to, and no more. At a ratio of 2 the prompt
gets half of each step: it takes at most twice as long as it would alone.

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

SMOOTHING = 0.2  # weight of the newest step: ten steps forget the past
STALE_STEPS = 24  # beside a prompt: then decoding is measured alone again,
STALE_SMOOTHING = 0.6  # ... and what was known before weighs less
MAX_OUTLIER = 4.0  # a pause of the machine counts as no more than this many usual steps
MIN_CHUNK = 4  # tokens: one tile of the CPU kernels, which computes fewer no faster
FIRST_CHUNK = 64  # tokens, before the cost of a prompt token is known
FIRST_DRAFT_COST = 0.2  # of a step of one row, before it is known


class StepTime:
    """Smoothed durations of steps, by their number of decoding sequences."""

    def __init__(self) -> None:
        # The mutable state. Keys are bit lengths: 1, 2-3, 4-7, ... decoding sequences.
        self._decode_s: dict[int, float] = {}
        self._token_s: float | None = None
        self._draft_s: float | None = None
        self._num_mixed = 0  # steps with decodes and prompts since one of decodes alone

    def __repr__(self) -> str:
        steps = ", ".join(f"{1 << key - 1}+: {s * 1e3:.1f} ms" for key, s in self._decode_s.items())
        token = "?" if self._token_s is None else f"{self._token_s * 1e6:.0f} us"
        return f"<StepTime decode {{{steps}}}, prompt token {token}>"

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, duration_s: float, num_drafts: int = 0
    ) -> None:
        """A step took this long. One of both prompts and drafts teaches nothing."""
        if num_drafts:
            decode_s = self.decode_s(num_decodes)
            if decode_s is not None and num_prompt_tokens == 0:
                draft_s = max(duration_s - decode_s, 0.0) / num_drafts
                self._draft_s = _smooth(self._draft_s, draft_s)
        elif num_prompt_tokens == 0:
            key = num_decodes.bit_length()
            weight = STALE_SMOOTHING if self._is_stale else SMOOTHING
            self._decode_s[key] = _smooth(self._decode_s.get(key), duration_s, weight)
            self._num_mixed = 0
        else:
            self._num_mixed += bool(num_decodes)
            decode_s = self.decode_s(num_decodes) or 0.0
            token_s = max(duration_s - decode_s, 0.0) / num_prompt_tokens
            self._token_s = _smooth(self._token_s, token_s)

    @property
    def _is_stale(self) -> bool:
        return self._num_mixed >= STALE_STEPS

    def decode_s(self, num_decodes: int) -> float | None:
        """What a step of so many decodes takes, or one of the nearest size that was seen."""
        if not num_decodes or not self._decode_s:
            return None
        key = num_decodes.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda seen: (abs(seen - key), seen))]

    def draft_cost(self, num_decodes: int) -> float:
        """What a draft's row adds to a step of so many decodes, in the time of one token of it."""
        decode_s = self.decode_s(num_decodes)
        if not decode_s or self._draft_s is None:
            return FIRST_DRAFT_COST
        return self._draft_s * num_decodes / decode_s

    def max_prompt_tokens(self, num_decodes: int, ratio: float) -> int | None:
        """Prompt tokens that keep the step within `ratio` times a decode step; None: no limit.

        0 now and then, so that decoding is measured alone.
        """
        decode_s = self.decode_s(num_decodes)
        if decode_s is None:
            return None
        if self._is_stale:
            return 0
        if self._token_s is None:
            return FIRST_CHUNK
        if self._token_s <= 0.0:
            return None
        return max(int((ratio - 1.0) * decode_s / self._token_s), MIN_CHUNK)


def _smooth(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    if old is None:
        return new
    if old > 0.0:
        new = min(new, MAX_OUTLIER * old)
    return old + weight * (new - old)
