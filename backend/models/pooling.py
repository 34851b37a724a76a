"""From the states of a text's tokens to its one vector.

    states ──mean | cls | last──▶ vector ──dense layers, if the model has some──▶ vector
           ──the first `dimensions` values──▶ length one

How is read from modules.json and the folders it names (the layout of sentence-transformers), or
from a GGUF's `pooling_type`. Where nothing is said, an encoder takes the mean, a decoder the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..protocol import ModelFile
from .config import BadModel, UnsupportedModel
from .container import Container, SafetensorsContainer
from .encoder_config import EncoderConfig

GGUF_POOLING = {1: "mean", 2: "cls", 3: "last"}
_HF_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    bias: Tensor | None
    activation: str = "torch.nn.modules.linear.Identity"

    def __call__(self, x: Tensor) -> Tensor:
        return _DENSE_ACTIVATIONS[self.activation](functional.linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Pooling:
    """`mode` is one of mean, cls, last. All arithmetic is float32."""

    mode: str
    dense: tuple[_Dense, ...] = ()
    max_length: int = 0  # tokens of a text, as the model's makers cut it; 0: not said

    @torch.inference_mode()
    def vector(self, states: Tensor, dimensions: int = 0) -> Tensor:
        """states [num_tokens, hidden_size] of one text to a vector of length one.

        More dimensions than there are mean all.
        """
        wide = states.float()
        if self.mode == "mean":
            pooled = wide.mean(0)
        else:
            pooled = wide[0] if self.mode == "cls" else wide[-1]
        for layer in self.dense:
            pooled = layer(pooled)
        return functional.normalize(pooled[: dimensions or None], dim=0)


def read_pooling(
    files: Sequence[ModelFile], container: Container, config: EncoderConfig
) -> Pooling:
    """Raises UnsupportedModel for a kind that is not known, BadModel for files that don't fit."""
    default = "last" if config.is_causal else "mean"
    if container.format == "gguf":
        return _from_gguf(container, config, default)
    by_name = {file.name: Path(file.path) for file in files}
    limit = int(_json(by_name, "sentence_bert_config.json").get("max_seq_length") or 0)
    if "modules.json" not in by_name:
        return Pooling(default, max_length=limit)
    mode, width, dense = default, config.hidden_size, []
    for module in _modules(by_name):
        kind, folder = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if kind == "Pooling":
            mode = _mode(_json(by_name, f"{folder}/config.json"), default)
        elif kind == "Dense":
            dense.append(_read_dense(by_name, folder, width))
            width = dense[-1].weight.shape[0]
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModel(
                f"modules.json names {kind}, which is not supported; supported are Transformer, "
                "Pooling, Dense and Normalize"
            )
    return Pooling(mode, tuple(dense), limit)


def _from_gguf(container: Container, config: EncoderConfig, default: str) -> Pooling:
    number = container.metadata.get(f"{config.architecture}.pooling_type")
    if number is not None and number not in GGUF_POOLING:
        supported = ", ".join(f"{key} ({name})" for key, name in GGUF_POOLING.items())
        raise UnsupportedModel(f"pooling type {number} is not supported; supported are {supported}")
    mode = default if number is None else GGUF_POOLING[number]
    dense, width = [], config.hidden_size
    for name in ("dense_2.weight", "dense_3.weight"):
        if name in container.names:
            weight = container.tensor(name, torch.float32)
            dense.append(_Dense(_fitting(weight, width, name), None))
            width = weight.shape[0]
    return Pooling(mode, tuple(dense))


def _mode(settings: Mapping[str, Any], default: str) -> str:
    named = settings.get("pooling_mode")
    chosen = [mode for key, mode in _HF_MODES.items() if settings.get(key)]
    others = [key for key, on in settings.items() if key.startswith("pooling_mode_") and on is True]
    if isinstance(named, str):
        chosen, others = [{"lasttoken": "last"}.get(named, named)], [named]
    if len(others) > 1 or (others and not chosen) or not set(chosen) <= {"mean", "cls", "last"}:
        raise UnsupportedModel(
            f"pooling by {', '.join(others)} is not supported; supported are mean, cls and last"
        )
    return chosen[0] if chosen else default


def _read_dense(by_name: Mapping[str, Path], folder: str, width: int) -> _Dense:
    settings, name = _json(by_name, f"{folder}/config.json"), f"{folder}/model.safetensors"
    if name not in by_name:
        raise BadModel(f"modules.json names {folder}, but {name} is not among the files")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if activation not in _DENSE_ACTIVATIONS:
        raise UnsupportedModel(f"{folder} has the activation {activation}, which is not supported")
    container = SafetensorsContainer({}, [by_name[name]])
    weight = _fitting(container.tensor("linear.weight", torch.float32), width, folder)
    has_bias = "linear.bias" in container.names
    bias = container.tensor("linear.bias", torch.float32) if has_bias else None
    return _Dense(weight, bias, activation)


def _fitting(weight: Tensor, width: int, name: str) -> Tensor:
    if weight.dim() != 2 or weight.shape[1] != width:
        raise BadModel(f"{name} has shape {tuple(weight.shape)}, (any, {width}) expected")
    return weight


def _modules(by_name: Mapping[str, Path]) -> list[Mapping[str, Any]]:
    try:
        modules = json.loads(by_name["modules.json"].read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"modules.json is no JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise BadModel("modules.json is no list of modules")
    return modules


def _json(by_name: Mapping[str, Path], name: str) -> Mapping[str, Any]:
    """Empty if the file is not there."""
    path = by_name.get(str(PurePosixPath(name)))
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadModel(f"{name} is no JSON object")
    return found
