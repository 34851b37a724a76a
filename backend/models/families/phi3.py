"""Phi-3, 3.5 and 4: a Llama with fused matrices, LongRoPE, and sometimes a partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Family, ModelConfig, Names
from . import gguf, hf

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
FAMILY = Family(
    hf=Names(fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP}),
    gguf=Names(fused={"attn_qkv": _QKV, "ffn_up": _GATE_UP}),
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    layer = hf.layer_config(raw, hf.rope_of(raw), int(raw.get("sliding_window") or 0) or None)
    return hf.base_config(raw, FAMILY, [layer] * int(raw["num_hidden_layers"]))


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata. LongRoPE's factors are tensors, which the checkpoint adds."""
    meta = gguf.Metadata(metadata)
    layer = gguf.layer_config(meta, gguf.rope_of(meta), gguf.window_of(meta))
    return gguf.base_config(meta, FAMILY, names, [layer] * int(meta.value("block_count")))
