"""ModelConfig: what makes one decoder differ from another, as flags.

One flag-driven decoder serves all families. What a family is, its file in `families/` tells: it
turns a config.json (Hugging Face) or GGUF metadata into a ModelConfig, and names where the tensors
lie. What is missing in a file gets the default that transformers or llama.cpp has for it.

    registry/formats/architectures ──name──▶ families/gemma.py ──▶ ModelConfig ──▶ Decoder
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from ...registry.formats import architectures
from .rope import Rope


class UnsupportedModel(Exception):
    """The model is sound, but of a kind that is not supported. The text names what is."""


class BadModel(Exception):
    """The model's files are damaged or do not fit together. The text says where."""


Picks = tuple[str, "Callable[[ModelConfig], Sequence[int]]"]


@dataclass(frozen=True, slots=True)
class Names:
    """Where a family's tensors lie in one kind of file, as far as that differs from Llama.

    `parts` maps a canonical part of a layer ("self_attn.q_proj") to the part that is stored;
    `fused` a stored part to the canonical ones whose rows it holds, one after another; `picks` a
    canonical part to a stored one and the rows of it that are meant.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    picks: Mapping[str, Picks] = field(default_factory=dict)
    norms_minus_one: bool = False  # a norm multiplies with 1 + w
    experts_transposed: bool = False  # stacks are [experts, inputs, outputs], gate and up alternate


@dataclass(frozen=True, slots=True)
class Family:
    """What all models of a family have in common, and how their files spell it."""

    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head's query and key, before the rotation
    gguf_permutes_qk: bool = False  # llama.cpp stores q and k rows for adjacent-pair RoPE
    hf: Names = Names()
    gguf: Names = Names()


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: which are asked, and how their answers are weighed."""

    num_experts: int
    num_active: int
    intermediate_size: int
    router: str = "softmax"  # "softmax", "sigmoid"; "topk_softmax": of the chosen logits alone
    renormalise: bool = True  # the chosen weights sum to 1
    scale: float = 1.0  # of the chosen weights
    router_bias: bool = False
    expert_bias: bool = False
    shared_size: int = 0  # of an expert that every token asks; 0: there is none
    shared_gate: bool = False  # its answer is multiplied with a sigmoid of the token's own
    clamp: float = 0.0  # gpt-oss: gate and up are clamped, and the activation is its own


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Of layers of the kind "delta"."""

    num_key_heads: int  # and of queries
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_tiled: bool = False  # value head i reads key head i modulo their number, not i divided


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """Of layers of the kind "conv"."""

    width: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Gemma4Shape:
    """Of layers of the kind "gemma4"."""

    layer_input_size: int = 0  # of the vector that each layer gets of each token; 0: none


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. A network may mix them."""

    num_kv_heads: int
    head_dim: int
    rope: Rope | None  # None: positions are not told
    # "delta" and "conv" remember a state and have no keys; "gemma4" is attention and more
    kind: str = "attention"
    window: int | None = None  # tokens that are seen, the own one included
    has_experts: bool = False
    shares_kv_of: int | None = None  # an earlier layer, whose keys and values it reads
    keys_are_values: bool = False  # one projection for both, before their norms
    has_wide_mlp: bool = False  # twice as wide as the others


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
    context_length: int  # that the model was trained for
    family: Family
    layers: tuple[LayerConfig, ...]
    served_length: int = 0  # the longest text that will come; 0 is context_length
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norms: str = "pre"  # "pre", "post", "sandwich" (both), "parallel" (one for both branches)
    norm_kind: str = "rms"  # "layer": LayerNorm without a bias
    qk_norm_full: bool = False  # RMSNorm over all heads at once
    activation: str = "silu"
    attention_gate: bool = False  # each head's answer is multiplied with a sigmoid of its own
    sinks: bool = False  # a learned logit per head in the softmax's denominator
    attention_scale: float = 0.0  # of the scores; 0 is head_dim ** -0.5
    attention_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: Experts | None = None
    delta_net: DeltaNetShape | None = None
    short_conv: ShortConvShape | None = None
    gemma4: Gemma4Shape | None = None

    @property
    def has_state(self) -> bool:
        """Some layers remember a sequence in a state, which cannot be shared or turned back."""
        return any(layer.kind in ("delta", "conv") for layer in self.layers)

    def serving(self, context_length: int) -> ModelConfig:
        """For texts of at most so many tokens; 0 is what the model was trained for."""
        served = min(context_length or self.context_length, self.context_length)
        return replace(self, served_length=served)

    def rope_of(self, layer: LayerConfig) -> tuple[list[float], float]:
        """The layer's rotary frequencies, and what cos and sin are multiplied with."""
        assert layer.rope is not None
        served = self.served_length or self.context_length
        return layer.rope.frequencies(served), layer.rope.magnitude()


class _Reader(Protocol):
    """A module of `families/`."""

    def from_hf(self, raw: Mapping[str, Any]) -> ModelConfig: ...

    def from_gguf(self, metadata: Mapping[str, Any], names: frozenset[str]) -> ModelConfig: ...


def _family(name: str) -> _Reader:
    return cast("_Reader", importlib.import_module(f".families.{name}", __package__))


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """From the object in config.json. Raises UnsupportedModel, or BadModel for a missing key."""
    architecture = str(raw.get("model_type", ""))
    inner = raw.get("text_config")
    if isinstance(inner, Mapping) and architecture not in architectures.SAFETENSORS:
        shared = {"tie_word_embeddings", "quantization_config"} & raw.keys()
        raw = {**{key: raw[key] for key in shared}, **inner}  # a model that also sees
        architecture = str(raw.get("model_type", ""))
    refusal = architectures.unsupported(architecture, architectures.SAFETENSORS)
    if refusal:
        raise UnsupportedModel(refusal)
    try:
        return _family(architectures.SAFETENSORS[architecture]).from_hf(raw)
    except KeyError as error:
        raise BadModel(f"config.json has no {error}") from error
    except (TypeError, ValueError) as error:
        raise BadModel(f"config.json: {error}") from error


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    """From GGUF metadata. Raises UnsupportedModel, or BadModel for a missing key."""
    architecture = str(metadata.get("general.architecture", ""))
    refusal = architectures.unsupported(architecture, architectures.GGUF)
    if refusal:
        raise UnsupportedModel(refusal)
    try:
        return _family(architectures.GGUF[architecture]).from_gguf(metadata, tensor_names)
    except KeyError as error:
        raise BadModel(f"the GGUF metadata has no {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise BadModel(f"the GGUF metadata is not as expected: {error}") from error
