"""Gemma: embeddings times the root of their width, norms of 1 + w, GELU.

gemma   one norm before each branch
gemma2  one before and one after; every other layer windowed, scores and logits capped
gemma3  no caps, but a norm of each head; five of six layers windowed, with a rotation of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Family, LayerConfig, ModelConfig, Names
from . import gguf, hf

_HF = Names(
    parts={
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    norms_minus_one=True,
)
GEMMA = Family(hf=Names(norms_minus_one=True))
GEMMA2 = Family(hf=_HF)
GEMMA3 = Family(qk_norm=True, hf=_HF)

_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    version = str(raw["model_type"]).removesuffix("_text")
    if version == "gemma":
        return _common(hf.base_config(raw, GEMMA, is_tied=True))
    scale = float(raw.get("query_pre_attn_scalar", 256)) ** -0.5
    layers = _gemma2_layers(raw) if version == "gemma2" else _gemma3_layers(raw)
    family = GEMMA2 if version == "gemma2" else GEMMA3
    config = hf.base_config(raw, family, layers, is_tied=True)
    default_caps = (50.0, 30.0) if version == "gemma2" else (None, None)
    return replace(
        _common(config),
        norms="sandwich",
        attention_scale=scale,
        attention_softcap=raw.get("attn_logit_softcapping", default_caps[0]),
        logit_softcap=raw.get("final_logit_softcapping", default_caps[1]),
    )


def _gemma2_layers(raw: Mapping[str, Any]) -> list[LayerConfig]:
    rope = hf.rope_of(raw)
    ropes = {"sliding_attention": rope, "full_attention": rope}
    return hf.windowed_layers(raw, hf.layer_types_of(raw, 2), ropes)


def _gemma3_layers(raw: Mapping[str, Any]) -> list[LayerConfig]:
    nested = raw.get("rope_parameters") or {}
    local: Mapping[str, Any] = raw
    if "sliding_attention" not in nested:  # before transformers 5; the scaling is the global one's
        theta = raw.get("rope_local_base_freq", _LOCAL_THETA)
        local = {**raw, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    ropes = {
        "sliding_attention": hf.rope_of(local, "sliding_attention", theta=_LOCAL_THETA),
        "full_attention": hf.rope_of(raw, "full_attention", theta=_GLOBAL_THETA),
    }
    pattern = int(raw.get("sliding_window_pattern") or 6)
    return hf.windowed_layers(raw, hf.layer_types_of(raw, pattern), ropes)


def _common(config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=config.hidden_size**0.5, activation="gelu_tanh")


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata. llama.cpp stores 1 + w, and knows some numbers without the file."""
    meta = gguf.Metadata(metadata)
    if meta.architecture == "gemma":
        return _common(gguf.base_config(meta, GEMMA, names))
    score_cap: float | None
    if meta.architecture == "gemma2":
        rope = gguf.rope_of(meta)
        family, layers = GEMMA2, gguf.windowed_layers(meta, 2, rope, rope)
        score_cap = float(meta.value("attn_logit_softcapping", 50.0))
        logit_cap = float(meta.value("final_logit_softcapping", 30.0))
    else:
        rope = gguf.rope_of(meta, theta=_GLOBAL_THETA)
        local_theta = float(meta.value("rope.freq_base_swa", _LOCAL_THETA))
        local = replace(rope, theta=local_theta, scaling=None, is_windowed=True)
        family, layers = GEMMA3, gguf.windowed_layers(meta, 6, rope, local)
        score_cap, logit_cap = None, meta.optional("final_logit_softcapping")
    config = _common(gguf.base_config(meta, family, names, layers))
    is_27b = (meta.architecture, config.num_layers) in (("gemma2", 46), ("gemma3", 62))
    width = config.hidden_size // config.num_heads if is_27b else config.head_dim
    return replace(
        config,
        norms="sandwich",
        attention_scale=width**-0.5,
        attention_softcap=score_cap,
        logit_softcap=logit_cap,
    )
