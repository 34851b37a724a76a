"""gpt-oss: attention sinks, every other layer windowed, biases everywhere, experts with an
activation of their own (its model card, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Experts, Family, LayerConfig, ModelConfig, Names
from . import gguf, hf

FAMILY = Family(
    qkv_bias=True,
    hf=Names(parts={"mlp.router": "mlp.router"}, experts_transposed=True),
    gguf=Names(
        parts={
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
        }
    ),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    rope = hf.rope_of(raw, theta=150_000.0)
    ropes = {"sliding_attention": rope, "full_attention": rope}
    layers = hf.windowed_layers(raw, hf.layer_types_of(raw, 2), ropes)
    experts = _experts(
        int(raw["num_local_experts"]),
        int(raw["num_experts_per_tok"]),
        int(raw["intermediate_size"]),
        float(raw.get("swiglu_limit") or 7.0),
    )
    return _with(hf.base_config(raw, FAMILY, _all_with_experts(layers)), experts)


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    rope = gguf.rope_of(meta, theta=150_000.0)
    if rope.scaling is not None:
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    layers = gguf.windowed_layers(meta, 2, rope, rope)
    read = gguf.experts_of(meta)
    experts = _experts(read.num_experts, read.num_active, read.intermediate_size, 7.0)
    config = gguf.base_config(meta, FAMILY, names, _all_with_experts(layers))
    return replace(_with(config, experts), intermediate_size=experts.intermediate_size)


def _all_with_experts(layers: list[LayerConfig]) -> list[LayerConfig]:
    return [replace(layer, has_experts=True) for layer in layers]


def _experts(num_experts: int, num_active: int, size: int, clamp: float) -> Experts:
    return Experts(
        num_experts,
        num_active,
        size,
        router="topk_softmax",
        router_bias=True,
        expert_bias=True,
        clamp=clamp,
    )


def _with(config: ModelConfig, experts: Experts) -> ModelConfig:
    return replace(config, experts=experts, sinks=True, qkv_bias=True, o_bias=True)
