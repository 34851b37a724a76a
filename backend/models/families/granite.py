"""Granite 3 and 4 without recurrent layers: a Llama whose parts are scaled (IBM's model cards)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Family, ModelConfig
from . import gguf, hf

FAMILY = Family(gguf_permutes_qk=True)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Flags of a config.json."""
    return replace(
        hf.base_config(raw, FAMILY),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )


def from_gguf(metadata: Mapping[str, Any], names: gguf.TensorNames) -> ModelConfig:
    """Flags of GGUF metadata."""
    meta = gguf.Metadata(metadata)
    return replace(
        gguf.base_config(meta, FAMILY, names),
        embedding_scale=float(meta.value("embedding_scale", 1.0)),
        residual_scale=float(meta.value("residual_scale", 1.0)),
        attention_scale=float(meta.value("attention.scale", 0.0)),
        logit_scale=1 / float(meta.value("logit_scale", 1.0)),
    )
