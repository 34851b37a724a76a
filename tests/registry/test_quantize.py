"""Weights in fewer bits: the bytes are what other readers of the format expect, and near enough."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf import quants as reference

from llmd.registry.block_quants import QUANTIZERS
from llmd.registry.create import CreateRequest, create
from llmd.registry.errors import BadRequest, Unsupported
from llmd.registry.formats import gguf
from llmd.registry.formats.gguf_write import TensorOut, write_gguf
from llmd.registry.names import ModelName
from llmd.registry.quantize import checked_level, quantize, types_at
from llmd.registry.store import ModelStore

from . import model_makers as make

# The error that each format may leave, as a part of the weights' own size.
NEAR_ENOUGH = {"Q8_0": 0.008, "Q4_0": 0.12, "Q5_0": 0.06, "Q4_K": 0.09, "Q6_K": 0.024}


def weights_of(rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """With the heavy tails that trained weights have."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, size=(rows, columns)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_reference_reader_gets_the_weights_back(name: str) -> None:
    weights = weights_of(64, 1024)
    weights[3] = 0
    weights[4] = -0.5
    block, function = QUANTIZERS[name]
    packed = function(weights.reshape(-1, block)).reshape(64, -1)
    back = reference.dequantize(packed, GGMLQuantizationType[name])
    error = np.sqrt(((back - weights) ** 2).mean() / (weights**2).mean())
    assert error < NEAR_ENOUGH[name]
    assert not back[3].any()
    assert np.isfinite(back).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0"])
def test_simple_formats_are_nearly_the_reference_writers_bytes(name: str) -> None:
    weights = weights_of(64, 1024)
    block, function = QUANTIZERS[name]
    ours = function(weights.reshape(-1, block)).reshape(64, -1)
    theirs = reference.quantize(weights, GGMLQuantizationType[name])
    assert (ours == theirs).mean() > 0.99  # halves are rounded the other way


def _whole(value: np.ndarray[Any, Any]) -> list[bytes]:
    return [value.tobytes()]


def write_model(path: Path, type_name: str = "F16") -> dict[str, Any]:
    """A Llama with two layers, rows of 512, and one row that is no multiple of 256."""
    matrices = {
        "token_embd.weight": (64, 512),
        "blk.0.attn_v.weight": (512, 512),
        "blk.0.ffn_up.weight": (96, 512),
        "blk.0.ffn_down.weight": (512, 96),
        "blk.0.attn_norm.weight": (512,),
        "output.weight": (64, 512),
    }
    dtype = {"F16": np.float16, "F32": np.float32}[type_name]
    values = {
        name: weights_of(1, int(np.prod(shape)), seed).reshape(shape).astype(dtype)
        for seed, (name, shape) in enumerate(matrices.items())
    }
    pairs = [
        (key, make.string(key) + make.value(item)) for key, item in make.LLAMA_METADATA.items()
    ]
    tensors = [
        TensorOut(name, value.shape, type_name, partial(_whole, value))
        for name, value in values.items()
    ]
    with path.open("wb") as file:
        write_gguf(file, pairs, tensors)
    return values


def test_a_written_file_is_read_back_whole(tmp_path: Path) -> None:
    values = write_model(tmp_path / "m.gguf")
    header = gguf.read_header(tmp_path / "m.gguf")
    assert header.metadata == make.LLAMA_METADATA
    content = (tmp_path / "m.gguf").read_bytes()
    for name, value in values.items():
        tensor = header.tensors[name]
        assert tensor.shape == value.shape
        assert content[tensor.offset : tensor.offset + tensor.size_bytes] == value.tobytes()


@pytest.mark.parametrize(
    ("level", "type_name"), [("Q8_0", "F32"), ("Q4_0", "F16"), ("Q4_K_M", "F16"), ("BF16", "F32")]
)
def test_a_model_at_another_level_is_the_same_model(
    tmp_path: Path, level: str, type_name: str
) -> None:
    values = write_model(tmp_path / "m.gguf", type_name)
    told: list[tuple[int, int]] = []
    quantize(tmp_path / "m.gguf", tmp_path / "q.gguf", level, lambda *sizes: told.append(sizes))
    header = gguf.read_header(tmp_path / "q.gguf")
    assert header.metadata["general.file_type"] != make.LLAMA_METADATA["general.file_type"] or (
        level == "Q4_0"
    )
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert told[-1][0] == told[-1][1] == sum(t.size_bytes for t in header.tensors.values())
    content = np.fromfile(tmp_path / "q.gguf", np.uint8)
    for name, value in values.items():
        tensor = header.tensors[name]
        raw = content[tensor.offset : tensor.offset + tensor.size_bytes]
        back = reference.dequantize(raw, GGMLQuantizationType[tensor.type]).reshape(value.shape)
        wanted = value.astype(np.float32)
        assert np.sqrt(((back - wanted) ** 2).mean()) < 0.13 * np.sqrt((wanted**2).mean())


def test_what_needs_more_bits_gets_them(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    types = types_at(gguf.read_header(tmp_path / "m.gguf"), "Q4_K_M")
    assert types == {
        "token_embd.weight": "Q4_K",
        "blk.0.attn_v.weight": "Q6_K",
        "blk.0.ffn_up.weight": "Q4_K",
        "blk.0.ffn_down.weight": "Q8_0",
        "blk.0.attn_norm.weight": "F16",
        "output.weight": "Q6_K",
    }


def test_levels_have_other_spellings_and_unknown_ones_are_named() -> None:
    assert checked_level("q4_k") == "Q4_K_M"
    with pytest.raises(BadRequest, match="unsupported quantization type Q3; supported are F32"):
        checked_level("Q3")


def test_create_quantizes_and_refuses_what_is_quantized_already(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    write_model(tmp_path / "m.gguf")
    told: list[str] = []

    def on_status(status: str, completed: int = 0, total: int = 0) -> None:
        told.append(status)

    small = CreateRequest(ModelName.parse("small"), str(tmp_path / "m.gguf"), quantize="q8_0")
    manifest = create(store, small, on_status)
    assert (manifest.quantization, manifest.files[0].name) == ("Q8_0", "model-Q8_0.gguf")
    assert "quantizing Q4_0 model to Q8_0" in told  # as the test file's metadata has it
    assert list(store.temp.iterdir()) == []
    store.check()
    again = CreateRequest(ModelName.parse("again"), "small", quantize="Q4_0")
    with pytest.raises(Unsupported, match="only supported for F16, BF16 and F32 models"):
        create(store, again)
