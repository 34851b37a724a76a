"""SmolLM3: a Llama in which every fourth layer is told no positions (Yang et al., "RoPE to NoPE and
Back Again", 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Family, ModelConfig
from . import gguf, hf

FAMILY = Family(gguf_permutes_qk=True)
INTERVAL = 4


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    num_layers = int(raw["num_hidden_layers"])
    interval = int(raw.get("no_rope_layer_interval") or INTERVAL)
    turns = raw.get("no_rope_layers") or [
        int((index + 1) % interval != 0) for index in range(num_layers)
    ]
    rope = hf.rope_of(raw, theta=2_000_000.0)
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    types = raw.get("layer_types") or ["full_attention"] * num_layers
    layers = [
        hf.layer_config(
            raw,
            rope if turning else None,
            window or None if kind == "sliding_attention" else None,
        )
        for turning, kind in zip(turns, types, strict=True)
    ]
    return hf.base_config(raw, FAMILY, layers, is_tied=True)


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata; llama.cpp knows the interval without the file."""
    meta = gguf.Metadata(metadata)
    rope = gguf.rope_of(meta)
    layers = [
        gguf.layer_config(meta, rope if (index + 1) % INTERVAL else None)
        for index in range(int(meta.value("block_count")))
    ]
    return gguf.base_config(meta, FAMILY, names, layers)
