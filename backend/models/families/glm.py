"""GLM-4 (0414): norms before and after each branch, half of each head rotated, in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Family, ModelConfig, Names
from . import gguf, hf

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
FAMILY = Family(
    hf=Names(
        parts={
            "attention_out_norm": "post_self_attn_layernorm",
            "mlp_out_norm": "post_mlp_layernorm",
        },
        fused={"mlp.gate_up_proj": _GATE_UP},
    ),
    gguf=Names(fused={"attn_qkv": _QKV, "ffn_up": _GATE_UP}),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    rope = replace(hf.rope_of(raw, share=0.5), is_interleaved=True)
    layers = [hf.layer_config(raw, rope)] * int(raw["num_hidden_layers"])
    config = hf.base_config(raw, FAMILY, layers)
    return replace(config, norms="sandwich", o_bias=False)


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    layers = [gguf.layer_config(meta, gguf.rope_of(meta, is_interleaved=True))] * int(
        meta.value("block_count")
    )
    return replace(gguf.base_config(meta, FAMILY, names, layers), norms="sandwich")
