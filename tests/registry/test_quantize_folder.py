"""Safetensors of fewer bits: the worker's own reader gets the weights back, near enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmd.backend.models.quantized import layout_of
from llmd.registry.build import inspect_fetched
from llmd.registry.create import CreateRequest, create
from llmd.registry.errors import Unsupported
from llmd.registry.formats import safetensors
from llmd.registry.formats.quantization import num_weights
from llmd.registry.manifest import Manifest
from llmd.registry.names import ModelName
from llmd.registry.sources.base import Fetched
from llmd.registry.store import ModelStore

from . import model_makers as make

# The error that each level may leave, as a part of the weights' own size.
NEAR_ENOUGH = {"Q8_0": 0.008, "Q4_0": 0.12, "Q4_K_S": 0.09, "Q4_K_M": 0.09}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weights_of(*shape: int, seed: int) -> torch.Tensor:
    """With the heavy tails that trained weights have."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_t(4, size=shape) * 0.02).astype(np.float32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards; one matrix has rows that are no multiple of 32."""
    folder = make.write_safetensors_folder(tmp_path / "original")
    (folder / "model.safetensors").unlink()
    shards: tuple[dict[str, tuple[int, ...]], ...] = (
        {
            "model.embed_tokens.weight": (80, 64),
            "model.layers.0.self_attn.v_proj.weight": (64, 64),
            "model.layers.0.self_attn.o_proj.weight": (64, 64),
            "model.layers.0.input_layernorm.weight": (64,),
        },
        {
            "model.layers.1.mlp.up_proj.weight": (96, 64),
            "model.layers.1.mlp.gate.weight": (8, 64),
            "model.layers.1.mlp.odd_proj.weight": (64, 40),
        },
    )
    index: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        tensors = {
            key: weights_of(*shape, seed=hash_of(key)).bfloat16() for key, shape in shapes.items()
        }
        save_file(tensors, str(folder / name))
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def hash_of(text: str) -> int:
    return sum(text.encode())


def originals(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def made_at(store: ModelStore, folder: Path, level: str) -> Manifest:
    request = CreateRequest(ModelName.parse("small"), str(folder), quantize=level)
    manifest = create(store, request)
    store.check()
    assert store.verify(manifest) == () and list(store.temp.iterdir()) == []
    return manifest


def read_back(store: ModelStore, manifest: Manifest) -> tuple[dict[str, torch.Tensor], Any]:
    files = {file.name: store.path_of(file) for file in manifest.files}
    stored = load_file(files["model.safetensors"])
    config = json.loads(files["config.json"].read_text())
    layout = layout_of(config, frozenset(stored), stored.__getitem__)
    if layout is None:
        return stored, layout
    made = layout.weights()
    plain = {name for name in stored if not name.endswith((".scales", ".biases"))} - made
    return {n: layout.dense(n) for n in made} | {n: stored[n] for n in plain}, layout


@pytest.mark.parametrize("level", NEAR_ENOUGH)
def test_the_worker_reads_nearly_the_same_weights(tmp_path: Path, folder: Path, level: str) -> None:
    store = ModelStore(tmp_path / "models")
    manifest = made_at(store, folder, level)
    assert manifest.quantization == ("MLX 8-bit" if level == "Q8_0" else "MLX 4-bit")
    plain = create(store, CreateRequest(ModelName.parse("plain"), str(folder)))
    again = inspect_fetched(store, Fetched(manifest.files, "a test"))
    assert again.parameter_count == manifest.parameter_count == plain.parameter_count
    assert not any("index" in file.name or "0000" in file.name for file in manifest.files)
    back, layout = read_back(store, manifest)
    wanted = originals(folder)
    assert back.keys() == wanted.keys()
    for name, weight in wanted.items():
        error = (back[name].float() - weight.float()).pow(2).mean().sqrt()
        assert error <= NEAR_ENOUGH[level] * weight.float().pow(2).mean().sqrt(), name
    for name in ("model.layers.0.input_layernorm.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(back[name], wanted[name])
    assert torch.equal(
        back["model.layers.1.mlp.odd_proj.weight"].float(),
        wanted["model.layers.1.mlp.odd_proj.weight"].float(),
    )
    for name in layout.weights():
        assert layout.groups(name).blocks() is not None, f"{name} misses the integer products"


def test_what_needs_more_bits_gets_them(tmp_path: Path, folder: Path) -> None:
    store = ModelStore(tmp_path / "models")
    _, layout = read_back(store, made_at(store, folder, "Q4_K_M"))
    bits = {name: layout.groups(name).blocks().bits for name in layout.weights()}
    assert bits == {
        "model.embed_tokens.weight": 8,
        "model.layers.0.self_attn.v_proj.weight": 4,
        "model.layers.0.self_attn.o_proj.weight": 4,
        "model.layers.1.mlp.up_proj.weight": 4,
    }


@pytest.mark.parametrize("level", DTYPES)
def test_other_numbers_are_the_same_rounded(tmp_path: Path, folder: Path, level: str) -> None:
    store = ModelStore(tmp_path / "models")
    manifest = made_at(store, folder, level)
    assert manifest.quantization == level
    back, layout = read_back(store, manifest)
    assert layout is None
    for name, weight in originals(folder).items():
        wanted = weight.to(DTYPES[level]) if weight.dim() > 1 else weight
        assert torch.equal(back[name], wanted), name


def test_what_is_quantized_already_is_refused(tmp_path: Path, folder: Path) -> None:
    store = ModelStore(tmp_path / "models")
    made_at(store, folder, "Q8_0")
    again = CreateRequest(ModelName.parse("again"), "small", quantize="Q4_0")
    with pytest.raises(Unsupported, match="small:latest is quantized already, by mlx"):
        create(store, again)


@pytest.mark.parametrize(
    ("settings", "tensors", "count"),
    [
        ({}, {"a.weight": ("BF16", [4, 8], 64), "a.bias": ("BF16", [4], 8)}, 36),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            {"a.qweight": ("I32", [1, 4], 16), "a.qzeros": ("I32", [1, 1], 4)},
            32,
        ),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            {"x_blocks": ("U8", [1, 4, 16], 64), "x_scales": ("U8", [1, 4], 4)},
            128,
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {"a.weight": ("F8_E4M3", [4, 8], 32), "a.weight_scale_inv": ("F32", [1, 1], 4)},
            32,
        ),
    ],
)
def test_packed_weights_are_counted_as_the_weights_they_are(
    tmp_path: Path, settings: dict[str, Any], tensors: Any, count: int
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(make.safetensors_bytes(tensors))
    assert num_weights(settings, safetensors.read_header(path).tensors) == count
