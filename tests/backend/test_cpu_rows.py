"""The compiled operations on rows, each against torch: see kernels.cpu_rows for their fields."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmd.backend.kernels import cpu_step
from llmd.backend.kernels.cpu_launch import Launcher, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"compiled kernels: {why_not()}")

LIMITS = {4: 127, 8: 32767}
TYPES = {4: torch.int8, 8: torch.int16}
WIDTHS = [32, 96, 128, 160, 576]  # blocks go four by four; some are left


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(2)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Out:
    """What an operation writes: rows for weights of so many bits, a scale and a sum per block."""

    def __init__(self, num_rows: int, width: int, bits: int) -> None:
        size = 4 * width if bits == 16 else 2 * width
        self.bits, self.width = bits, width
        self.rows = torch.zeros((num_rows, size), dtype=torch.uint8)
        self.scales = torch.zeros((num_rows, width // 32, 2))

    def integers(self) -> Tensor:
        return self.rows.view(TYPES[self.bits])[:, : self.width].reshape(len(self.rows), -1, 32)

    def values(self) -> Tensor:
        if self.bits == 16:
            return self.rows.view(torch.float32)
        return (self.integers() * self.scales[..., :1]).flatten(1)


def quantized(launcher: Launcher, x: Tensor, bits: int) -> Out:
    out = Out(len(x), x.shape[1], bits)
    op = (cpu_step.QUANTIZE, x.data_ptr(), x.shape[1], bits)
    launcher.run_alone((*op, out.rows.data_ptr(), out.scales.data_ptr()), len(x))
    return out


def gated(launcher: Launcher, x: Tensor, bits: int, activation: int) -> Out:
    out = Out(len(x), x.shape[1] // 2, bits)
    op = (cpu_step.GATE, x.data_ptr(), out.width, bits)
    fields = (*op, out.rows.data_ptr(), out.scales.data_ptr(), activation)
    launcher.run_alone(fields, len(x))
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_block_is_rounded_to_its_own_largest(launcher: Launcher, width: int, bits: int) -> None:
    x = noise(5, width)
    x[1, :32] = 0
    out = quantized(launcher, x, bits)
    blocks = x.view(len(x), -1, 32)
    peaks = blocks.abs().amax(2, keepdim=True)
    # not `number / tensor`, which torch computes as a product with the reciprocal
    factor = torch.where(peaks > 1e-30, torch.tensor(float(LIMITS[bits])) / peaks, 0)
    expected = (blocks * factor).round()
    assert torch.equal(out.integers().float(), expected)
    assert torch.equal(out.scales[..., 0], (peaks / LIMITS[bits]).squeeze(2))
    if bits == 4:
        assert torch.equal(out.scales[..., 1], out.scales[..., 0] * expected.sum(2))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_has_the_same_bits_wherever_it_lies(launcher: Launcher, bits: int) -> None:
    """Of six blocks four are rounded together, and two alone."""
    x = noise(1, 6 * 64)
    turned = torch.cat([part.roll(128) for part in x.chunk(2, 1)], 1)
    one, other = (gated(launcher, rows, bits, 0) for rows in (x, turned))
    assert torch.equal(one.integers().roll(4, 1), other.integers())
    assert torch.equal(one.scales.roll(4, 1), other.scales)


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_products_are_those_of_torch(launcher: Launcher, width: int, activation: int) -> None:
    x = 4 * noise(3, 2 * width)
    x[0, :8] = torch.tensor([0, -0.0, 1e-30, -90, 90, -1000, 1000, -20])
    gate, up = x.double().chunk(2, 1)
    expected = functional.gelu(gate, approximate="tanh") if activation else functional.silu(gate)
    expected *= up
    exact = gated(launcher, x, 16, activation).values()
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-7)
    coarse, fine = (gated(launcher, x, bits, activation) for bits in (4, 8))
    for out in (coarse, fine):
        error = (out.values() - exact).view(len(x), -1, 32).abs().amax(2)
        assert bool((error <= 0.51 * out.scales[..., 0]).all())


@pytest.mark.parametrize("activation", [0, 1])
def test_a_gate_that_is_no_number_stays_none(launcher: Launcher, activation: int) -> None:
    x = noise(1, 64)
    x[0, 3] = torch.nan
    values = gated(launcher, x, 16, activation).values()
    assert values.isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("num_deltas", [0, 1, 2])
@pytest.mark.parametrize("has_out_norm", [False, True])
@pytest.mark.parametrize("width", [96, 576])
def test_a_norm_is_that_of_the_sum_of_residual_and_branches(
    launcher: Launcher, width: int, has_out_norm: bool, num_deltas: int, is_layer: bool
) -> None:
    hidden, weight, out_weight = 3 + noise(4, width), noise(width), noise(1, width)[0]
    deltas = [noise(4 + index, width)[:4] for index in range(num_deltas)]
    factor = torch.tensor(0.5)
    summed = hidden.double()
    for index, delta in enumerate(deltas):
        added = delta.double()
        if index == 0:
            if has_out_norm:
                added = added * (added**2).mean(1, keepdim=True) ** -0.5 * out_weight
            added = added * factor
        summed = summed + added
    centered = summed - summed.mean(1, keepdim=True) if is_layer else summed
    expected = centered * (centered**2).mean(1, keepdim=True) ** -0.5 * weight
    outs = [Out(4, width, bits) for bits in (16, 8)]
    addresses = [delta.data_ptr() for delta in deltas] + [0, 0]
    normed = torch.zeros((4, width))
    for out in outs:
        x = hidden.clone()
        op = (cpu_step.NORM, x.data_ptr(), addresses[0], weight.data_ptr(), width, out.bits)
        kept = (out.rows.data_ptr(), out.scales.data_ptr(), 0, normed.data_ptr())
        out_norm = out_weight.data_ptr() if has_out_norm else 0
        varied = (out_norm, int(factor.view(torch.int32)), int(is_layer), addresses[1])
        launcher.run_alone((*op, *kept, *varied), 4)
        torch.testing.assert_close(x.double(), summed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(normed.double(), expected, rtol=1e-4, atol=1e-5)
    exact, rounded = (out.values() for out in outs)
    assert torch.equal(exact, normed)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=2e-4)


def test_a_row_has_its_bits_whoever_else_is_there(launcher: Launcher) -> None:
    x = noise(7, 2 * 160)
    together = gated(launcher, x, 4, 0)
    for first, end in pairwise([0, 1, 4, 7]):
        some = gated(launcher, x[first:end].contiguous(), 4, 0)
        assert torch.equal(some.integers(), together.integers()[first:end])
        assert torch.equal(some.scales, together.scales[first:end])
