"""ModelConfig: what makes one decoder differ from another, as flags.

One flag-driven decoder serves the families here; a family is a row of ARCHITECTURES and the reading
of its keys, from a config.json (Hugging Face) or from GGUF metadata. What is missing in a file gets
the default that transformers or llama.cpp has for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(Exception):
    """The model is sound, but of a kind that is not supported. The text names what is."""


class BadModel(Exception):
    """The model's files are damaged or do not fit together. The text says where."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the plain Llama block."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_qk: bool = False  # llama.cpp stores q and k rows for adjacent-pair RoPE


# By `model_type` of config.json, which for these is also GGUF's general.architecture.
ARCHITECTURES: dict[str, Family] = {
    "llama": Family(gguf_permutes_qk=True),
    "mistral": Family(gguf_permutes_qk=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies (`rope_type: llama3`), or `linear`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a network. Lengths in tokens or elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    family: Family
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def inverse_frequencies(self) -> list[float]:
        """head_dim / 2 rotary frequencies, the scaling applied."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return [frequency / scaling.factor for frequency in plain]
        return [_llama3_frequency(frequency, scaling) for frequency in plain]


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Long waves are stretched, short ones kept, and those between blended."""
    length = scaling.original_context_length
    wave = 2 * math.pi / frequency
    if wave > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wave < length / scaling.high_freq_factor:
        return frequency
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (length / wave - scaling.low_freq_factor) / span
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def family_of(architecture: str) -> Family:
    """Raises UnsupportedModel naming the supported ones."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"architecture {architecture or '(none given)'} is not supported; supported are "
            f"{supported}"
        )
    return ARCHITECTURES[architecture]


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """From the object in config.json. Raises UnsupportedModel, or BadModel for a missing key."""
    architecture = str(raw.get("model_type", ""))
    family = family_of(architecture)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"safetensors quantised by {method} are not supported; bf16, f16 and f32 are"
        )
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_hf_theta(raw),
            context_length=int(raw.get("max_position_embeddings", 2048)),
            family=family,
            rope_scaling=_hf_rope_scaling(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or bool(raw.get("attention_bias", False)),
            o_bias=bool(raw.get("attention_bias", False)) and not family.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            sliding_window=_hf_window(raw),
        )
    except KeyError as error:
        raise BadModel(f"config.json has no {error}") from error
    except (TypeError, ValueError) as error:
        raise BadModel(f"config.json: {error}") from error


def _hf_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes rope_parameters, earlier versions rope_scaling."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _hf_theta(raw: Mapping[str, Any]) -> float:
    return float(_hf_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _hf_rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    rope = _hf_rope(raw)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "linear"):
        raise UnsupportedModel(
            f"RoPE scaling {kind} is not supported; default, linear and llama3 are"
        )
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_context_length=int(rope.get("original_max_position_embeddings", 8192)),
    )


def _hf_window(raw: Mapping[str, Any]) -> int | None:
    window = raw.get("sliding_window")
    is_used = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    return int(window) if window and is_used else None


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    """From GGUF metadata. Raises UnsupportedModel, or BadModel for a missing key."""
    architecture = str(metadata.get("general.architecture", ""))
    family = family_of(architecture)

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise BadModel(f"the GGUF metadata has no {architecture}.{key}")
        return found

    try:
        heads = int(value("attention.head_count"))
        hidden = int(value("embedding_length"))
        scaling = str(value("rope.scaling.type", "none"))
        if scaling not in ("none", "linear"):
            raise UnsupportedModel(
                f"RoPE scaling {scaling} is not supported; none, linear and llama3 are"
            )
        return ModelConfig(
            architecture=architecture,
            vocab_size=len(value_of(metadata, "tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=int(value("feed_forward_length")),
            num_layers=int(value("block_count")),
            num_heads=heads,
            num_kv_heads=int(value("attention.head_count_kv", heads)),
            head_dim=int(value("attention.key_length", hidden // heads)),
            rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
            rope_theta=float(value("rope.freq_base", 10000.0)),
            context_length=int(value("context_length")),
            family=family,
            rope_scaling=RopeScaling("linear", float(value("rope.scaling.factor")))
            if scaling == "linear"
            else None,
            tied_embeddings="output.weight" not in tensor_names,
            qkv_bias="blk.0.attn_q.bias" in tensor_names,
            o_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            # llama.cpp's converter writes a window for Mistral v0.1 alone
            sliding_window=metadata.get(f"{architecture}.attention.sliding_window") or None,
        )
    except (TypeError, ValueError) as error:
        raise BadModel(f"the GGUF metadata is not as expected: {error}") from error


def value_of(metadata: Mapping[str, Any], key: str) -> Any:
    """Raises BadModel if the key is missing."""
    if key not in metadata:
        raise BadModel(f"the GGUF metadata has no {key}")
    return metadata[key]
