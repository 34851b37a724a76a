"""Reading weights: equal to the gguf package, and damage refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from llmd.backend.models.checkpoint import BadModel, UnsupportedModel, open_checkpoint
from llmd.backend.models.config import config_from_gguf, config_from_hf
from llmd.backend.models.container import open_container
from llmd.backend.models.dequantize import (
    BLOCK_BYTES,
    INTEGER_TYPES,
    SUPPORTED_TYPES,
    dequantize,
    quant_blocks,
)
from llmd.backend.protocol import ModelFile

TYPES = tuple(name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16"))
HALVES_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}  # where in a block, if not at its beginning


def random_blocks(kind: str, num_blocks: int, factor: float = 1.0) -> np.ndarray:
    """Any bytes are valid blocks, as long as the float16 in them are finite; they are of a normal
    distribution, times a factor."""
    rng = np.random.default_rng(sum(kind.encode()))
    raw = rng.integers(0, 256, (num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(108, 135, num_blocks)  # its scale is an exponent
        return raw
    halves = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 2, "Q4_K": 2, "Q5_K": 2}.get(kind, 1)
    scales = (rng.normal(size=(num_blocks, halves)) * factor).astype(np.float16).view(np.uint8)
    at = HALVES_AT.get(kind, 0)
    raw[:, at : at + 2 * halves] = scales
    return raw


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_dequantised_to_the_bits_of_the_gguf_package(kind: str) -> None:
    raw = random_blocks(kind, 64)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
    found = dequantize(torch.from_numpy(raw.copy()).view(-1), kind, torch.float32)
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_many_pieces_on_many_threads_make_the_same(kind: str) -> None:
    raw = torch.from_numpy(random_blocks(kind, 9_001))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = dequantize(raw.view(-1), kind, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    wanted = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(found, wanted.to(torch.bfloat16).view(-1))


def test_the_smallest_scales_of_mxfp4_are_denormal_numbers() -> None:
    raw = random_blocks("MXFP4", 256)
    raw[:, 0] = np.arange(256)
    wanted = gguf.dequantize(raw[:254], gguf.GGMLQuantizationType.MXFP4).reshape(-1)
    found = dequantize(torch.from_numpy(raw[:254]).reshape(-1), "MXFP4", torch.float32)
    assert np.array_equal(found.numpy(), wanted)
    assert quant_blocks(torch.from_numpy(raw).view(-1), "MXFP4", 16) is None


@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_integers_kept_for_computing_mean_the_same_weights(kind: str) -> None:
    raw = torch.from_numpy(random_blocks(kind, 64))
    blocks = quant_blocks(raw.view(-1), kind, num_outputs=16)
    assert blocks is not None
    weights = blocks.quants.float() * blocks.scale.float().unsqueeze(-1)
    if blocks.offset is not None:
        weights += blocks.offset.float().unsqueeze(-1)
    wanted = dequantize(raw.view(-1), kind, torch.float32)
    if kind == "Q4_K":  # a product of two scales is rounded to a float16
        assert (weights.view(-1) - wanted).abs().max() < 2**-11 * wanted.abs().max()
    else:
        assert torch.equal(weights.view(-1), wanted)


def test_a_type_without_such_integers_has_none() -> None:
    assert quant_blocks(torch.zeros(210, dtype=torch.uint8), "Q6_K", 1) is None


def test_an_unsupported_architecture_is_named_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"mamba.*llama.*qwen2"):
        config_from_hf({"model_type": "mamba"})
    with pytest.raises(UnsupportedModel, match=r"rwkv.*llama"):
        config_from_gguf({"general.architecture": "rwkv"}, frozenset())


def test_a_missing_key_of_the_configuration_is_named() -> None:
    with pytest.raises(BadModel, match="hidden_size"):
        config_from_hf({"model_type": "llama", "num_attention_heads": 4})


def _weights(path: Path) -> list[ModelFile]:
    return [ModelFile(path.name, "weights", str(path))]


def test_a_truncated_gguf_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        cut.write_bytes(whole.read(6 << 20))
    with pytest.raises(BadModel):
        open_checkpoint(_weights(cut))


def test_a_split_gguf_is_read_whole_and_a_missing_part_is_told(tmp_path: Path) -> None:
    paths = [_part(tmp_path / f"m-0000{number + 1}-of-00003.gguf", number) for number in range(3)]
    files = [ModelFile(path.name, "weights", str(path)) for path in paths]
    container = open_container(files[::-1])  # in whatever order they are named
    assert container.names == {"t0", "t1", "t2"}
    assert container.metadata["general.architecture"] == "llama"
    assert [container.tensor(f"t{n}", torch.float32)[0].item() for n in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(BadModel, match="split in 3 files, 2 of them are here"):
        open_container(files[:2])
    with pytest.raises(BadModel, match="split in 3 files, 2 of them are here"):
        open_container(files[1:])
    with pytest.raises(BadModel, match="two parts of the GGUF have a tensor t1"):
        open_container([*files[:2], files[1]])


def _part(path: Path, number: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 3)
    writer.add_int32("split.tensors.count", 3)
    writer.add_tensor(f"t{number}", np.full(32, number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_pages_that_were_let_go_come_back_as_they_were(smollm2_gguf: Path) -> None:
    container = open_container(_weights(smollm2_gguf))
    rows = container.rows("token_embd.weight")
    assert rows is not None and rows.is_mapped
    before = rows.raw.clone()
    rows.let_go(0, len(rows.raw))
    rows.let_go(7, 8)  # less than a page
    assert torch.equal(rows.raw, before)


def test_rows_that_were_copied_are_never_let_go(smollm2_gguf: Path) -> None:
    """They are no file's pages: what is let go of them would be lost."""
    checkpoint = open_checkpoint(_weights(smollm2_gguf))
    permuted = checkpoint.rows("model.layers.0.self_attn.q_proj.weight")
    assert permuted is not None and not permuted.is_mapped
    before = permuted.raw.clone()
    permuted.let_go(0, len(permuted.raw))
    assert torch.equal(permuted.raw, before)


def test_a_vocabulary_that_is_forgotten_leaves_the_rest(smollm2_gguf: Path) -> None:
    container = open_container(_weights(smollm2_gguf))
    assert "tokenizer.ggml.tokens" in container.metadata
    container.forget_vocabulary()
    assert "tokenizer.ggml.tokens" not in container.metadata
    assert "tokenizer.chat_template" in container.metadata


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(BadModel, match="no weights"):
        open_checkpoint([])


def test_safetensors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    header = json.dumps({}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadModel, match=r"config\.json"):
        open_checkpoint(_weights(path))


def test_a_missing_tensor_is_named(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(_weights(smollm2_gguf))
    with pytest.raises(BadModel, match=r"blk\.30\.attn_q\.weight"):
        checkpoint.tensor("model.layers.30.self_attn.q_proj.weight", torch.float32)
