"""Weights into blocks of few bits: Q8_0, Q4_0, Q5_0, Q4_K and Q6_K, in numpy.

    Q8_0   32 weights: scale f16, 32 × int8                               w = d·q
    Q4_0   32 weights: scale f16, 32 × 4 bits                             w = d·(q - 8)
    Q5_0   32 weights: scale f16, the fifth bits, 32 × 4 bits             w = d·(q - 16)
    Q4_K   256 weights: d, dmin f16, 8 × (6-bit scale, 6-bit min), 4 bits w = d·s·q - dmin·m
    Q6_K   256 weights: 4 low bits, 2 high bits, 16 × int8 scale, d f16   w = d·s·(q - 32)

The simple formats take their scale from the largest weight. For the K formats each group's scale
(and min) is searched: a few candidates, of each of which the rounding is taken and the best
scale for it found by weighted least squares; large weights count more. The group scales are
then rounded to their own few bits and the weights rounded again under what came out.

Every function takes float32 [blocks, weights of a block] and returns uint8 [blocks, bytes]; those
of AFFINE return the parts of w = q·scale + bias instead, as safetensors keep them.

Source: the block layouts of the ggml project's ggml-common.h; MLX's affine quantisation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
# Of the range in which better scales lie; twenty candidates make it a thousandth better, no more.
Q4_K_STEPS = np.linspace(-1, 1, 8, dtype=np.float32)
Q6_K_STEPS = np.linspace(-0.9, 0.9, 7, dtype=np.float32)


def q8_0(weights: Floats) -> Bytes:
    scale = np.abs(weights).max(axis=1) / 127
    scale16, inverse = _half(scale)
    quants = np.rint(weights * inverse[:, None]).astype(np.int8)
    return np.concatenate([scale16, quants.view(np.uint8)], axis=1)


def q4_0(weights: Floats) -> Bytes:
    quants, scale16 = _symmetric(weights, 8)
    return np.concatenate([scale16, quants[:, :16] | quants[:, 16:] << 4], axis=1)


def q5_0(weights: Floats) -> Bytes:
    quants, scale16 = _symmetric(weights, 16)
    high = np.packbits(quants >> 4, axis=1, bitorder="little")
    low = quants & 15
    return np.concatenate([scale16, high, low[:, :16] | low[:, 16:] << 4], axis=1)


def q4_k(weights: Floats) -> Bytes:
    groups = weights.reshape(-1, 32)
    scales, mins = (part.reshape(-1, 8) for part in _best_affine(groups, 15))
    d16, inverse = _half(scales.max(axis=1) / np.float32(63))
    dmin16, min_inverse = _half(mins.max(axis=1) / np.float32(63))
    scale_bits = np.rint(scales * inverse[:, None]).clip(0, 63).astype(np.uint8)
    min_bits = np.rint(mins * min_inverse[:, None]).clip(0, 63).astype(np.uint8)
    d = d16.view(np.float16).astype(np.float32) * scale_bits
    offset = dmin16.view(np.float16).astype(np.float32) * min_bits
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = (groups.reshape(-1, 8, 32) + offset[:, :, None]) / d[:, :, None]
    quants = np.rint(np.nan_to_num(exact, posinf=0, neginf=0)).clip(0, 15).astype(np.uint8)
    pairs = quants.reshape(-1, 4, 2, 32)  # two groups share 32 bytes
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d16, dmin16, _six_bits(scale_bits, min_bits), packed], axis=1)


def q6_k(weights: Floats) -> Bytes:
    groups = weights.reshape(-1, 16)
    scales = _best_symmetric(groups, 32).reshape(-1, 16)
    at = np.abs(scales).argmax(axis=1)[:, None]
    d16, inverse = _half(np.take_along_axis(scales, at, axis=1)[:, 0] / np.float32(-128))
    scale_bits = np.rint(scales * inverse[:, None]).clip(-128, 127).astype(np.int8)
    d = d16.view(np.float16).astype(np.float32) * scale_bits
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = groups.reshape(-1, 16, 16) / d[:, :, None]
    quants = np.rint(np.nan_to_num(exact, posinf=0, neginf=0)).clip(-32, 31) + 32
    parts = quants.astype(np.uint8).reshape(-1, 2, 4, 32)  # of each half: 4 times 32 weights
    low, high = parts & 15, parts >> 4
    low_bytes = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    high_bytes = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(weights)
    return np.concatenate(
        [
            low_bytes.reshape(count, 128),
            high_bytes.reshape(count, 64),
            scale_bits.view(np.uint8),
            d16,
        ],
        axis=1,
    )


# Format: (weights of a block, function).
QUANTIZERS: dict[str, tuple[int, Callable[[Floats], Bytes]]] = {
    "Q8_0": (32, q8_0),
    "Q4_0": (32, q4_0),
    "Q5_0": (32, q5_0),
    "Q4_K": (256, q4_k),
    "Q6_K": (256, q6_k),
}


# ------------------------------------------------------------- scale and bias by themselves


Affine = tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.float16]]  # codes, scale, bias


def affine8(weights: Floats) -> Affine:
    """[groups, 32] to 8 words of codes each; zero is exact."""
    scale, inverse = _half(np.abs(weights).max(axis=1) / 127)
    codes = (np.rint(weights * inverse[:, None]) + 128).astype(np.uint32)
    half = scale.view(np.float16)[:, 0]
    return _words(codes, 8), half, (half * np.float16(-128)).astype(np.float16)


def affine4(weights: Floats) -> Affine:
    """[groups, 32] to 4 words of codes each; the largest weight and zero are exact."""
    codes, scale = _symmetric(weights, 8)
    half = scale.view(np.float16)[:, 0]
    return _words(codes.astype(np.uint32), 4), half, (half * np.float16(-8)).astype(np.float16)


def affine4_searched(weights: Floats) -> Affine:
    """As `affine4`, with the scale and bias that leave the least error."""
    scales, mins = _best_affine(weights, 15)
    half, inverse = _half(scales)
    bias = (-mins).astype(np.float16)
    exact = (weights - bias.astype(np.float32)[:, None]) * inverse[:, None]
    return (
        _words(np.rint(exact).clip(0, 15).astype(np.uint32), 4),
        half.view(np.float16)[:, 0],
        bias,
    )


def _words(codes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """The first code in the lowest bits of the first word."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(
        codes.reshape(len(codes), -1, 32 // bits) << shifts, axis=2
    )
    return words


# (bits, whether scale and bias are searched): function. 8 bits leave nothing to search for.
AFFINE: dict[tuple[int, bool], Callable[[Floats], Affine]] = {
    (8, False): affine8,
    (8, True): affine8,
    (4, False): affine4,
    (4, True): affine4_searched,
}


def floats_of(raw: bytes, dtype: str) -> Floats:
    """Numbers of F32, F16 or BF16."""
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def as_numbers(weights: Floats, dtype: str) -> bytes:
    """As the bytes of F32, F16 or BF16, rounded to the nearest, the even of two."""
    if dtype == "BF16":
        bits = weights.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    return weights.astype(np.float16 if dtype == "F16" else np.float32).tobytes()


def _half(scale: Floats) -> tuple[Bytes, Floats]:
    """As float16 bytes, and the inverse of what these bytes say: rounding must use that."""
    half = scale.astype(np.float16)
    exact = half.astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(exact == 0, np.float32(0), np.float32(1) / exact)
    return half.reshape(-1, 1).view(np.uint8), inverse


def _symmetric(weights: Floats, middle: int) -> tuple[Bytes, Bytes]:
    """Quants of 0 .. 2·middle - 1 around `middle`: the largest weight becomes 0, exactly."""
    at = np.abs(weights).argmax(axis=1)[:, None]
    scale16, inverse = _half(np.take_along_axis(weights, at, axis=1)[:, 0] / np.float32(-middle))
    quants = np.rint(weights * inverse[:, None]) + middle
    return quants.clip(0, 2 * middle - 1).astype(np.uint8), scale16


def _best_symmetric(groups: Floats, middle: int) -> Floats:
    """The scale of each group for which Σ x²·(x - d·q)² is least."""
    at = np.abs(groups).argmax(axis=1)[:, None]
    largest = np.take_along_axis(groups, at, axis=1)
    importance = groups * groups
    best = np.full(len(groups), -1, np.float32)
    scale = np.zeros(len(groups), np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        for step in Q6_K_STEPS:
            inverse = np.nan_to_num(-(middle + step) / largest, posinf=0, neginf=0)
            quants = np.rint(groups * inverse).clip(-middle, middle - 1)
            cross = (importance * groups * quants).sum(axis=1)
            square = (importance * quants * quants).sum(axis=1)
            gain = np.nan_to_num(cross * cross / square)  # how much of the error this removes
            is_better = gain > best
            best[is_better] = gain[is_better]
            scale = np.where(is_better, np.nan_to_num(cross / square), scale)
    return scale


def _best_affine(groups: Floats, top: int) -> tuple[Floats, Floats]:
    """Scale and min (0 or more) of each group for which Σ w·(x - d·q + m)² is least."""
    importance = np.sqrt((groups * groups).mean(axis=1, keepdims=True)) + np.abs(groups)
    low = np.minimum(groups.min(axis=1, keepdims=True), 0)
    span = groups.max(axis=1, keepdims=True) - low
    sum_w = importance.sum(axis=1)
    sum_x = (importance * groups).sum(axis=1)
    scale, offset = (span / top)[:, 0], -low[:, 0]
    best = _error(groups, importance, scale, offset, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        for step in Q4_K_STEPS:
            inverse = np.nan_to_num((top + step) / span, posinf=0)
            quants = np.rint((groups - low) * inverse).clip(0, top)
            sum_q = (importance * quants).sum(axis=1)
            sum_qq = (importance * quants * quants).sum(axis=1)
            sum_xq = (importance * groups * quants).sum(axis=1)
            determinant = sum_w * sum_qq - sum_q * sum_q
            fitted = (sum_w * sum_xq - sum_x * sum_q) / determinant
            lowest = (sum_qq * sum_x - sum_q * sum_xq) / determinant
            alone = sum_xq / sum_qq  # where the least squares want a min above zero
            new_scale = np.where(lowest > 0, alone, fitted)
            new_offset = np.maximum(-lowest, 0)
            remainder = groups - new_scale[:, None] * quants + new_offset[:, None]
            error = (importance * remainder * remainder).sum(axis=1)
            is_better = np.isfinite(error) & (determinant > 0) & (error < best) & (new_scale > 0)
            best = np.where(is_better, error, best)
            scale = np.where(is_better, new_scale, scale)
            offset = np.where(is_better, new_offset, offset)
    return scale.astype(np.float32), offset.astype(np.float32)


def _error(groups: Floats, importance: Floats, scale: Floats, offset: Floats, top: int) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.nan_to_num((groups + offset[:, None]) / scale[:, None])
    quants = np.rint(exact).clip(0, top)
    remainder = groups - scale[:, None] * quants + offset[:, None]
    total: Floats = (importance * remainder * remainder).sum(axis=1)
    return total


def _six_bits(scales: Bytes, mins: Bytes) -> Bytes:
    """Eight scales and eight mins of six bits in twelve bytes: the last four of each are split."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)
