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
from llmd.backend.models.dequantize import BLOCK_BYTES, dequantize, quant_blocks
from llmd.backend.protocol import ModelFile

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def _random_blocks(kind: str, num_blocks: int) -> np.ndarray:
    """Any bytes are valid blocks, as long as the float16 in them are finite."""
    rng = np.random.default_rng(hash(kind) % 1000)
    raw = rng.integers(0, 256, (num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    halves = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind, 1)
    scales = rng.normal(size=(num_blocks, halves)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[:, -2:] = scales
    else:
        raw[:, : 2 * halves] = scales
    return raw


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_dequantised_to_the_bits_of_the_gguf_package(kind: str) -> None:
    raw = _random_blocks(kind, 64)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
    found = dequantize(torch.from_numpy(raw.copy()).view(-1), kind, torch.float32)
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_integers_kept_for_computing_mean_the_same_weights(kind: str) -> None:
    raw = torch.from_numpy(_random_blocks(kind, 64))
    blocks = quant_blocks(raw.view(-1), kind, num_outputs=16)
    assert blocks is not None
    weights = blocks.quants.float() * blocks.scale.float().unsqueeze(-1)
    if blocks.offset is not None:
        weights += blocks.offset.float().unsqueeze(-1)
    wanted = dequantize(raw.view(-1), kind, torch.float32)
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
