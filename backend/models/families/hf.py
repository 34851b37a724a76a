"""What the config.json of all families has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import Family, LayerConfig, ModelConfig, UnsupportedModel
from ..rope import (
    KINDS,
    Rope,
    RopeScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

Raw = Mapping[str, Any]


def head_dim_of(raw: Raw) -> int:
    """Not always hidden_size / num_attention_heads."""
    return int(raw.get("head_dim") or int(raw["hidden_size"]) // int(raw["num_attention_heads"]))


def base_config(
    raw: Raw,
    family: Family,
    layers: Sequence[LayerConfig] = (),
    *,
    is_tied: bool = False,
    eps_key: str = "rms_norm_eps",
) -> ModelConfig:
    """A ModelConfig with what all families spell alike; `layers` empty makes them all equal.

    Raises KeyError, TypeError or ValueError for what is missing or makes no sense.
    """
    heads = int(raw["num_attention_heads"])
    num_layers = int(raw["num_hidden_layers"])
    if not layers:
        layers = [layer_config(raw, rope_of(raw))] * num_layers
    if len(layers) != num_layers:
        raise ValueError(f"{len(layers)} layers are described, num_hidden_layers is {num_layers}")
    has_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=str(raw["model_type"]),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads_of(raw),
        head_dim=head_dim_of(raw),
        rms_norm_eps=float(raw.get(eps_key, 1e-6)),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        family=family,
        layers=tuple(layers),
        tied_embeddings=bool(raw.get("tie_word_embeddings", is_tied)),
        qkv_bias=family.qkv_bias or has_bias,
        o_bias=has_bias and not family.qkv_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation=activation_of(raw),
    )


def num_kv_heads_of(raw: Raw) -> int:
    """As many as query heads, where the file does not say."""
    return int(raw.get("num_key_value_heads") or raw["num_attention_heads"])


def layer_config(raw: Raw, rope: Rope | None, window: int | None = None) -> LayerConfig:
    """An attention layer of the model's own sizes."""
    return LayerConfig(num_kv_heads_of(raw), head_dim_of(raw), rope, window=window)


def layer_types_of(raw: Raw, pattern: int) -> list[str]:
    """`layer_types`; where it is missing, every `pattern`-th layer sees everything."""
    given = raw.get("layer_types")
    if given:
        return [str(kind) for kind in given]
    return [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(int(raw["num_hidden_layers"]))
    ]


def windowed_layers(
    raw: Raw, types: Sequence[str], ropes: Mapping[str, Rope | None]
) -> list[LayerConfig]:
    """Layers whose window and rotation follow from their type."""
    window = int(raw.get("sliding_window") or 0) or None
    return [
        layer_config(raw, ropes[kind], window if kind == "sliding_attention" else None)
        for kind in types
    ]


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def activation_of(raw: Raw) -> str:
    """Raises UnsupportedModel."""
    name = str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {name} is not supported; {', '.join(sorted(_ACTIVATIONS))} are"
        )
    return _ACTIVATIONS[name]


# ------------------------------------------------------------------------- rotation


def rope_of(raw: Raw, layer_type: str = "", *, theta: float = 10000.0, share: float = 1.0) -> Rope:
    """The rotation; `share` of the head where the file does not say `partial_rotary_factor`.

    transformers 5 writes rope_parameters, for several kinds of layer one inside for each kind;
    earlier versions wrote rope_scaling and rope_theta.
    """
    rope: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if isinstance(rope.get(layer_type), Mapping):
        rope = rope[layer_type]
    share = float(
        _first(rope.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), share)
    )
    return Rope(
        theta=float(_first(rope.get("rope_theta"), raw.get("rope_theta"), theta)),
        dim=int(head_dim_of(raw) * share),
        scaling=_scaling(raw, rope),
        query_scaling_beta=float(rope.get("llama_4_scaling_beta") or 0.0),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _scaling(raw: Raw, rope: Raw) -> RopeScaling | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default" or kind == "mrope":  # the latter differs for images alone
        return None
    if kind not in KINDS:
        raise UnsupportedModel(
            f"RoPE scaling {kind} is not supported; default, {', '.join(KINDS)} are"
        )
    longest = int(raw.get("max_position_embeddings", 2048))
    original = int(
        _first(
            raw.get("original_max_position_embeddings"),
            rope.get("original_max_position_embeddings"),
            longest,
        )
    )
    given = rope.get("factor")
    factor = longest / original if given is None else float(given)
    scaling = RopeScaling(
        kind,
        factor,
        original,
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        short_factors=tuple(float(value) for value in rope.get("short_factor", ())),
        long_factors=tuple(float(value) for value in rope.get("long_factor", ())),
    )
    return replace(scaling, attention_factor=_attention_factor(rope, scaling))


def _attention_factor(rope: Raw, scaling: RopeScaling) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.kind == "yarn":
        return yarn_attention_factor(
            scaling.factor,
            float(rope.get("mscale") or 0.0),
            float(rope.get("mscale_all_dim") or 0.0),
        )
    if scaling.kind == "longrope":
        return longrope_attention_factor(scaling.factor, scaling.original_context_length)
    return 1.0
