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
from . import gguf, hf

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
    gguf=Names(
        parts={
            "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
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
    return _with(config, experts, cap, int(raw.get("hidden_size_per_layer_input") or 0))


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
    """Flags of GGUF metadata. That a part of each head stands still is told by `rope_freqs`."""
    meta = gguf.Metadata(metadata)
    num_layers = int(meta.value("block_count"))
    windowed = meta.value("attention.sliding_window_pattern")
    sizes = meta.value("feed_forward_length")
    size = int(sizes[0]) if isinstance(sizes, list) else int(sizes)
    first_shared = num_layers - int(meta.value("attention.shared_kv_layers", 0))
    experts = gguf.experts_of(meta) if meta.optional("expert_count") else None
    layers: list[LayerConfig] = []
    for index in range(num_layers):
        layer = _gguf_layer(meta, names, index, bool(windowed[index]), experts is not None)
        if index >= first_shared:
            source = max(i for i in range(first_shared) if windowed[i] == windowed[index])
            is_wide = isinstance(sizes, list) and int(sizes[index]) > size
            layer = replace(layer, shares_kv_of=source, has_wide_mlp=is_wide)
        layers.append(layer)
    config = replace(gguf.base_config(meta, FAMILY, names, layers), intermediate_size=size)
    cap = meta.optional("final_logit_softcapping")
    layer_input_size = int(meta.value("embedding_length_per_layer_input", 0))
    return _with(config, experts, cap, layer_input_size)


def _gguf_layer(
    meta: gguf.Metadata, names: frozenset[str], index: int, is_windowed: bool, has_experts: bool
) -> LayerConfig:
    head_dim = int(meta.value("attention.key_length"))
    rope = Rope(float(meta.value("rope.freq_base", 1_000_000.0)), head_dim)
    if is_windowed:
        head_dim = int(meta.value("attention.key_length_swa"))
        theta = float(meta.value("rope.freq_base_swa", 10_000.0))
        rope = Rope(theta, head_dim, is_windowed=True)
    kv_heads = meta.value("attention.head_count_kv")
    return LayerConfig(
        num_kv_heads=int(kv_heads[index] if isinstance(kv_heads, list) else kv_heads),
        head_dim=head_dim,
        rope=rope,
        kind="gemma4",
        window=gguf.window_of(meta) if is_windowed else None,
        has_experts=has_experts,
        keys_are_values=f"blk.{index}.attn_v.weight" not in names,
    )


def _with(
    config: ModelConfig, experts: Experts | None, cap: Any, layer_input_size: int
) -> ModelConfig:
    return replace(
        config,
        norms="sandwich",
        activation="gelu_tanh",
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=None if cap is None else float(cap),
        experts=experts,
        gemma4=Gemma4Shape(layer_input_size),
    )
