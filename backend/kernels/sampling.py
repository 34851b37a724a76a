"""Drawing the next token on the device, in Triton; twin: `sampling_reference.sample`.

    cutoff   one program per row: the filters' verdict as two numbers (value, token id); a token is
             kept iff its logit is greater than the value, or equal with no greater id
    draw     one program per (row, tile of the vocabulary): the best of logit / T + noise
    choose   one program per row: the best of the tiles, the lowest id among equals

No sort: the cutoff is found by radix search, four bits a pass, on the bits of the logits, which
order as integers do. Rows without a filter leave `cutoff` after one look, and if the host knows
that no row has one it is not launched.

Scores and noise are fp32 here and float64 in the twin: a draw differs where the two best scores are
within a millionth of each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
CUTOFF_BLOCK = 2048
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(value):
    """A step of splitmix64 on uint64."""
    value = value + tl.full([], GAMMA, tl.uint64)
    value = (value ^ (value >> 30)) * tl.full([], FIRST, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full([], SECOND, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def gumbel_noise(seed, position, token_ids):
    """As `sampling_reference.gumbel_noise`: the same 53 bits, but the logarithms in fp32.

    The uniform number u comes with the distance to whichever of 0 and 1 is nearer, so that neither
    logarithm loses digits: -log(u) = -log1p(-(1 - u)), by way of log (Kahan's quotient).
    """
    base = mix(mix(seed.to(tl.uint64)) + position.to(tl.uint64))
    fraction = (mix(base + token_ids.to(tl.uint64)) >> 11).to(tl.int64)
    is_low = fraction < 4503599627370496  # 2^52
    nearer = tl.where(is_low, fraction, 9007199254740991 - fraction)
    distance = (nearer.to(tl.float32) + 0.5) * 1.1102230246251565e-16  # 2^-53
    rest = 1.0 - distance
    quotient = distance / tl.where(rest == 1.0, 1.0, 1.0 - rest)
    below_one = tl.where(rest == 1.0, distance, -tl.log(rest) * quotient)
    return -tl.log(tl.where(is_low, -tl.log(distance), below_one))


@triton.jit
def ordered(logits):
    """fp32 to uint32 of the same order: a negative number's bits run backwards."""
    bits = logits.to(tl.uint32, bitcast=True)
    return tl.where(bits > 0x7FFFFFFF, ~bits, bits + 0x80000000)


@triton.jit
def unordered(key):
    """The inverse of `ordered`."""
    return tl.where(key > 0x7FFFFFFF, key - 0x80000000, ~key).to(tl.float32, bitcast=True)


@triton.jit
def exceeding(
    row_ptr,
    vocab_size,
    keys,
    cut_value,
    cut_id,
    row_max,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the kept tokens with a greater key than each of `keys` [16]: their number, or their sum of
    exp(logit - max)."""
    total = tl.zeros([16, BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        kept = (logits > cut_value) | ((logits == cut_value) & (ids <= cut_id))
        weight = tl.exp(logits - row_max) if IS_MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where(kept & (ids < vocab_size), weight, 0.0)
        total += tl.where(ordered(logits)[None, :] > keys[:, None], weight[None, :], 0.0)
    return tl.sum(total, 1)


@triton.jit
def smallest_key(
    row_ptr,
    vocab_size,
    wanted,
    cut_value,
    cut_id,
    row_max,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key that less than `wanted` > 0 exceeds, and how much does. Eight digits of four
    bits: each is the number of its values that are too small, whatever follows."""
    digits = tl.arange(0, 16)
    key = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    shift = tl.full([], 32, tl.uint32)
    for _ in range(8):
        shift = shift - 4
        last = key + (digits.to(tl.uint32) << shift) + ((tl.full([], 1, tl.uint32) << shift) - 1)
        found = exceeding(row_ptr, vocab_size, last, cut_value, cut_id, row_max, IS_MASS, BLOCK)
        digit = tl.minimum(tl.sum((found >= wanted).to(tl.int32), 0), 15)
        key += digit.to(tl.uint32) << shift
        above = tl.sum(tl.where(digits == digit, found, 0.0), 0)
    return key, above


@triton.jit
def nth_equal(row_ptr, vocab_size, value, n, BLOCK: tl.constexpr):
    """The id of the n-th token (from 1) whose logit is `value`."""
    seen = 0
    found = vocab_size - 1
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        equal = ((logits == value) & (ids < vocab_size)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        here = tl.min(tl.where((equal == 1) & (rank == n), ids, vocab_size), 0)
        found = tl.minimum(found, here)
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def cutoff_kernel(
    cut_value_ptr,
    cut_id_ptr,
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut_value = tl.full([], float("-inf"), tl.float32)
    cut_id = vocab_size
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    if has_top_k | has_top_p | (min_p > 0.0):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
            best = tl.maximum(best, logits.to(tl.float32))
        row_max = tl.max(best, 0)
        if has_top_k:
            # The smallest key that fewer than k tokens exceed is the k-th token's.
            key, above = smallest_key(
                row_ptr,
                vocab_size,
                top_k.to(tl.float32),
                float("-inf"),
                vocab_size,
                row_max,
                False,
                BLOCK,
            )
            cut_value = unordered(key)
            num = top_k - above.to(tl.int32)
            cut_id = nth_equal(row_ptr, vocab_size, cut_value, num, BLOCK)
        if has_top_p:
            # The smallest key whose exceeding tokens hold less than p of what is left. At least
            # one token stays, also at p = 0.
            none = tl.full([16], 0, tl.uint32)
            totals = exceeding(row_ptr, vocab_size, none, cut_value, cut_id, row_max, True, BLOCK)
            wanted = tl.maximum(top_p * tl.max(totals, 0), 1e-30)
            key, mass = smallest_key(
                row_ptr, vocab_size, wanted, cut_value, cut_id, row_max, True, BLOCK
            )
            value = unordered(key)
            each = tl.exp(value - row_max)
            # Of `num` equals, the j-th (from 0) stays iff mass + j * each < wanted.
            num = tl.ceil((wanted - mass) / each)
            num = tl.minimum(tl.maximum(num, 1.0), vocab_size * 1.0).to(tl.int32)
            new_id = nth_equal(row_ptr, vocab_size, value, num, BLOCK)
            cut_id = tl.where(value > cut_value, new_id, tl.minimum(cut_id, new_id))
            cut_value = tl.maximum(value, cut_value)
        if min_p > 0.0:
            floor = row_max + tl.log(min_p)
            cut_id = tl.where(floor > cut_value, vocab_size, cut_id)
            cut_value = tl.maximum(floor, cut_value)
    tl.store(cut_value_ptr + row, cut_value)
    tl.store(cut_id_ptr + row, cut_id)


@triton.jit
def draw_kernel(
    best_ptr,
    best_id_ptr,
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    cut_value_ptr,
    cut_id_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    BLOCK: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    real = ids < vocab_size
    scores = tl.load(logits_ptr + row * logits_stride + ids, mask=real, other=float("-inf"))
    scores = scores.to(tl.float32)
    if HAS_CUTOFF:
        cut_value = tl.load(cut_value_ptr + row)
        cut_id = tl.load(cut_id_ptr + row)
        kept = (scores > cut_value) | ((scores == cut_value) & (ids <= cut_id))
        scores = tl.where(kept, scores, float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        noise = gumbel_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
        scores = scores / temperature + noise
    best = tl.max(scores, 0)
    # Not argmax: its tie rule inside a tile is the compiler's.
    best_id = tl.min(tl.where((scores == best) & real, ids, vocab_size), 0)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(best_id_ptr + row * num_tiles + tile, best_id)


@triton.jit
def choose_kernel(out_ptr, best_ptr, best_id_ptr, num_tiles, vocab_size, TILES_P2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_P2)
    real = tiles < num_tiles
    best = tl.load(best_ptr + row * num_tiles + tiles, mask=real, other=float("-inf"))
    ids = tl.load(best_id_ptr + row * num_tiles + tiles, mask=real, other=vocab_size)
    chosen = tl.min(tl.where((best == tl.max(best, 0)) & real, ids, vocab_size), 0)
    # Nothing compares equal to NaN: such a row gives an id, and the runner reports its logits.
    tl.store(out_ptr + row, tl.minimum(chosen, vocab_size - 1).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    has_filters: bool = True,
) -> Tensor:
    """As `sampling_reference.sample`. `has_filters` False: the host knows that no row filters."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    assert logits.stride(-1) == 1
    num_tiles = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    cut_value = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    cut_id = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if has_filters:
        cutoff_kernel[(num_rows,)](
            cut_value,
            cut_id,
            logits,
            top_k,
            top_p,
            min_p,
            logits.stride(0),
            vocab_size,
            BLOCK=min(CUTOFF_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=16,
        )
    draw_kernel[(num_rows, num_tiles)](
        best,
        best_id,
        logits,
        temperature,
        seeds,
        positions,
        cut_value,
        cut_id,
        logits.stride(0),
        vocab_size,
        num_tiles,
        BLOCK=BLOCK,
        HAS_CUTOFF=has_filters,
    )
    choose_kernel[(num_rows,)](
        out, best, best_id, num_tiles, vocab_size, TILES_P2=triton.next_power_of_2(num_tiles)
    )
    return out
