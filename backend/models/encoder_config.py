"""EncoderConfig: what makes one text encoder differ from another, as flags.

An encoder reads a whole text at once and gives a state for each token; pooling makes one vector of
them. BERT and its kin see both ways; the embedding models made of decoders (Qwen3-Embedding) see
backwards only, those made of Gemma 3 both ways again.

Read from a config.json (Hugging Face) or from GGUF metadata. What is missing in a file gets the
default that transformers or llama.cpp has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..protocol import ModelFile
from .config import BadModel, UnsupportedModel

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder. Lengths in tokens or elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: str  # "layer", "rms"; "rms_plus_one": the weight is stored less one
    norm_eps: float
    placement: str  # of the norms: "post", "pre", "sandwich"
    activation: str  # one of ACTIVATIONS
    is_gated: bool  # the activation of one half multiplies the other
    context_length: int
    is_causal: bool = False
    first_position: int | None = None  # learned positions begin at this row; None: rotary ones
    rope_thetas: tuple[float, ...] = ()  # of each layer
    reaches: tuple[int | None, ...] = ()  # how far a token sees to each side, by layer
    has_qk_norm: bool = False
    embedding_scale: float = 1.0
    score_scale: float = 0.0

    def reach(self, layer: int) -> int | None:
        """None: the whole text."""
        return self.reaches[layer] if self.reaches else None


def is_encoder(
    config: Mapping[str, Any], metadata: Mapping[str, Any], files: Sequence[ModelFile]
) -> bool:
    """Whether these files are a model that makes vectors, not text."""
    if metadata:
        architecture = str(metadata.get("general.architecture", ""))
        is_pooled = f"{architecture}.pooling_type" in metadata
        return is_pooled or architecture in _GGUF_ENCODERS_ONLY
    if str(config.get("model_type", "")) in _ENCODERS_ONLY:
        return True
    return any(PurePosixPath(file.name).name == "modules.json" for file in files)


def encoder_config(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> EncoderConfig:
    """From config.json, or from GGUF metadata if there is some.

    Raises UnsupportedModel with the supported architectures, or BadModel for a missing key.
    """
    if metadata:
        architecture, where = str(metadata.get("general.architecture", "")), "the GGUF metadata"
        readers: Mapping[str, Callable[..., EncoderConfig]] = _GGUF
        values: Any = _Metadata(metadata, architecture)
    else:
        architecture, where = str(config.get("model_type", "")), "config.json"
        readers, values = _HF, config
    if architecture not in readers:
        raise UnsupportedModel(
            f"embeddings of architecture {architecture or '(none given)'} are not supported; "
            f"supported are {', '.join(sorted(readers))}"
        )
    try:
        return readers[architecture](architecture, values)
    except KeyError as error:
        raise BadModel(f"{where} has no {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadModel(f"{where} is not as expected: {error}") from error


# ------------------------------------------------------------------------------ config.json


def _activation(name: str) -> str:
    """The one of ACTIVATIONS that transformers means by this name."""
    known = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swiglu": "silu"}
    found = known.get(name, name)
    if found not in ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {name} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return found


def _hf_bert(architecture: str, raw: Mapping[str, Any]) -> EncoderConfig:
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel("of BERT only models with absolute positions are supported")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    # RoBERTa and its kin count positions from behind the padding's id.
    first = 0 if architecture == "bert" else int(raw.get("pad_token_id", 1)) + 1
    return EncoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm="layer",
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        placement="post",
        activation=_activation(str(raw.get("hidden_act", "gelu"))),
        is_gated=False,
        context_length=int(raw.get("max_position_embeddings", 512)) - first,
        first_position=first,
        score_scale=(hidden // heads) ** -0.5,
    )


def _hf_nomic(architecture: str, raw: Mapping[str, Any]) -> EncoderConfig:
    """As transformers spells it, or with the keys of the model's own code (those of GPT-2)."""
    heads = int(raw["num_attention_heads"] if "num_attention_heads" in raw else raw["n_head"])
    hidden = int(raw["hidden_size"] if "hidden_size" in raw else raw["n_embd"])
    layers = int(raw["num_hidden_layers"] if "num_hidden_layers" in raw else raw["n_layer"])
    inner = int(raw["intermediate_size"] if "intermediate_size" in raw else raw["n_inner"])
    if float(raw.get("rotary_emb_fraction", 1.0)) != 1.0 or raw.get("num_experts"):
        raise UnsupportedModel("of nomic_bert only dense models with whole rotary heads are")
    rope = raw.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta") or raw.get("rotary_emb_base") or 1000.0)
    eps = raw.get("layer_norm_eps") or raw.get("layer_norm_epsilon") or 1e-12
    return EncoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm="layer",
        norm_eps=float(eps),
        placement="post",
        activation=_activation(
            str(raw.get("hidden_act") or raw.get("activation_function") or "silu")
        ),
        is_gated=True,
        context_length=int(raw.get("n_positions") or raw.get("max_position_embeddings") or 2048),
        rope_thetas=(theta,) * layers,
        score_scale=(hidden // heads) ** -0.5,
    )


def _hf_modernbert(architecture: str, raw: Mapping[str, Any]) -> EncoderConfig:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    layers = int(raw["num_hidden_layers"])
    every = int(raw.get("global_attn_every_n_layers", 3))
    kinds = raw.get("layer_types") or [
        "sliding_attention" if index % every else "full_attention" for index in range(layers)
    ]
    is_local = [kind == "sliding_attention" for kind in kinds]
    rope = raw.get("rope_parameters") or {}
    far = (rope.get("full_attention") or {}).get("rope_theta") or raw.get("global_rope_theta")
    near = (rope.get("sliding_attention") or {}).get("rope_theta") or raw.get("local_rope_theta")
    thetas = (float(near or 10_000.0), float(far or 160_000.0))
    reach = int(raw.get("local_attention", 128)) // 2
    return EncoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm="layer",
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        placement="pre",
        activation=_activation(str(raw.get("hidden_activation", "gelu"))),
        is_gated=True,
        context_length=int(raw.get("max_position_embeddings", 8192)),
        rope_thetas=tuple(thetas[0] if local else thetas[1] for local in is_local),
        reaches=tuple(reach if local else None for local in is_local),
        score_scale=(hidden // heads) ** -0.5,
    )


def _hf_decoder(architecture: str, raw: Mapping[str, Any]) -> EncoderConfig:
    """Llama, Mistral, Qwen2 and Qwen3: pre-norm, grouped heads, rotary, gated."""
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    layers, head_dim = int(raw["num_hidden_layers"]), int(raw.get("head_dim") or hidden // heads)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise UnsupportedModel(f"RoPE scaling {kind} is not supported for embeddings; default is")
    if raw.get("use_sliding_window"):
        raise UnsupportedModel(f"a sliding window in {architecture} is not supported here")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        norm="rms",
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        placement="pre",
        activation=_activation(str(raw.get("hidden_act", "silu"))),
        is_gated=True,
        context_length=int(raw.get("max_position_embeddings", 2048)),
        is_causal=raw.get("is_causal", True) is not False,
        rope_thetas=(theta,) * layers,
        has_qk_norm=architecture == "qwen3",
        score_scale=head_dim**-0.5,
    )


def _hf_gemma3(architecture: str, raw: Mapping[str, Any]) -> EncoderConfig:
    """EmbeddingGemma: Gemma 3 that sees both ways."""
    if not raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("of Gemma 3 only models with use_bidirectional_attention embed")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    layers, head_dim = int(raw["num_hidden_layers"]), int(raw.get("head_dim", 256))
    every = int(raw.get("_sliding_window_pattern") or raw.get("sliding_window_pattern") or 6)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)
    ]
    rope = raw.get("rope_parameters") or {}
    far = (rope.get("full_attention") or {}).get("rope_theta") or raw.get("rope_theta")
    near = (rope.get("sliding_attention") or {}).get("rope_theta") or raw.get(
        "rope_local_base_freq"
    )
    return _gemma3(
        architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden=hidden,
        inner=int(raw["intermediate_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        is_local=[kind == "sliding_attention" for kind in kinds],
        thetas=(float(near or 10_000.0), float(far or 1_000_000.0)),
        window=int(raw.get("sliding_window", 512)),
        norm="rms_plus_one",
        score_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
    )


def _gemma3(
    architecture: str,
    *,
    vocab_size: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    context_length: int,
    is_local: Sequence[bool],
    thetas: tuple[float, float],
    window: int,
    norm: str,
    score_scale: float,
) -> EncoderConfig:
    return EncoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=len(is_local),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm=norm,
        norm_eps=eps,
        placement="sandwich",
        activation="gelu_tanh",
        is_gated=True,
        context_length=context_length,
        rope_thetas=tuple(thetas[0] if local else thetas[1] for local in is_local),
        reaches=tuple(window // 2 if local else None for local in is_local),
        has_qk_norm=True,
        embedding_scale=hidden**0.5,
        score_scale=score_scale,
    )


_HF: dict[str, Callable[[str, Mapping[str, Any]], EncoderConfig]] = {
    "bert": _hf_bert,
    "roberta": _hf_bert,
    "xlm-roberta": _hf_bert,
    "camembert": _hf_bert,
    "nomic_bert": _hf_nomic,
    "modernbert": _hf_modernbert,
    "llama": _hf_decoder,
    "mistral": _hf_decoder,
    "qwen2": _hf_decoder,
    "qwen3": _hf_decoder,
    "gemma3_text": _hf_gemma3,
}
_ENCODERS_ONLY = ("bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "modernbert")


# ------------------------------------------------------------------------------------- GGUF


class _Metadata:
    """Keys of one architecture; a missing one without a default is a KeyError."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self._raw = raw
        self._prefix = architecture + "."

    def __call__(self, key: str, default: Any = None) -> Any:
        found = self._raw.get(self._prefix + key, default)
        if found is None:
            raise KeyError(self._prefix + key)
        return found

    def vocab_size(self) -> int:
        return len(self._raw["tokenizer.ggml.tokens"])


def _gguf_bert(architecture: str, meta: _Metadata) -> EncoderConfig:
    heads, hidden = int(meta("attention.head_count")), int(meta("embedding_length"))
    is_nomic, layers = architecture == "nomic-bert", int(meta("block_count"))
    return EncoderConfig(
        architecture=architecture,
        vocab_size=meta.vocab_size(),
        hidden_size=hidden,
        intermediate_size=int(meta("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm="layer",
        norm_eps=float(meta("attention.layer_norm_epsilon")),
        placement="post",
        activation="silu" if is_nomic else "gelu",
        is_gated=is_nomic,
        context_length=int(meta("context_length")),
        first_position=None if is_nomic else 0,  # the converter drops the rows before the first
        rope_thetas=(float(meta("rope.freq_base", 1000.0)),) * layers if is_nomic else (),
        score_scale=(hidden // heads) ** -0.5,
    )


def _gguf_modernbert(architecture: str, meta: _Metadata) -> EncoderConfig:
    heads, hidden = int(meta("attention.head_count")), int(meta("embedding_length"))
    layers, window = int(meta("block_count")), int(meta("attention.sliding_window", 0))
    is_local = _local_layers(meta("attention.sliding_window_pattern", 3), layers, is_first_far=True)
    thetas = (float(meta("rope.freq_base_swa", 10_000.0)), float(meta("rope.freq_base", 160_000.0)))
    return EncoderConfig(
        architecture=architecture,
        vocab_size=meta.vocab_size(),
        hidden_size=hidden,
        intermediate_size=int(meta("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm="layer",
        norm_eps=float(meta("attention.layer_norm_epsilon")),
        placement="pre",
        activation=_activation(str(meta("hidden_activation", "gelu"))),
        is_gated=True,
        context_length=int(meta("context_length")),
        rope_thetas=tuple(thetas[0] if local else thetas[1] for local in is_local),
        reaches=tuple(window // 2 if local and window else None for local in is_local),
        score_scale=(hidden // heads) ** -0.5,
    )


def _local_layers(pattern: Any, layers: int, *, is_first_far: bool) -> list[bool]:
    """A list says it for each layer; a number, that one of so many sees the whole text."""
    if isinstance(pattern, list):
        return [bool(local) for local in pattern]
    first = 0 if is_first_far else 1
    return [bool((index + first) % int(pattern)) for index in range(layers)]


def _gguf_decoder(architecture: str, meta: _Metadata) -> EncoderConfig:
    heads, hidden = int(meta("attention.head_count")), int(meta("embedding_length"))
    head_dim, layers = int(meta("attention.key_length", hidden // heads)), int(meta("block_count"))
    if str(meta("rope.scaling.type", "none")) != "none":
        raise UnsupportedModel("RoPE scaling is not supported for embeddings")
    return EncoderConfig(
        architecture=architecture,
        vocab_size=meta.vocab_size(),
        hidden_size=hidden,
        intermediate_size=int(meta("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(meta("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm="rms",
        norm_eps=float(meta("attention.layer_norm_rms_epsilon")),
        placement="pre",
        activation="silu",
        is_gated=True,
        context_length=int(meta("context_length")),
        is_causal=bool(meta("attention.causal", True)),
        rope_thetas=(float(meta("rope.freq_base", 10_000.0)),) * layers,
        has_qk_norm=architecture == "qwen3",
        score_scale=head_dim**-0.5,
    )


def _gguf_gemma(architecture: str, meta: _Metadata) -> EncoderConfig:
    heads, hidden = int(meta("attention.head_count")), int(meta("embedding_length"))
    head_dim, layers = int(meta("attention.key_length", hidden // heads)), int(meta("block_count"))
    pattern = meta("attention.sliding_window_pattern", 6)
    thetas = (
        float(meta("rope.freq_base_swa", 10_000.0)),
        float(meta("rope.freq_base", 1_000_000.0)),
    )
    return _gemma3(
        architecture,
        vocab_size=meta.vocab_size(),
        hidden=hidden,
        inner=int(meta("feed_forward_length")),
        heads=heads,
        kv_heads=int(meta("attention.head_count_kv", heads)),
        head_dim=head_dim,
        eps=float(meta("attention.layer_norm_rms_epsilon")),
        context_length=int(meta("context_length")),
        is_local=_local_layers(pattern, layers, is_first_far=False),
        thetas=thetas,
        window=int(meta("attention.sliding_window", 512)),
        norm="rms",  # the converter adds the one
        score_scale=head_dim**-0.5,
    )


_GGUF: dict[str, Callable[[str, Any], EncoderConfig]] = {
    "bert": _gguf_bert,
    "nomic-bert": _gguf_bert,
    "modern-bert": _gguf_modernbert,
    "gemma-embedding": _gguf_gemma,
    "qwen2": _gguf_decoder,
    "qwen3": _gguf_decoder,
}
_GGUF_ENCODERS_ONLY = ("bert", "nomic-bert", "modern-bert", "gemma-embedding")
