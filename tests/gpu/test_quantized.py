"""Quantised products in Triton equal their twins, and the packed form equals each format."""

from __future__ import annotations

import itertools

import gguf
import numpy
import pytest
import torch

from llmd.backend.kernels import matmul, moe, packed, repack

from .shapes import DEVICE, IS_FULL, assert_close, randn

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
QUANTIZABLE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
EXACT = QUANTIZABLE | {"MXFP4"}  # the others' scale of a scale is rounded to fp16


def gguf_blocks(type_name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of that type [rows, row_bytes], and what the gguf package says they mean."""
    kind = gguf.GGMLQuantizationType[type_name]
    generator = numpy.random.default_rng(3)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if type_name in QUANTIZABLE:
        dense = generator.standard_normal((rows, columns), dtype=numpy.float32)
        data = gguf.quantize(dense, kind)
    else:
        data = generator.integers(0, 256, (rows, columns // block, size), dtype=numpy.uint8)
        if type_name == "MXFP4":
            data[..., 0] = generator.integers(110, 130, data.shape[:2])
        else:  # a readable scale where the block has its fp16 numbers
            places = (208,) if type_name == "Q6_K" else (0, 2)
            for place in places:
                half = generator.uniform(1e-3, 1e-2, data.shape[:2]).astype(numpy.float16)
                data[..., place : place + 2] = half[..., None].view(numpy.uint8)
        data = data.reshape(rows, -1)
    return torch.from_numpy(data), torch.from_numpy(gguf.dequantize(data, kind))


@pytest.mark.parametrize("type_name", TYPES)
def test_a_gguf_weight_survives_packing(type_name: str) -> None:
    columns = 512 if type_name.endswith("K") else 96  # 96: the last chunk is half full
    blocks, expected = gguf_blocks(type_name, 5, columns)
    weight = repack.from_gguf(blocks, type_name)
    limit = 0.0 if type_name in EXACT else 1e-3
    torch.testing.assert_close(packed.dequantize(weight), expected, rtol=limit, atol=limit)


def int32_words(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The inverse of unpacking, along the last dimension, 4 bits."""
    parts = torch.unflatten(codes.long(), -1, (-1, 8))
    words = torch.stack([parts[..., i] << (4 * place) for i, place in enumerate(order)]).sum(0)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_awq_gptq_and_compressed_tensors_survive_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    n, k, group = 16, 128, 32
    q = torch.randint(0, 16, (n, k), generator=generator)
    zeros = torch.randint(1, 16, (n, k // group), generator=generator)
    scales = torch.rand(n, k // group, generator=generator).half() * 0.1
    spread = scales.float().repeat_interleave(group, 1)
    expected = (q - zeros.repeat_interleave(group, 1)) * spread
    plain = tuple(range(8))
    awq = repack.from_awq(
        int32_words(q.t(), repack.AWQ_ORDER),
        int32_words(zeros.t(), repack.AWQ_ORDER),
        scales.t(),
        group,
    )
    gptq = repack.from_gptq(
        int32_words(q, plain).t(),
        int32_words(zeros.t() - 1, plain),
        scales.t(),
        group,
        4,
        is_v2=False,
    )
    ct = repack.from_compressed_tensors(int32_words(q, plain), scales, zeros, group, 4)
    for weight in (awq, gptq, ct):
        torch.testing.assert_close(packed.dequantize(weight), expected, rtol=1e-3, atol=1e-3)
    symmetric = repack.from_compressed_tensors(int32_words(q, plain), scales, None, group, 4)
    assert torch.equal(packed.dequantize(symmetric), (q - 8) * spread)


# few rows in two parts, ragged, many rows
SHAPES = [(1, 40 if IS_FULL else 24, 1088), (3, 33, 96), (40, 70, 192)]


def shape_for(type_name: str, rows: int, outputs: int, columns: int) -> tuple[int, int, int]:
    return (
        (rows, outputs, -(-columns // 256) * 256)
        if type_name.endswith("K")
        else (rows, outputs, columns)
    )


# In the short table each type is there once, and each width of a code with few and many rows.
SHORT = [(type_name, SHAPES[0]) for type_name in TYPES]
SHORT += [("Q4_1", SHAPES[1]), ("Q5_K", SHAPES[2]), ("Q6_K", SHAPES[2]), ("Q8_0", SHAPES[2])]


@pytest.mark.parametrize(
    ("type_name", "shape"), itertools.product(TYPES, SHAPES) if IS_FULL else SHORT
)
def test_quantised_products_equal_their_twin(type_name: str, shape: tuple[int, int, int]) -> None:
    rows, outputs, columns = shape_for(type_name, *shape)
    weight = repack.from_gguf(gguf_blocks(type_name, outputs, columns)[0], type_name).to(DEVICE)
    bias = randn(outputs, seed=9)
    for dtype in (torch.float32, torch.bfloat16) if IS_FULL else (torch.float32,):
        x = randn(rows, columns, seed=1, dtype=dtype)
        expected = packed.quantized_matmul(x, weight, bias)
        size = max(expected.abs().max().item(), 1.0)
        assert_close(matmul.quantized_matmul(x, weight, bias) / size, expected / size)


def test_quantised_products_in_bfloat16() -> None:
    weight = repack.from_gguf(gguf_blocks("Q4_K", 32, 512)[0], "Q4_K").to(DEVICE)
    x = randn(4, 512, seed=1, dtype=torch.bfloat16)
    expected = packed.quantized_matmul(x, weight)
    size = expected.abs().max().item()
    assert_close(matmul.quantized_matmul(x, weight) / size, expected / size)


def test_a_row_has_the_same_bits_alone_and_among_others_in_a_product() -> None:
    weight = repack.from_gguf(gguf_blocks("Q4_1", 24, 1088)[0], "Q4_1").to(DEVICE)
    x = randn(16, 1088, seed=1)
    together = matmul.quantized_matmul(x, weight)
    assert torch.equal(matmul.quantized_matmul(x[5:6], weight)[0], together[5])


@pytest.mark.parametrize(
    ("type_name", "pairs_of"),
    itertools.product(("MXFP4", "Q4_K", "dense"), ((2, 0, 3, 1), (0, 0, 70, 5)))
    if IS_FULL
    else [("MXFP4", (2, 0, 3, 1)), ("Q4_K", (0, 0, 40, 5)), ("dense", (2, 0, 3, 1))],
)
def test_expert_products_equal_their_twin(type_name: str, pairs_of: tuple[int, ...]) -> None:
    num_experts, outputs, columns = len(pairs_of), 40, 256
    if type_name == "dense":
        weight = packed.dense(randn(num_experts, outputs, columns, seed=4))
    else:
        blocks, _ = gguf_blocks(type_name, num_experts * outputs, columns)
        stacked = torch.unflatten(blocks, 0, (num_experts, outputs))
        weight = repack.from_gguf(stacked, type_name).to(DEVICE)
    num_pairs = sum(pairs_of)
    row_ids = torch.arange(num_pairs + 2, dtype=torch.int32, device=DEVICE) * 7 % 11
    starts = torch.tensor([0, *pairs_of], device=DEVICE).cumsum(0).to(torch.int32)
    x, bias = randn(11, columns, seed=1), randn(num_experts, outputs, seed=2)
    expected = packed.expert_matmul(x, weight, row_ids, starts, bias)
    size = expected.abs().max().item()
    actual = moe.expert_matmul(x, weight, row_ids, starts, bias)
    assert_close(actual / size, expected / size)


def test_gpt_oss_experts_are_packed_from_neighbouring_nibbles() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 4, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.full((2, 4, 3), 127, dtype=torch.uint8)
    dense = packed.dequantize(repack.from_mxfp4(blocks, scales))
    values = torch.tensor([*packed.FP4_VALUES, *(-value for value in packed.FP4_VALUES)])
    assert dense.shape == (2, 4, 96)
    assert dense[1, 2, 33] == values[int(blocks[1, 2, 1, 0]) >> 4]
    assert dense[1, 2, 32] == values[int(blocks[1, 2, 1, 0]) & 15]
