"""Qwen2 (queries, keys and values with biases) and Qwen3 (a norm of each head instead)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Family, ModelConfig
from . import gguf, hf

QWEN2 = Family(qkv_bias=True)
QWEN3 = Family(qk_norm=True)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    family = QWEN2 if raw["model_type"] == "qwen2" else QWEN3
    num_layers = int(raw["num_hidden_layers"])
    rope = hf.rope_of(raw)
    types = ["full_attention"] * num_layers
    if raw.get("use_sliding_window"):
        first = int(raw.get("max_window_layers", 28))  # the first ones see everything
        types = raw.get("layer_types") or [
            "sliding_attention" if index >= first else "full_attention"
            for index in range(num_layers)
        ]
    ropes = {"full_attention": rope, "sliding_attention": rope}
    return hf.base_config(raw, family, hf.windowed_layers(raw, types, ropes))


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    return gguf.base_config(meta, QWEN2 if meta.architecture == "qwen2" else QWEN3, names)
