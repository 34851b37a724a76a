"""From logits to token ids, one row at a time, so that a row's draw is its own.

Order: logit bias, penalties, stop ids before min_tokens, then greedy, or top_k, typical_p, top_p,
min_p, temperature, draw. The draw is Gumbel-max (Maddison et al., "A* Sampling", 2014):
argmax(logit / T + g), where g is made of a hash of (seed, position, token id). No generator has a
state: the same seed gives the same text in any batch, after a preemption and after a restart.
Ties go to the lowest id, everywhere.

The noise, exactly, for whoever draws elsewhere. All on unsigned 64 bits that wrap:

    mix(x)  x += 9E3779B97F4A7C15; x = (x ^ x >> 30) · BF58476D1CE4E5B9;
            x = (x ^ x >> 27) · 94D049BB133111EB; x ^ x >> 31        (hexadecimal; splitmix64)
    h = mix(mix(mix(seed) + position) + token id)
    u = ((h >> 11) + 0.5) / 2^53           g = -log(-log u)          (float64)

`position` is how many tokens are known when the token is drawn: the first token after a prompt of n
has position n.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..engine.batch import Logprobs
from ..protocol import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

MIN_THIN_TEMPERATURE = 0.01  # below, float32 bounds of the noise say nothing

_UNUSABLE = "the model's logits are not finite for this sequence"


class UnusableLogits(Exception):
    """NaN, or every token is masked. This sequence cannot go on."""


def draw(
    logits: Floats,
    params: SamplingParams,
    seed: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    stop_ids: frozenset[int],
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The next token of a sequence whose known tokens are `token_ids`.

    logits [vocab_size] float32, not changed. Raises UnusableLogits.
    """
    scores = adjusted(logits, params, token_ids, num_prompt_tokens, stop_ids, allowed)
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        raise UnusableLogits(_UNUSABLE)
    if params.temperature <= 0 or params.top_k == 1:
        return best
    return draw_among(candidates(scores, params), scores, params, seed, len(token_ids))


def draw_among(ids: Ids, scores: Floats, params: SamplingParams, seed: int, position: int) -> int:
    """The draw itself: the winner of these ids. Ids that cannot win may be left out."""
    noise = gumbel(seed, position, ids)
    # float64: at a tiny temperature float32 would overflow
    return int(ids[(scores[ids].astype(np.float64) / params.temperature + noise).argmax()])


def is_plain(params: SamplingParams) -> bool:
    """The logits are drawn from as they are, once min_tokens are there."""
    return not (_has_penalties(params) or params.logit_bias)


def draws_from_all(params: SamplingParams) -> bool:
    """No cut-off, and noise: every token can be drawn."""
    has_cut = params.top_k > 0 or params.top_p < 1 or params.typical_p < 1 or params.min_p > 0
    return params.temperature >= MIN_THIN_TEMPERATURE and not has_cut


def logprobs_of(logits: Floats, token_id: int, num_top: int) -> Logprobs:
    """Log-softmax of the unmodified logits: the chosen token's, and those of the most likely."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    total = peak + np.log(np.exp(wide - peak).sum())
    top = _largest(logits, num_top) if num_top > 0 else np.empty(0, np.int64)
    return Logprobs(
        chosen=float(wide[token_id] - total),
        top_ids=tuple(int(id) for id in top),
        top=tuple(float(wide[id] - total) for id in top),
    )


def adjusted(
    logits: Floats,
    params: SamplingParams,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    stop_ids: frozenset[int],
    allowed: NDArray[np.bool_] | None,
) -> Floats:
    """The logits with penalties, biases, early stop ids and the mask applied; a copy if any is.

    Raises UnusableLogits for a NaN.
    """
    if np.isnan(logits).any():
        raise UnusableLogits(_UNUSABLE)
    scores = logits
    if _has_penalties(params):
        scores = _penalized(scores.copy(), params, token_ids)
    if params.logit_bias:
        scores = scores.copy()
        for token_id, bias in params.logit_bias.items():
            if 0 <= token_id < len(scores):
                scores[token_id] += bias
    num_outputs = len(token_ids) - num_prompt_tokens
    if num_outputs < params.min_tokens and stop_ids:
        scores = scores.copy()
        scores[[id for id in stop_ids if 0 <= id < len(scores)]] = -np.inf
    if allowed is not None:
        scores = np.where(allowed, scores, np.float32(-np.inf))
    return scores


def _has_penalties(params: SamplingParams) -> bool:
    return params.repeat_last_n != 0 and (
        params.repeat_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _penalized(scores: Floats, params: SamplingParams, token_ids: Sequence[int]) -> Floats:
    """Prompt tokens in the window count too, as in llama.cpp."""
    last = params.repeat_last_n
    window = np.asarray(token_ids if last < 0 else token_ids[-last:], dtype=np.int64)
    ids, counts = np.unique(window[(window >= 0) & (window < len(scores))], return_counts=True)
    seen = scores[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    seen -= params.frequency_penalty * counts + params.presence_penalty
    scores[ids] = seen
    return scores


def candidates(scores: Floats, params: SamplingParams) -> Ids:
    """The ids that may be drawn, best first where a cut-off had to sort them."""
    if params.top_k > 0:
        ids = _largest(scores, params.top_k)
    elif params.typical_p < 1:
        ids = np.lexsort((np.arange(len(scores)), -scores)).astype(np.int64)
    elif params.top_p < 1:
        return _nucleus(scores, params)
    else:
        ids = np.arange(len(scores), dtype=np.int64)
    ids = ids[np.isfinite(scores[ids])]
    if params.typical_p < 1:
        ids = _typical(scores, ids, params.typical_p)
    if params.top_p < 1:
        chances = _softmax(scores[ids])
        ids = ids[: int(np.searchsorted(np.cumsum(chances), params.top_p)) + 1]
    return _above_min_p(ids, scores, params)


def _above_min_p(ids: Ids, scores: Floats, params: SamplingParams) -> Ids:
    if params.min_p <= 0:
        return ids
    kept: Ids = ids[scores[ids] >= scores[ids].max() + np.log(params.min_p)]
    return kept


def _nucleus(scores: Floats, params: SamplingParams) -> Ids:
    """The most likely ids that together reach top_p, best first; few of them, mostly."""
    powers = np.exp(scores.astype(np.float64) - scores.max())
    chances = powers / powers.sum()
    count = 256
    while True:
        ids = _largest(scores, count)
        reached = np.cumsum(chances[ids])
        if reached[-1] >= params.top_p or count >= len(scores):
            break
        count *= 8
    ids = ids[: int(np.searchsorted(reached, params.top_p)) + 1]
    return _above_min_p(ids[np.isfinite(scores[ids])], scores, params)


def _largest(scores: Floats, count: int) -> Ids:
    """The `count` best ids, best first, ties by id. No sort of the whole vocabulary."""
    if count >= len(scores):
        return np.lexsort((np.arange(len(scores)), -scores)).astype(np.int64)
    ids = np.flatnonzero(scores >= _threshold(scores, count))  # a few too many
    return ids[np.lexsort((ids, -scores[ids]))][:count].astype(np.int64)


def _threshold(scores: Floats, count: int) -> np.float32:
    """At least `count` scores reach it, and mostly not many more.

    As many parts of the vocabulary have a largest score that does. Far fewer numbers to partition
    than there are scores.
    """
    size = max(1, len(scores) // (4 * count))
    whole = len(scores) // size * size
    peaks = scores[:whole].reshape(-1, size).max(1)
    threshold: np.float32 = np.partition(peaks, len(peaks) - count)[len(peaks) - count]
    return threshold


def _typical(scores: Floats, ids: Ids, typical_p: float) -> Ids:
    """Meister et al., "Locally Typical Sampling", 2023: nearest to the expected surprise first."""
    chances = _softmax(scores[ids])
    surprise = -np.log(np.maximum(chances, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (chances * surprise).sum())
    order = np.argsort(distance, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(chances[order]), typical_p)) + 1]
    return ids[np.sort(kept)]


def _softmax(scores: Floats) -> NDArray[np.float64]:
    powers = np.exp(scores.astype(np.float64) - scores.max())
    result: NDArray[np.float64] = powers / powers.sum()
    return result


def gumbel(seed: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, the same wherever and whenever it is asked for.

    The hash is the finaliser of splitmix64 (Steele et al., 2014), chained over the three inputs.
    """
    with np.errstate(over="ignore"):
        bits = _mix(_base(seed, position) + ids.astype(np.uint64))
    # 53 bits, moved off 0 and 1: log(0) would make the noise infinite
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    result: NDArray[np.float64] = -np.log(-np.log(uniform))
    return result


def noise_base(seed: int, position: int) -> int:
    """What the noise of all token ids at a position has in common: h is mix(base + id)."""
    with np.errstate(over="ignore"):
        return int(_base(seed, position)[0])


def _base(seed: int, position: int) -> NDArray[np.uint64]:
    return _mix(_mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) + np.uint64(position))


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    mixed = np.atleast_1d(value) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
