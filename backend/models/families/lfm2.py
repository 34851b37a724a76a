"""LFM2: gated short convolutions, and a few layers of attention (Liquid AI, 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import Family, LayerConfig, ModelConfig, Names, ShortConvShape
from . import gguf, hf

FAMILY = Family(
    qk_norm=True,
    hf=Names(
        parts={
            "model.norm.weight": "model.embedding_norm.weight",
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        }
    ),
    gguf=Names(
        parts={
            "model.norm.weight": "token_embd_norm.weight",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
            "conv.conv": "shortconv.conv",
        }
    ),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    num_layers = int(raw["num_hidden_layers"])
    attending = raw.get("full_attn_idxs")
    types = raw.get("layer_types") or [
        "conv" if attending is not None and index not in attending else "full_attention"
        for index in range(num_layers)
    ]
    attention = hf.layer_config(raw, hf.rope_of(raw, theta=1_000_000.0))
    layers = _layers(attention, [kind == "conv" for kind in types])
    width = int(raw.get("conv_L_cache", 3))
    is_tied = bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True)))
    return replace(
        hf.base_config(raw, FAMILY, layers, eps_key="norm_eps"),
        intermediate_size=_inner_size(raw),
        tied_embeddings=is_tied,
        short_conv=ShortConvShape(width, bool(raw.get("conv_bias", False))),
    )


def _inner_size(raw: Mapping[str, Any]) -> int:
    size = int(raw.get("block_ff_dim") or raw["intermediate_size"])
    if raw.get("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        size = int(float(raw.get("block_ffn_dim_multiplier", 1.0)) * size)
        multiple = int(raw.get("block_multiple_of", 256))
        size = -(-size // multiple) * multiple
    return size


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata; a layer without key heads is a convolution."""
    meta = gguf.Metadata(metadata)
    heads: Sequence[int] = meta.value("attention.head_count_kv")
    layers = _layers(gguf.layer_config(meta, gguf.rope_of(meta)), [not count for count in heads])
    return replace(
        gguf.base_config(meta, FAMILY, names, layers),
        short_conv=ShortConvShape(int(meta.value("shortconv.l_cache")), False),
    )


def _layers(attention: LayerConfig, are_convolutions: Sequence[bool]) -> list[LayerConfig]:
    conv = replace(attention, kind="conv", num_kv_heads=0, rope=None)
    return [conv if is_conv else attention for is_conv in are_convolutions]
