"""Norms, rotations, activations, masks and sampling in Triton equal their twins."""

from __future__ import annotations

import pytest
import torch

from llmd.backend.kernels import activation, mask, norm, reference, rotary, sampling
from llmd.backend.kernels.sampling_reference import sample as sample_twin

from .shapes import DEVICE, IS_FULL, assert_close, randn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [64, 576, 2048, 4096, 8192] if IS_FULL else [576, 2048]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_their_twin(dtype: torch.dtype, width: int) -> None:
    x = randn(3, 2 * width, seed=1, dtype=dtype)[:, :width]
    weight = randn(width, seed=2, dtype=dtype)
    residual = randn(3, width, seed=3, dtype=dtype)
    plain, expected_plain = norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    assert isinstance(plain, torch.Tensor) and isinstance(expected_plain, torch.Tensor)
    assert_close(plain, expected_plain)
    actual = norm.rms_norm(x, weight, 1e-5, residual)
    expected = reference.rms_norm(x, weight, 1e-5, residual)
    assert_close(actual[1], expected[1])
    assert_close(actual[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_their_twins(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 1100, seed=1, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0
    assert_close(activation.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert_close(activation.gelu_mul(gate_up), reference.gelu_mul(gate_up))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated_dim", [80, 32])
def test_rotations_equal_their_twin(interleaved: bool, rotated_dim: int) -> None:
    angles = randn(4, rotated_dim // 2, seed=3)
    q, k = randn(4, 3, 80, seed=1), randn(4, 1, 80, seed=2)
    arguments = (q, k, angles.cos(), angles.sin(), interleaved)
    for actual, expected in zip(
        rotary.rotary(*arguments), reference.rotary(*arguments), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256] if IS_FULL else [96])
@pytest.mark.parametrize(
    ("has_norm", "cache_dtype"),
    [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float8_e4m3fn)],
)
def test_the_one_pass_before_attention_equals_its_twin(
    head_dim: int, has_norm: bool, cache_dtype: torch.dtype
) -> None:
    num_tokens, num_heads, num_kv_heads = 4, 4, 2
    projected = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=1)
    projected = projected.to(torch.bfloat16)
    if cache_dtype.itemsize == 1:  # what fp8 holds exactly: the interpreter rounds it wrongly
        projected = projected.round()
    heads = torch.unflatten(projected, -1, (-1, head_dim))
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = randn(num_tokens, head_dim // 2, seed=3) * (cache_dtype.itemsize > 1)
    weights = (randn(head_dim, seed=4), randn(head_dim, seed=5)) if has_norm else (None, None)
    slots = torch.tensor([5, -1, 31, 16], device=DEVICE)

    def run(form: object) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.full((2, 2, num_kv_heads, 16, head_dim), 3.0, device=DEVICE).to(cache_dtype)
        out = form.rotary_store(  # type: ignore[attr-defined]
            q,
            k,
            v,
            angles.cos(),
            angles.sin(),
            cache[0],
            cache[1],
            slots,
            q_weight=weights[0],
            k_weight=weights[1],
            key_scale=0.5 if cache_dtype.itemsize == 1 else 1.0,
        )
        return out, cache.to(torch.bfloat16)

    (q_out, cache), (expected_q, expected_cache) = run(rotary), run(reference)
    assert_close(q_out, expected_q)
    assert_close(cache, expected_cache)


def test_masks_equal_their_twin() -> None:
    vocab_size = 1500
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2, 47), generator=generator).to(torch.int32).to(DEVICE)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    actual, expected = randn(3, vocab_size, seed=1), randn(3, vocab_size, seed=1)
    mask.apply_token_mask(actual, bits, rows)
    reference.apply_token_mask(expected, bits, rows)
    assert torch.equal(actual, expected)


SETTINGS = [
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.8, 40, 0.9, 0.0),
    (1.5, 3, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.3, 0.0),
    (1.0, 0, 0.0, 0.0),
    (2.0, 0, 1.0, 0.2),
    (2.0, 100, 0.95, 0.05),
]


@pytest.mark.parametrize("kind", ["normal", "tied", "masked"])
def test_draws_equal_their_twin(kind: str) -> None:
    num_seeds, vocab_size = (8, 5000) if IS_FULL else (1, 1100)
    settings = SETTINGS if IS_FULL or kind == "normal" else SETTINGS[1::2]
    num_rows = num_seeds * len(settings)
    logits = randn(num_rows, vocab_size, seed=7) * 3
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, 3:] = float("-inf")
    columns = list(zip(*(settings * num_seeds), strict=True))
    arguments = (
        logits,
        torch.tensor(columns[0], device=DEVICE),
        torch.tensor(columns[1], dtype=torch.int32, device=DEVICE),
        torch.tensor(columns[2], device=DEVICE),
        torch.tensor(columns[3], device=DEVICE),
        torch.arange(num_rows, device=DEVICE) * 0x123456789ABCDEF - 3,
        torch.arange(num_rows, device=DEVICE) % 11,
    )
    actual = sampling.sample(*arguments)
    assert actual.tolist() == sample_twin(*arguments).tolist()


def test_without_filters_the_same_token_is_drawn() -> None:
    rows = 4
    logits = randn(rows, 1100, seed=2)
    arguments = (
        logits,
        torch.tensor([0.0, 1.0, 0.7, 2.0], device=DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        torch.ones(rows, device=DEVICE),
        torch.zeros(rows, device=DEVICE),
        torch.arange(rows, device=DEVICE),
        torch.arange(rows, device=DEVICE),
    )
    unfiltered = sampling.sample(*arguments, has_filters=False)
    assert unfiltered.tolist() == sample_twin(*arguments).tolist()
