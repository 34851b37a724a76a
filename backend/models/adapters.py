"""LoRA adapters (Hu et al. 2021): a change of low rank for some matrices of a model.

    adapter/...          a part of the model: merged into its weights while they are read
    adapter-NAME/...     for the requests that name it; all run in one batch (AdaptedLinear)

Either is a folder as PEFT saves it (adapter_config.json, adapter_model.safetensors), or a GGUF of
`general.type` adapter. Each must name matrices that the model has, in their shape: an adapter that
was made for another model is refused, and so is one that changes what cannot be changed here.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...registry.formats.errors import FormatError
from ..layers.adapted_linear import ActiveAdapters, Change
from ..protocol import ModelFile
from .checkpoint import Checkpoint
from .config import BadModel, ModelConfig, UnsupportedModel
from .container import Container, GGUFContainer, SafetensorsContainer, StoredRows
from .dequantize import QuantBlocks
from .places import Places, unpaired

PARTS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_MERGED = ""  # the name of the adapter that is a part of the model
_PEFT_PREFIX = "base_model.model."


class Adapter:
    """The changes of one adapter by canonical names. Raises BadModel and UnsupportedModel."""

    def __init__(self, name: str, files: Sequence[ModelFile], config: ModelConfig) -> None:
        self.name = name
        self._stored = _Stored(name, files)
        has = lambda weight: self._stored.has(weight.removesuffix(".weight"))  # noqa: E731
        self._places = Places(config, self._stored.is_gguf, has)
        known = {
            self._stem(f"model.layers.{index}.{part}")
            for index in range(config.num_layers)
            for part in PARTS
        }
        strange = sorted(self._stored.stems - known)
        if strange:
            raise UnsupportedModel(
                f"{self} changes {strange[0]}, which is not a matrix of this model that can be "
                f"changed; those of its {config.num_layers} layers can: {', '.join(PARTS)}"
            )

    def __str__(self) -> str:
        return f"the adapter {self.name}" if self.name else "the adapter"

    def change(self, name: str, num_outputs: int, num_inputs: int) -> Change | None:
        """Of the canonical matrix [num_outputs, num_inputs]; None if it stays as it is."""
        place, stem = self._places.find(f"{name}.weight"), self._stem(name)
        if not self._stored.has(stem):
            return None
        down, up = self._stored.pair(stem)
        if place.rows is not None:
            up = up[place.rows]
        if place.pairs_of_heads and up.shape[0] == num_outputs:
            up = unpaired(up, place.pairs_of_heads)
        found = (up.shape[0], down.shape[1])
        if found != (num_outputs, num_inputs) or up.shape[1] != down.shape[0]:
            raise BadModel(
                f"{self} is for another model: it changes {name} as if it had the shape {found}, "
                f"which is {(num_outputs, num_inputs)}"
            )
        return Change(0, down, up * self._stored.scale(stem, len(down)))

    def has(self, name: str) -> bool:
        """The canonical matrix is changed."""
        return self._stored.has(self._stem(name))

    def _stem(self, name: str) -> str:
        return self._places.find(f"{name}.weight").name.removesuffix(".weight")


class _Stored:
    """The tensors of an adapter as they lie in its file, and how strongly they count."""

    def __init__(self, name: str, files: Sequence[ModelFile]) -> None:
        by_ending = {Path(file.name).suffix: file for file in files}
        self._shown = f"the adapter {name}".strip()
        weights = by_ending.get(".gguf") or by_ending.get(".safetensors")
        if weights is None:
            raise BadModel(f"{self._shown} has no weights")
        self.is_gguf = ".gguf" in by_ending
        self._container = self._opened(weights)
        self._settings: Mapping[str, Any] = {}
        if not self.is_gguf:
            self._settings = self._read_settings(by_ending.get(".json"))
        self._names = dict(self._read_names())  # stem: (A, B)
        self.stems = frozenset(self._names)
        if not self.stems:
            raise BadModel(f"{self._shown} has no tensors lora_A and lora_B")

    def has(self, stem: str) -> bool:
        """The adapter changes this matrix."""
        return stem in self._names

    def pair(self, stem: str) -> tuple[Tensor, Tensor]:
        """A [rank, inputs] and B [outputs, rank], in float32."""
        down, up = (self._container.tensor(name, torch.float32) for name in self._names[stem])
        if down.dim() != 2 or up.dim() != 2:
            raise BadModel(f"{self._shown} changes {stem} by what is no matrix")
        return down, up

    def scale(self, stem: str, rank: int) -> float:
        """alpha / rank, as the adapter's settings have it for this matrix."""
        if self.is_gguf:
            return float(self._container.metadata.get("adapter.lora.alpha", rank)) / rank
        alpha = self._pattern("alpha_pattern", stem, self._settings.get("lora_alpha", rank))
        return alpha / (rank**0.5 if self._settings.get("use_rslora") else rank)

    def _pattern(self, key: str, stem: str, default: Any) -> float:
        for pattern, value in (self._settings.get(key) or {}).items():
            if re.search(rf"(^|\.){pattern}$", stem):
                return float(value)
        return float(default)

    def _opened(self, weights: ModelFile) -> Container:
        try:
            if not self.is_gguf:
                return SafetensorsContainer({}, [Path(weights.path)])
            container = GGUFContainer([Path(weights.path)])
        except FormatError as error:
            raise BadModel(f"{self._shown}: {error}") from error
        kind = container.metadata.get("adapter.type", "lora")
        if container.metadata.get("general.type") != "adapter" or kind != "lora":
            raise BadModel(f"{self._shown} is a GGUF, but no LoRA adapter")
        return container

    def _read_settings(self, file: ModelFile | None) -> Mapping[str, Any]:
        if file is None:
            raise BadModel(f"{self._shown} has no adapter_config.json")
        try:
            settings = json.loads(Path(file.path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadModel(f"{self._shown}: adapter_config.json is no JSON: {error}") from error
        if not isinstance(settings, dict):
            raise BadModel(f"{self._shown}: adapter_config.json is no JSON object")
        kind = settings.get("peft_type", "LORA")
        if kind != "LORA" or settings.get("use_dora"):
            shown = "DoRA" if settings.get("use_dora") else kind
            raise UnsupportedModel(f"{self._shown} is of the kind {shown}; LORA is supported")
        if settings.get("bias", "none") != "none" or settings.get("modules_to_save"):
            raise UnsupportedModel(f"{self._shown} changes more than matrices: biases or modules")
        return settings

    def _read_names(self) -> Iterator[tuple[str, tuple[str, str]]]:
        ends = (".weight.lora_a", ".weight.lora_b")
        if not self.is_gguf:
            ends = (".lora_A.weight", ".lora_B.weight")
        for name in self._container.names:
            if name.endswith(ends[1]):
                continue
            if not name.endswith(ends[0]):
                raise UnsupportedModel(f"{self._shown} has a tensor {name}, which is not known")
            other = name.removesuffix(ends[0]) + ends[1]
            if other not in self._container.names:
                raise BadModel(f"{self._shown} has no tensor {other}")
            stem = name.removesuffix(ends[0]).removeprefix(_PEFT_PREFIX)
            yield stem.replace("model.language_model.", "model."), (name, other)


class AdaptedCheckpoint:
    """A checkpoint whose matrices are read with one adapter merged in, if there is one.

    `named` adapters wait for requests; `active` says which rows of a step asked for them.
    """

    def __init__(self, base: Checkpoint, merged: Adapter | None, named: Mapping[str, Adapter]):
        self.config = base.config
        self.format = base.format
        self.quantization = base.quantization
        self.metadata = base.metadata
        self.named = named
        self.active = ActiveAdapters()
        self._base = base
        self._merged = merged

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if self._merged is None or not self._is_changed(name):
            return self._base.tensor(name, dtype)
        weight = self._base.tensor(name, torch.float32)
        change = self._merged.change(name.removesuffix(".weight"), *weight.shape)
        assert change is not None
        return (weight + change.up @ change.down).to(dtype)

    def blocks(self, name: str) -> QuantBlocks | None:
        return None if self._is_changed(name) else self._base.blocks(name)

    def rows(self, name: str) -> StoredRows | None:
        return None if self._is_changed(name) else self._base.rows(name)

    def changes(self, names: Sequence[str], weights: Sequence[Tensor]) -> dict[str, list[Change]]:
        """What each named adapter adds to the linear that these matrices make together."""
        found: dict[str, list[Change]] = defaultdict(list)
        for adapter in self.named.values():
            first = 0
            for name, weight in zip(names, weights, strict=True):
                change = adapter.change(name, *weight.shape) if _can_change(name) else None
                if change is not None:
                    found[adapter.name].append(Change(first, change.down, change.up))
                first += len(weight)
        return found

    def _is_changed(self, name: str) -> bool:
        if self._merged is None or not name.endswith(".weight"):
            return False
        stem = name.removesuffix(".weight")
        return _can_change(stem) and self._merged.has(stem)


def _can_change(name: str) -> bool:
    return name.startswith("model.layers.") and name.split(".", 3)[-1] in PARTS


def with_adapters(checkpoint: Checkpoint, files: Sequence[ModelFile]) -> Checkpoint:
    """The checkpoint itself if the model has no adapter. Raises BadModel and UnsupportedModel."""
    by_name: dict[str, list[ModelFile]] = defaultdict(list)
    for file in files:
        if file.role == "adapter":
            folder, _, inner = file.name.partition("/")
            by_name[
                folder.removeprefix("adapter-") if _is_named(folder, inner) else _MERGED
            ].append(file)
    if not by_name:
        return checkpoint
    made = {name: Adapter(name, own, checkpoint.config) for name, own in by_name.items()}
    return AdaptedCheckpoint(checkpoint, made.pop(_MERGED, None), made)


def _is_named(folder: str, inner: str) -> bool:
    return bool(inner) and folder.startswith("adapter-") and folder != "adapter-"


def named_adapters(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The adapters that a request may name."""
    return tuple(checkpoint.named) if isinstance(checkpoint, AdaptedCheckpoint) else ()


def active_adapters(checkpoint: Checkpoint) -> ActiveAdapters | None:
    """Whom to tell, before a step, which rows asked for which adapter; None: no one does."""
    if isinstance(checkpoint, AdaptedCheckpoint) and checkpoint.named:
        return checkpoint.active
    return None
