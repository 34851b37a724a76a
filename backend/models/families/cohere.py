"""Cohere's Command R7B and its kin: attention and MLP side by side, LayerNorm, paired rotation.
Three of four layers have a window; the others are told no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Family, ModelConfig
from . import gguf, hf

FAMILY = Family()
PATTERN = 4


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    rope = replace(hf.rope_of(raw), is_interleaved=True)
    pattern = int(raw.get("sliding_window_pattern") or PATTERN)
    ropes = {"sliding_attention": rope, "full_attention": None}
    layers = hf.windowed_layers(raw, hf.layer_types_of(raw, pattern), ropes)
    config = hf.base_config(raw, FAMILY, layers, is_tied=True, eps_key="layer_norm_eps")
    return _with(config, float(raw.get("logit_scale", 0.0625)))


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    rope = gguf.rope_of(meta, is_interleaved=True)
    layers = gguf.windowed_layers(meta, PATTERN, None, rope)
    config = gguf.base_config(meta, FAMILY, names, layers)
    return _with(config, float(meta.value("logit_scale")))


def _with(config: ModelConfig, logit_scale: float) -> ModelConfig:
    return replace(config, norms="parallel", norm_kind="layer", logit_scale=logit_scale)
