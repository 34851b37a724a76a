"""A model's weights by their canonical names, whatever the container.

`places` knows which stored tensor is meant, and which of its rows. What a converter changed is
undone here: llama.cpp stores the rows of q and k for RoPE over adjacent pairs where the family has
`gguf_permutes_qk` (its `permute` in convert_hf_to_gguf.py), Gemma's norms are stored less one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..protocol import ModelFile
from .config import BadModel, ModelConfig, UnsupportedModel, config_from_gguf, config_from_hf
from .container import Container, StoredRows, open_container
from .dequantize import QuantBlocks
from .places import Place, Places, unpaired
from .rope import RopeScaling, longrope_attention_factor

__all__ = ["BadModel", "Checkpoint", "QuantBlocks", "UnsupportedModel", "open_checkpoint"]


class Checkpoint(Protocol):
    """What the decoder asks of a container."""

    config: ModelConfig
    format: str  # "gguf", "safetensors"
    quantization: str  # "Q4_1", "BF16"
    metadata: Mapping[str, Any]  # of a GGUF; empty for safetensors

    def has(self, name: str) -> bool:
        """The canonical name exists."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh tensor of this dtype. Raises BadModel if the name is missing."""
        ...

    def blocks(self, name: str) -> QuantBlocks | None:
        """The matrix as the integers that are stored, if they are of a kind to compute with."""
        ...

    def rows(self, name: str) -> StoredRows | None:
        """The matrix as its bytes lie in the file, if its rows are quantised one by one."""
        ...


def open_checkpoint(files: Sequence[ModelFile]) -> Checkpoint:
    """Raises BadModel or UnsupportedModel with one sentence; nothing is read but headers."""
    return checkpoint_of(open_container(files))


def checkpoint_of(container: Container) -> Checkpoint:
    """The decoder that lies in these files. Raises BadModel or UnsupportedModel."""
    return _NamedCheckpoint(container)


class _NamedCheckpoint:
    """A container's tensors under the canonical names."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.format = container.format
        self.metadata = container.metadata
        self.quantization = container.quantization
        if container.format == "gguf":
            config = config_from_gguf(container.metadata, container.names)
            self.config = _with_stored_factors(config, container)
        else:
            self.config = config_from_hf(container.config)
        self._prefix = _prefix_of(container)
        self._places = Places(self.config, container.format == "gguf", self._is_stored)
        # One layer's stacks of experts, by stored name and dtype: each expert asks for all of them.
        self._stacks: dict[tuple[str, torch.dtype], Tensor] = {}
        self._stacks_of = ""  # the layer

    def has(self, name: str) -> bool:
        return self._is_stored(self._places.find(name).name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        place = self._places.find(name)
        tensor = self._stored(place, dtype)
        if place.rows is not None:
            tensor = tensor[place.rows].contiguous()
        if place.pairs_of_heads:
            tensor = unpaired(tensor, place.pairs_of_heads)
        return tensor + 1 if place.adds_one else tensor

    def blocks(self, name: str) -> QuantBlocks | None:
        place = self._places.find(name)
        if place.expert is not None:
            return None
        found = self._container.blocks(self._prefixed(place.name))
        if found is None:
            return None
        if place.rows is not None:
            found = found.rows(lambda rows: rows[place.rows].contiguous())
        if place.pairs_of_heads:
            found = found.rows(lambda rows: unpaired(rows, place.pairs_of_heads))
        return found

    def rows(self, name: str) -> StoredRows | None:
        place = self._places.find(name)
        found = self._container.rows(self._prefixed(place.name))
        if found is None or place.is_transposed:
            return None
        raw = found.raw if place.expert is None else found.raw[place.expert]
        if place.rows is not None:
            raw = raw[place.rows]
        if place.pairs_of_heads:
            raw = unpaired(raw, place.pairs_of_heads)
        is_copied = bool(place.pairs_of_heads) or isinstance(place.rows, list)
        return StoredRows(raw, found.type, found.is_mapped and not is_copied)

    def _stored(self, place: Place, dtype: torch.dtype) -> Tensor:
        name = self._prefixed(place.name)
        if place.expert is None:
            return self._container.tensor(name, dtype)
        layer = _layer_of(name)
        if layer != self._stacks_of:
            self._stacks.clear()
            self._stacks_of = layer
        if (name, dtype) not in self._stacks:
            self._stacks[name, dtype] = self._container.tensor(name, dtype)
        matrix = self._stacks[name, dtype][place.expert]
        return (matrix.t() if place.is_transposed else matrix).clone()

    def _is_stored(self, name: str) -> bool:
        return self._prefixed(name) in self._container.names

    def _prefixed(self, name: str) -> str:
        if name.startswith("model.") and self._prefix:
            return self._prefix + name.removeprefix("model.")
        return name


def _layer_of(stored: str) -> str:
    """ "12" of "blk.12.ffn_up_exps.weight" and of "model.layers.12.mlp.experts.down_proj"."""
    return next((part for part in stored.split(".") if part.isdigit()), "")


def _prefix_of(container: Container) -> str:
    """What stands in place of "model." where the text model is a part of another one."""
    last = "embed_tokens.weight"
    if container.format == "gguf" or f"model.{last}" in container.names:
        return ""
    found = [name for name in container.names if name.endswith(f".{last}")]
    return min(found, key=len).removesuffix(last) if found else ""


def _with_stored_factors(config: ModelConfig, container: Container) -> ModelConfig:
    """With the divisors of frequencies that llama.cpp keeps in tensors: Llama 3's, and Phi's."""

    def factors(name: str) -> tuple[float, ...]:
        if name not in container.names:
            return ()
        return tuple(float(value) for value in container.tensor(name, torch.float32))

    plain = factors("rope_freqs.weight")
    short, long = factors("rope_factors_short.weight"), factors("rope_factors_long.weight")
    if not (plain or short or long):
        return config
    layers = []
    for layer in config.layers:
        rope = layer.rope
        if rope is None or rope.is_windowed:
            layers.append(layer)
            continue
        if {len(each) for each in (plain, short, long) if each} != {rope.dim // 2}:
            raise BadModel(f"the RoPE factors are not {rope.dim // 2}, as the frequencies are")
        scaling = _longrope(config, container, short, long) if long else rope.scaling
        layers.append(replace(layer, rope=replace(rope, divisors=plain, scaling=scaling)))
    return replace(config, layers=tuple(layers))


def _longrope(
    config: ModelConfig, container: Container, short: tuple[float, ...], long: tuple[float, ...]
) -> RopeScaling:
    prefix = f"{config.architecture}.rope.scaling."
    original = int(container.metadata.get(f"{prefix}original_context_length", 4096))
    factor = config.context_length / original
    stored = container.metadata.get(f"{prefix}attn_factor")
    sharpened = longrope_attention_factor(factor, original) if stored is None else float(stored)
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=sharpened,
        short_factors=short or long,
        long_factors=long,
    )
