"""A model's weights by their canonical names, whatever the container.

Canonical are the names and shapes that Hugging Face gives a Llama. A GGUF's names are mapped, and
what its converter changed is undone: llama.cpp stores the rows of q and k for RoPE over adjacent
pairs where the family has `gguf_permutes_qk` (its `permute` in convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..protocol import ModelFile
from .config import BadModel, ModelConfig, UnsupportedModel, config_from_gguf, config_from_hf
from .container import Container, open_container
from .dequantize import QuantBlocks

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

    def rope_factors(self) -> list[float] | None:
        """What each rotary frequency is divided by, where the file spells it out."""
        ...


def open_checkpoint(files: Sequence[ModelFile]) -> Checkpoint:
    """Raises BadModel or UnsupportedModel with one sentence; nothing is read but headers."""
    return checkpoint_of(open_container(files))


def checkpoint_of(container: Container) -> Checkpoint:
    """The decoder that lies in these files. Raises BadModel or UnsupportedModel."""
    if container.format == "gguf":
        return _GGUFCheckpoint(container)
    return _SafetensorsCheckpoint(container)


class _GGUFCheckpoint:
    """llama.cpp's names and orders, mapped."""

    format = "gguf"

    def __init__(self, container: Container) -> None:
        self._container = container
        self.metadata = container.metadata
        self.quantization = container.quantization
        self.config = config_from_gguf(container.metadata, container.names)

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._container.names

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._unpermuted(name, self._container.tensor(_gguf_name(name), dtype))

    def blocks(self, name: str) -> QuantBlocks | None:
        found = self._container.blocks(_gguf_name(name))
        return found and found.rows(lambda rows: self._unpermuted(name, rows))

    def rope_factors(self) -> list[float] | None:
        # llama.cpp's way to carry Llama 3's frequency scaling
        if "rope_freqs.weight" not in self._container.names:
            return None
        factors = self._container.tensor("rope_freqs.weight", torch.float32)
        return [float(factor) for factor in factors]

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        config = self.config
        if not config.family.gguf_permutes_qk:
            return tensor
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        paired = tensor.reshape(heads, config.head_dim // 2, 2, *tensor.shape[1:])
        return paired.transpose(1, 2).reshape(tensor.shape)


_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _gguf_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _GGUF_TOP[name]
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"


class _SafetensorsCheckpoint:
    """A Hugging Face folder, whose names are the canonical ones."""

    format = "safetensors"

    def __init__(self, container: Container) -> None:
        self._container = container
        self.metadata: Mapping[str, Any] = {}
        self.quantization = container.quantization
        self.config = config_from_hf(container.config)

    def has(self, name: str) -> bool:
        return name in self._container.names

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._container.tensor(name, dtype)

    def blocks(self, name: str) -> QuantBlocks | None:
        return self._container.blocks(name)

    def rope_factors(self) -> list[float] | None:
        return None  # config.json has the rule instead
