"""The frequencies of rotary position embedding (Su et al., "RoFormer", 2021), and their stretching.

    none        frequency i of n is theta ** (-i / n)
    linear      all divided by a factor (Chen et al. 2023)
    llama3      long waves divided, short ones kept, those between blended (Llama 3.1's model card)
    yarn        the same idea by the number of turns, and scores sharpened (Peng et al. 2023)
    longrope    one divisor for each frequency, two sets of them: the served context picks
                (Ding et al. 2024)
    proportional  the first few frequencies of the whole head, the rest stand still (Gemma 4)

`dynamic` (NTK-aware, which stretches as a text outgrows the trained length) equals none within the
trained length, and no text is longer than that here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of a model were stretched, in the terms of `rope_parameters`."""

    kind: str
    factor: float = 1.0
    original_context_length: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: turns within the original context
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the bounds between the two are whole numbers
    attention_factor: float = 1.0  # yarn and longrope: cos and sin are multiplied with it
    share: float = 1.0  # proportional
    short_factors: tuple[float, ...] = ()  # longrope, rope_dim / 2 each
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of one kind of layer.

    `dim` of each head's elements turn, the first ones. `is_interleaved` pairs neighbours (0, 1),
    (2, 3); else the pairs are (i, i + dim / 2).
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    is_interleaved: bool = False
    query_scaling_beta: float = 0.0  # Llama 4's: queries grow with log(position / original context)
    divisors: tuple[float, ...] = ()  # a GGUF's own, of each frequency
    is_windowed: bool = False  # of layers with a window, to which a file's divisors do not apply

    def magnitude(self) -> float:
        """What cos and sin are multiplied with."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def frequencies(self, context_length: int) -> list[float]:
        """dim / 2 of them, for texts of up to `context_length` tokens."""
        half = self.dim // 2
        plain = [self.theta ** (-i / half) for i in range(half)]
        if self.divisors:
            return [value / factor for value, factor in zip(plain, self.divisors, strict=True)]
        scaling = self.scaling
        if scaling is None or scaling.kind == "dynamic":
            return plain
        if scaling.kind == "proportional":
            turning = int(scaling.share * half)
            return [value / scaling.factor if i < turning else 0.0 for i, value in enumerate(plain)]
        if scaling.kind == "linear":
            return [frequency / scaling.factor for frequency in plain]
        if scaling.kind == "llama3":
            return [_llama3(frequency, scaling) for frequency in plain]
        if scaling.kind == "yarn":
            return _yarn(plain, self.theta, scaling)
        assert scaling.kind == "longrope"
        is_long = context_length > scaling.original_context_length
        factors = scaling.long_factors if is_long else scaling.short_factors
        return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """YaRN's sharpening of the scores, where the configuration does not spell it out."""
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def longrope_attention_factor(factor: float, original_context_length: int) -> float:
    """LongRoPE's, likewise."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    length = scaling.original_context_length
    wave = 2 * math.pi / frequency
    if wave > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wave < length / scaling.high_freq_factor:
        return frequency
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (length / wave - scaling.low_freq_factor) / span
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(plain: list[float], theta: float, scaling: RopeScaling) -> list[float]:
    dim = 2 * len(plain)

    def index_of(turns: float) -> float:
        """The frequency that turns so often within the original context."""
        wave = scaling.original_context_length / (turns * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretched = []
    for index, frequency in enumerate(plain):
        share = min(max((index - low) / (high - low), 0.0), 1.0)
        stretched.append(frequency / scaling.factor * share + frequency * (1 - share))
    return stretched
