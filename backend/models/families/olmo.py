"""OLMo 2 and 3: a norm behind each branch instead of before it, and one over all heads of queries
and keys (OLMo et al., "2 OLMo 2 Furious", 2025). OLMo 3 has windows in three of four layers, whose
rotation is not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Family, ModelConfig, Names
from . import gguf, hf

FAMILY = Family(
    hf=Names(
        parts={
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
    )
)
PATTERN = 4


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    types = ["full_attention"] * int(raw["num_hidden_layers"])
    if raw["model_type"] == "olmo3":
        types = hf.layer_types_of(raw, PATTERN)
    ropes = {
        "full_attention": hf.rope_of(raw, "full_attention"),
        "sliding_attention": replace(hf.rope_of(raw, "sliding_attention"), scaling=None),
    }
    layers = hf.windowed_layers(raw, types, ropes)
    return replace(hf.base_config(raw, FAMILY, layers), norms="post", qk_norm_full=True)


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata; a window makes it an OLMo 3."""
    meta = gguf.Metadata(metadata)
    rope = gguf.rope_of(meta)
    pattern = PATTERN if gguf.window_of(meta) else 1
    layers = gguf.windowed_layers(meta, pattern, rope, replace(rope, scaling=None))
    config = gguf.base_config(meta, FAMILY, names, layers)
    return replace(config, norms="post", qk_norm_full=True)
