"""The twins themselves, against formulas written another way."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch

from llmd.backend.kernels import reference, sampling_reference, select
from llmd.backend.protocol import SamplingParams
from llmd.backend.runner import sampler

NAN = float("nan")


def paged(keys: torch.Tensor, block_size: int, order: list[int], num_blocks: int) -> torch.Tensor:
    """One sequence's keys [L, Hkv, D] as a cache whose unused slots are NaN."""
    cache = torch.full((num_blocks, keys.shape[1], block_size, keys.shape[2]), NAN)
    for position, key in enumerate(keys):
        cache[order[position // block_size], :, position % block_size] = key
    return cache


def test_attention_over_pages_is_torchs_own_attention() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 11, 2, 8)
    query = torch.randn(5, 6, 8)
    order = [3, 0, 2]
    out = reference.paged_attention(
        query,
        paged(keys, 4, order, 5),
        paged(values, 4, order, 5),
        torch.tensor([[*order, 99]], dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([11], dtype=torch.int32),
        scale=0.3,
    )
    mask = torch.ones(5, 11).tril(6).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1).repeat_interleave(3, 0),
        values.transpose(0, 1).repeat_interleave(3, 0),
        attn_mask=mask,
        scale=0.3,
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected)


def test_a_window_of_one_sees_the_token_itself_alone() -> None:
    values = torch.randn(3, 1, 4)
    out = reference.paged_attention(
        torch.randn(3, 1, 4),
        paged(torch.randn(3, 1, 4), 2, [0, 1], 2),
        paged(values, 2, [0, 1], 2),
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        scale=1.0,
        window=1,
    )
    torch.testing.assert_close(out, values)


def test_a_padded_row_writes_nothing() -> None:
    cache = torch.zeros(2, 1, 2, 4)
    reference.store_kv(
        torch.ones(2, 1, 4), torch.ones(2, 1, 4), cache, cache.clone(), torch.tensor([-1, 3])
    )
    assert cache[1, 0, 1].tolist() == [1, 1, 1, 1]
    assert cache.sum() == 4


def test_an_interleaved_rotation_is_a_complex_product() -> None:
    x = torch.randn(3, 2, 8)
    angles = torch.randn(3, 4)
    turned, _ = reference.rotary(x, x, angles.cos(), angles.sin(), interleaved=True)
    as_complex = torch.view_as_complex(x.view(3, 2, 4, 2))
    expected = as_complex * torch.polar(torch.ones(3, 4), angles)[:, None]
    torch.testing.assert_close(turned, torch.view_as_real(expected).flatten(-2))


def sample_one(logits: list[float], seed: int, **settings: float) -> int:
    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([settings.get(name, default)], dtype=dtype)

    ids = sampling_reference.sample(
        torch.tensor([logits]),
        column("temperature", 1.0),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0),
        column("min_p", 0.0),
        torch.tensor([seed]),
        torch.tensor([7]),
    )
    return int(ids[0])


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    count = 20_000
    ids = sampling_reference.sample(
        logits.expand(count, 4),
        torch.ones(count),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.zeros(count),
        torch.full((count,), 1234567890123),
        torch.arange(count),
    )
    observed = torch.bincount(ids, minlength=4).double()
    expected = logits.double().softmax(0) * count
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3  # p > 0.001 at 3 degrees of freedom


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
        SamplingParams(temperature=1.7, top_k=0, top_p=0.5),
        SamplingParams(temperature=0.01, top_k=5, top_p=1.0, min_p=0.2),
        SamplingParams(temperature=0.0),
    ],
)
def test_a_seed_draws_the_same_token_as_on_the_cpu(params: SamplingParams) -> None:
    """The other definition is the CPU runner's sampler, row by row in numpy."""
    count, vocab_size = 200, 300
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    seeds = [(index * 0x9E3779B97F4A7C15) % 2**64 for index in range(count)]
    history = array("q", range(11))
    expected = [
        sampler.draw(row.numpy(), params, seed, history[: index % 11], 0, frozenset())
        for index, (row, seed) in enumerate(zip(logits, seeds, strict=True))
    ]
    drawn = sampling_reference.sample(
        logits,
        torch.full((count,), params.temperature),
        torch.full((count,), params.top_k, dtype=torch.int32),
        torch.full((count,), params.top_p),
        torch.full((count,), params.min_p),
        torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds]),
        torch.arange(count) % 11,
    )
    assert drawn.tolist() == expected


def test_the_noise_is_that_of_the_cpu() -> None:
    ids = torch.arange(5000)
    for seed, position in ((0, 0), (-1, 7), (2**62 + 5, 100_000)):
        ours = sampling_reference.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), ids)
        theirs = sampler.gumbel(seed, position, ids.numpy())
        torch.testing.assert_close(ours[0], torch.from_numpy(theirs), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("seed", range(30))
def test_filters_keep_what_they_promise(seed: int) -> None:
    logits = [1.0, 1.0, 0.9, -3.0]
    assert sample_one(logits, seed, top_k=1) == 0  # the lowest id among equals
    assert sample_one(logits, seed, temperature=0) == 0
    assert sample_one(logits, seed, top_k=2) in (0, 1)
    assert sample_one(logits, seed, top_p=0.5) in (0, 1)
    assert sample_one(logits, seed, min_p=0.95) in (0, 1)
    assert sample_one(logits, seed, top_p=0.0) == 0


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.zeros(1, 70)
    mask = torch.zeros(1, 3, dtype=torch.int32)
    mask[0, 0] = -(2**31)  # token 31, in the sign bit
    mask[0, 2] = 1  # token 64
    reference.apply_token_mask(logits, mask, torch.tensor([0], dtype=torch.int32))
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [31, 64]


def test_the_choice_says_why() -> None:
    gpu = torch.device("cuda:0")
    assert select.choose(gpu, triton_problem="").name == "triton"
    assert select.choose(torch.device("mps")).name == "torch"
    without = select.choose(gpu, triton_problem="is not installed")
    assert without.name == "torch"
    assert "pip install triton" in str(without)


def test_a_triton_that_cannot_be_imported_leaves_the_torch_path(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('no ptxas here')")
    code = (
        "import torch; from llmd.backend.kernels import select; "
        "print(select.choose(torch.device('cuda:0')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("torch kernels: cuda:0 is a GPU, but Triton cannot be imported")
    assert "no ptxas here" in done.stdout


def test_a_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch; from llmd.backend.kernels import select; "
        "select.load(select.choose(torch.device('cpu'))); "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
