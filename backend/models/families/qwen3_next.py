"""Qwen3-Next and Qwen3.5: three gated delta nets to one layer of gated attention, a quarter of each
head rotated, norms of 1 + w; an MLP or experts in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import DeltaNetShape, Family, ModelConfig, Names
from . import gguf, hf
from .qwen import SHARED_EXPERT, experts_of, with_experts

_DELTA = {
    "delta.conv": "linear_attn.conv1d",
    "delta.log_rate": "linear_attn.A_log",
    "delta.step_bias": "linear_attn.dt_bias",
    "delta.out_weight": "linear_attn.norm.weight",  # this one is w, not 1 + w
    "delta.out": "linear_attn.out_proj",
}


def _alternating(config: ModelConfig, half: int) -> list[int]:
    """Rows of a projection that holds each head's query and then its gate."""
    size = config.head_dim
    return [
        2 * head * size + half * size + row
        for head in range(config.num_heads)
        for row in range(size)
    ]


def _grouped(config: ModelConfig, part: str) -> list[int]:
    """Rows of Qwen3-Next's projection, which holds q, k, v and z of one key head after another."""
    shape = config.delta_net
    assert shape is not None
    per_key = shape.num_value_heads // shape.num_key_heads
    sizes = {"q": shape.key_dim, "k": shape.key_dim}
    sizes |= {"v": per_key * shape.value_dim, "z": per_key * shape.value_dim}
    sizes = {"b": per_key, "a": per_key} if part in "ba" else sizes
    begin = sum(
        size for name, size in sizes.items() if list(sizes).index(name) < list(sizes).index(part)
    )
    stride = sum(sizes.values())
    return [
        head * stride + begin + row
        for head in range(shape.num_key_heads)
        for row in range(sizes[part])
    ]


def _picks(is_grouped: bool) -> dict[str, Any]:
    picks: dict[str, Any] = {
        "self_attn.q_proj": ("self_attn.q_proj", lambda config: _alternating(config, 0)),
        "self_attn.gate_proj": ("self_attn.q_proj", lambda config: _alternating(config, 1)),
    }
    if is_grouped:
        qkvz, ba = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
        picks |= {
            "delta.qkv": (qkvz, lambda c: [row for part in "qkv" for row in _grouped(c, part)]),
            "delta.z": (qkvz, lambda config: _grouped(config, "z")),
            "delta.b": (ba, lambda config: _grouped(config, "b")),
            "delta.a": (ba, lambda config: _grouped(config, "a")),
        }
    return picks


_GGUF_DELTA = {
    "post_attention_layernorm": "post_attention_norm",
    "delta.qkv": "attn_qkv",
    "delta.z": "attn_gate",
    "delta.b": "ssm_beta",
    "delta.a": "ssm_alpha",
    "delta.conv": "ssm_conv1d",
    "delta.rate": "ssm_a",
    "delta.step_bias": "ssm_dt.bias",
    "delta.out_weight": "ssm_norm.weight",
    "delta.out": "ssm_out",
}
_GGUF_QUERIES: dict[str, Any] = {
    "self_attn.q_proj": ("attn_q", lambda config: _alternating(config, 0)),
    "self_attn.gate_proj": ("attn_q", lambda config: _alternating(config, 1)),
}
QWEN3_NEXT = Family(
    qk_norm=True,
    hf=Names(parts=_DELTA | SHARED_EXPERT, picks=_picks(is_grouped=True), norms_minus_one=True),
    gguf=Names(
        parts=_GGUF_DELTA,
        picks=_GGUF_QUERIES
        | {
            "delta.b": ("ssm_ba", lambda config: _grouped(config, "b")),
            "delta.a": ("ssm_ba", lambda config: _grouped(config, "a")),
        },
    ),
)
QWEN3_5 = Family(
    qk_norm=True,
    hf=Names(
        parts=_DELTA
        | SHARED_EXPERT
        | {
            "delta.qkv": "linear_attn.in_proj_qkv",
            "delta.z": "linear_attn.in_proj_z",
            "delta.b": "linear_attn.in_proj_b",
            "delta.a": "linear_attn.in_proj_a",
        },
        picks=_picks(is_grouped=False),
        norms_minus_one=True,
    ),
    gguf=Names(parts=_GGUF_DELTA, picks=_GGUF_QUERIES),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    num_layers = int(raw["num_hidden_layers"])
    interval = int(raw.get("full_attention_interval") or 4)
    types = raw.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(num_layers)
    ]
    attention = hf.layer_config(raw, hf.rope_of(raw, share=0.25))
    delta = replace(attention, kind="delta", num_kv_heads=0, rope=None)
    layers = [delta if kind == "linear_attention" else attention for kind in types]
    experts = None
    if raw.get("num_experts") or raw.get("num_local_experts"):
        experts = experts_of({"norm_topk_prob": True, **raw}, has_shared=True)
        layers = with_experts(raw, layers)
        raw = {"intermediate_size": experts.intermediate_size, **raw}
    family = QWEN3_NEXT if raw["model_type"] == "qwen3_next" else QWEN3_5
    return replace(
        hf.base_config(raw, family, layers),
        attention_gate=True,
        experts=experts,
        delta_net=DeltaNetShape(
            num_key_heads=int(raw["linear_num_key_heads"]),
            num_value_heads=int(raw["linear_num_value_heads"]),
            key_dim=int(raw["linear_key_head_dim"]),
            value_dim=int(raw["linear_value_head_dim"]),
            conv_width=int(raw.get("linear_conv_kernel_dim", 4)),
        ),
    )


def from_gguf(metadata: Mapping[str, Any], names: frozenset[str]) -> ModelConfig:
    """Flags of GGUF metadata. Of Qwen3.5 the value heads are in another order than in safetensors,
    all of them alike; layers for predicting several tokens stand behind the network's own.
    """
    meta = gguf.Metadata(metadata)
    num_layers = int(meta.value("block_count")) - int(meta.value("nextn_predict_layers", 0))
    interval = int(meta.value("full_attention_interval", 4))
    recurrent = meta.optional("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        recurrent = [(index + 1) % interval != 0 for index in range(num_layers)]
    attention = gguf.layer_config(meta, gguf.rope_of(meta))
    delta = replace(attention, kind="delta", num_kv_heads=0, rope=None)
    layers = [delta if is_delta else attention for is_delta in recurrent[:num_layers]]
    experts = None
    if meta.optional("expert_count"):
        experts = gguf.experts_of(meta, has_shared_gate=True)
        layers = [replace(layer, has_experts=True) for layer in layers]
    is_next = meta.architecture == "qwen3next"
    config = gguf.base_config(meta, QWEN3_NEXT if is_next else QWEN3_5, names, layers)
    num_value_heads = int(meta.value("ssm.time_step_rank"))
    return replace(
        config,
        attention_gate=True,
        experts=experts,
        num_layers=num_layers,
        intermediate_size=config.intermediate_size or (experts.intermediate_size if experts else 0),
        delta_net=DeltaNetShape(
            num_key_heads=int(meta.value("ssm.group_count")),
            num_value_heads=num_value_heads,
            key_dim=int(meta.value("ssm.state_size")),
            value_dim=int(meta.value("ssm.inner_size")) // num_value_heads,
            conv_width=int(meta.value("ssm.conv_kernel")),
            is_tiled=not is_next,
        ),
    )
