"""Gemma 4: Gemma 3's order of norms (of w, not 1 + w) and windows, and more. Layers that see
everything have larger heads, of which a quarter rotates; the last layers read the keys and values
of earlier ones; values are normed; for layer inputs and experts see `gemma4_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Experts, Family, Gemma4Shape, LayerConfig, ModelConfig, Names
from ..rope import Rope, RopeScaling
from . import hf

FAMILY = Family(
    qk_norm=True,
    hf=Names(
        parts={
            "attention_out_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
            "mlp.router": "router.proj",
            "mlp.experts": "experts",
        },
    ),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    types = hf.layer_types_of(raw, 6)
    layers = [_layer(raw, types, index) for index in range(len(types))]
    num_shared = int(raw.get("num_kv_shared_layers") or 0)
    first_shared = len(layers) - num_shared
    for index in range(first_shared, len(layers)):
        source = max(i for i in range(first_shared) if types[i] == types[index])
        layers[index] = replace(
            layers[index], shares_kv_of=source, has_wide_mlp=bool(raw.get("use_double_wide_mlp"))
        )
    config = hf.base_config(raw, FAMILY, layers, is_tied=True)
    experts = None
    if raw.get("enable_moe_block"):
        experts = Experts(
            int(raw["num_experts"]), int(raw["top_k_experts"]), int(raw["moe_intermediate_size"])
        )
    cap = raw.get("final_logit_softcapping")
    return replace(
        config,
        norms="sandwich",
        activation="gelu_tanh",
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=None if cap is None else float(cap),
        experts=experts,
        gemma4=Gemma4Shape(int(raw.get("hidden_size_per_layer_input") or 0)),
    )


def _layer(raw: Mapping[str, Any], types: list[str], index: int) -> LayerConfig:
    kind = types[index]
    is_windowed = kind == "sliding_attention"
    head_dim, kv_heads = hf.head_dim_of(raw), hf.num_kv_heads_of(raw)
    keys_are_values = bool(raw.get("attention_k_eq_v")) and not is_windowed
    if "per_layer_config" in raw:  # as transformers 5 spells it
        own = raw["per_layer_config"].get(str(index), {})
        head_dim = int(own.get("head_dim", head_dim))
        kv_heads = int(own.get("num_key_value_heads", kv_heads))
    elif not is_windowed:
        head_dim = int(raw.get("global_head_dim") or 512)
        if keys_are_values:
            kv_heads = int(raw.get("num_global_key_value_heads") or kv_heads)
    return LayerConfig(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(raw, kind, head_dim),
        kind="gemma4",
        window=int(raw["sliding_window"]) if is_windowed else None,
        has_experts=bool(raw.get("enable_moe_block")),
        keys_are_values=keys_are_values,
    )


def _rope(raw: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    given = (raw.get("rope_parameters") or {}).get(kind) or {}
    if kind == "sliding_attention":
        return Rope(float(given.get("rope_theta", 10_000.0)), head_dim, is_windowed=True)
    share = float(given.get("partial_rotary_factor", 0.25))
    scaling = RopeScaling("proportional", float(given.get("factor", 1.0)), share=share)
    return Rope(float(given.get("rope_theta", 1_000_000.0)), head_dim, scaling)


def from_gguf(metadata: Mapping[str, Any], names: frozenset[str]) -> ModelConfig:
    """No GGUF architecture leads here."""
    raise AssertionError(metadata.get("general.architecture"))
