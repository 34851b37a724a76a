"""Weights on their way from a GGUF into the kernels' layout: compiled code and its torch twins."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from llmd.backend.kernels import cpu_pack
from llmd.backend.kernels.cpu_launch import Launcher, pack_stored, why_not
from llmd.backend.kernels.cpu_pack import PackedMatrix
from llmd.backend.kernels.cpu_step import STORED_TYPES
from llmd.backend.models import packing
from llmd.backend.models.container import StoredRows
from llmd.backend.models.dequantize import (
    BLOCK_SIZES,
    dequantize,
    integer_bits,
    quant_blocks,
)

from .test_weights import random_blocks

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")

INTEGERS = [name for name in STORED_TYPES if integer_bits(name)]
NUM_INPUTS = 512


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(num_threads=2)


def _rows(type: str, num_rows: int) -> Tensor:
    """uint8 [num_rows, bytes of a row]."""
    num_blocks = num_rows * NUM_INPUTS // BLOCK_SIZES[type]
    return torch.from_numpy(random_blocks(type, num_blocks)).view(num_rows, -1)


def _rounded_by_torch(raw: Tensor, type: str) -> tuple[PackedMatrix, cpu_pack.Rounding]:
    weights = dequantize(raw.reshape(-1), type, torch.float32).view(len(raw), NUM_INPUTS)
    quants, scale, cost = cpu_pack.rounded(weights)
    return cpu_pack.join_8bit(quants, scale), cost


def _moved_by_torch(raw: Tensor, type: str) -> PackedMatrix:
    found = quant_blocks(raw.reshape(-1), type, len(raw))
    assert found is not None
    if found.offset is None:
        return cpu_pack.join_8bit(found.quants, found.scale)
    return cpu_pack.join_4bit(found.quants, found.scale, found.offset)


@pytest.mark.parametrize("type", INTEGERS)
def test_compiled_code_keeps_the_stored_integers(launcher: Launcher, type: str) -> None:
    raw, bits = _rows(type, 72), integer_bits(type)
    packed = cpu_pack.empty(bits, 72, NUM_INPUTS)
    for begin, end in ((0, 40), (40, 72)):
        out = cpu_pack.strips(packed, begin, end)
        pack_stored(launcher, raw[begin:end], type, bits, NUM_INPUTS, out)
    assert torch.equal(packed.data, _moved_by_torch(raw, type).data)


@pytest.mark.parametrize("type", STORED_TYPES)
@pytest.mark.parametrize("factor", [1.0, 2**-14])  # with it scales are denormal, or zero
def test_compiled_code_rounds_to_the_bits_of_torch(
    launcher: Launcher, type: str, factor: float
) -> None:
    raw = torch.from_numpy(random_blocks(type, 72 * NUM_INPUTS // BLOCK_SIZES[type], factor)).view(
        72, -1
    )
    packed = cpu_pack.empty(8, 72, NUM_INPUTS)
    cost = pack_stored(launcher, raw, type, 0, NUM_INPUTS, cpu_pack.strips(packed, 0, 72))
    wanted, wanted_cost = _rounded_by_torch(raw, type)
    assert torch.equal(packed.data, wanted.data)
    assert cost.error == pytest.approx(wanted_cost.error, rel=1e-4)


class _Stored:
    """A checkpoint of nothing but rows."""

    def __init__(self, rows: Mapping[str, tuple[Tensor, str]]) -> None:
        self._rows = rows

    def rows(self, name: str) -> StoredRows:
        return StoredRows(*self._rows[name])


def _packed(launcher: Launcher, *parts: tuple[Tensor, str]) -> PackedMatrix:
    rows = {f"part {index}": part for index, part in enumerate(parts)}
    with packing.packing(_Stored(rows), launcher) as packer:  # type: ignore[arg-type]
        return packer.matrix(list(rows))


@pytest.mark.parametrize(
    "types", [("Q5_0", "Q5_0", "Q8_0"), ("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q3_K", "Q6_K")]
)
def test_parts_of_several_types_are_one_matrix(
    launcher: Launcher, types: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "COMPILED_PIECE", 32 * NUM_INPUTS)  # several pieces a part
    monkeypatch.setattr(cpu_pack, "MAX_ROUNDING_ERROR", 1.0)  # random blocks have wild scales
    parts = [(_rows(type, 72), type) for type in types]
    found = _packed(launcher, *parts)
    keeps = len({integer_bits(type) for type in types}) == 1 and integer_bits(types[0])
    by_torch = [_moved_by_torch(*part) if keeps else _rounded_by_torch(*part)[0] for part in parts]
    assert found.bits == by_torch[0].bits
    assert torch.equal(found.data, torch.cat([part.data for part in by_torch]))


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_scale_that_is_no_number_is_not_packed_as_one(
    launcher: Launcher, type: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = _rows(type, 64)
    at = {"Q6_K": 208}.get(type, 0)
    raw[5, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, "llmd.models"):
        assert _packed(launcher, (raw, type)).bits == 16
    assert "stays in 16 bits" in caplog.text
