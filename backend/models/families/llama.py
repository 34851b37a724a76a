"""Llama, and what differs from it in a flag or two.

mistral     a window, in the first version
ministral3  YaRN, and queries that grow with their position
mixtral     experts in place of the MLP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Experts, Family, ModelConfig, Names
from . import gguf, hf

FAMILY = Family(
    gguf_permutes_qk=True,
    hf=Names(
        parts={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.gate_proj": "block_sparse_moe.experts.{e}.w1",
            "mlp.experts.up_proj": "block_sparse_moe.experts.{e}.w3",
            "mlp.experts.down_proj": "block_sparse_moe.experts.{e}.w2",
        }
    ),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    window = 0 if raw["model_type"] == "llama" else int(raw.get("sliding_window") or 0)
    layer = hf.layer_config(raw, hf.rope_of(raw), window or None)
    experts = None
    if raw["model_type"] == "mixtral":
        experts = Experts(
            num_experts=int(raw["num_local_experts"]),
            num_active=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["intermediate_size"]),
        )
        layer = replace(layer, has_experts=True)
    config = hf.base_config(raw, FAMILY, [layer] * int(raw["num_hidden_layers"]))
    return replace(config, experts=experts)


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    rope = gguf.rope_of(meta)
    rope = replace(rope, query_scaling_beta=float(meta.value("attention.temperature_scale", 0.0)))
    # llama.cpp's converter writes a window for Mistral v0.1 alone
    layer = gguf.layer_config(meta, rope, gguf.window_of(meta))
    num_experts = int(meta.value("expert_count", 0))
    experts = None
    if num_experts:
        experts = gguf.experts_of(meta)
        layer = replace(layer, has_experts=True)
    layers = [layer] * int(meta.value("block_count"))
    return replace(gguf.base_config(meta, FAMILY, names, layers), experts=experts)
