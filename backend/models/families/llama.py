"""Llama, and Mistral, which is a Llama with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Family, ModelConfig
from . import gguf, hf

FAMILY = Family(gguf_permutes_qk=True)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    window = int(raw.get("sliding_window") or 0) if raw["model_type"] == "mistral" else 0
    layer = hf.layer_config(raw, hf.rope_of(raw), window or None)
    return hf.base_config(raw, FAMILY, [layer] * int(raw["num_hidden_layers"]))


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    # llama.cpp's converter writes a window for Mistral v0.1 alone
    layer = gguf.layer_config(meta, gguf.rope_of(meta), gguf.window_of(meta))
    return gguf.base_config(meta, FAMILY, names, [layer] * int(meta.value("block_count")))
