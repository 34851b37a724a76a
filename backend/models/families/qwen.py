"""Qwen2 (queries, keys and values with biases) and Qwen3 (a norm of each head instead), each also
with experts in some or all layers; Qwen2's experts share one that is always asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Experts, Family, LayerConfig, ModelConfig, Names
from . import gguf, hf

SHARED_EXPERT = {"mlp.shared_gate": "mlp.shared_expert_gate"} | {
    f"mlp.shared.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
_HF = Names(parts=SHARED_EXPERT)
QWEN2 = Family(qkv_bias=True, hf=_HF)
QWEN3 = Family(qk_norm=True, hf=_HF)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    is_second = str(raw["model_type"]).startswith("qwen2")
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
    layers = hf.windowed_layers(raw, types, ropes)
    family = QWEN2 if is_second else QWEN3
    if not str(raw["model_type"]).endswith("_moe"):
        return hf.base_config(raw, family, layers)
    config = hf.base_config(raw, family, with_experts(raw, layers))
    return replace(config, experts=experts_of(raw, has_shared=is_second))


def with_experts(raw: Mapping[str, Any], layers: list[LayerConfig]) -> list[LayerConfig]:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    step = int(raw.get("decoder_sparse_step") or 1)
    without = set(raw.get("mlp_only_layers") or ())
    return [
        replace(layer, has_experts=index not in without and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    ]


def experts_of(raw: Mapping[str, Any], has_shared: bool) -> Experts:
    """The mixture."""
    return Experts(
        num_experts=int(raw.get("num_experts") or raw["num_local_experts"]),
        num_active=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        renormalise=bool(raw.get("norm_topk_prob", False)),
        shared_size=int(raw.get("shared_expert_intermediate_size") or 0) if has_shared else 0,
        shared_gate=has_shared,
    )


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    is_second = meta.architecture.startswith("qwen2")
    layer = gguf.layer_config(meta, gguf.rope_of(meta))
    experts = None
    if meta.optional("expert_count"):
        experts = gguf.experts_of(meta, renormalise=not is_second, has_shared_gate=is_second)
        if is_second and not experts.shared_size:  # files of 2024 do not tell: llama.cpp's default
            experts = replace(experts, shared_size=int(meta.value("feed_forward_length")))
        layer = replace(layer, has_experts=True)
    layers = [layer] * int(meta.value("block_count"))
    config = gguf.base_config(meta, QWEN2 if is_second else QWEN3, names, layers)
    return replace(config, experts=experts)
