"""Where the tensors of an encoder lie, by family and container.

Each part has one or more spellings; the first that is in the files counts. A spelling is a tuple of
stems that are joined along the outputs: three of them for queries, keys and values, or one that is
all three already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Spellings = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Stems, without ".weight" and ".bias". `layer` holds {} for the layer's number."""

    layer: str
    top: Mapping[str, str]  # tokens, positions, types, embedding_norm, last_norm
    parts: Mapping[str, Spellings]  # of a layer
    prefixes: tuple[str, ...] = ("",)  # before everything; the one that is there counts


def _one(*stems: str) -> Spellings:
    return tuple((stem,) for stem in stems)


_BERT = EncoderNames(
    layer="encoder.layer.{}.",
    top={
        "tokens": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
    },
    parts={
        "qkv": (("attention.self.query", "attention.self.key", "attention.self.value"),),
        "output": _one("attention.output.dense"),
        "attention_norm": _one("attention.output.LayerNorm"),
        "up": _one("intermediate.dense"),
        "down": _one("output.dense"),
        "mlp_norm": _one("output.LayerNorm"),
    },
    prefixes=("", "bert.", "roberta.", "model."),
)

# As transformers saves it.
_NOMIC_NEW = EncoderNames(
    layer="layers.{}.",
    top={
        "tokens": "embeddings.word_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
    },
    parts={
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
        "output": _one("self_attn.o_proj"),
        "attention_norm": _one("post_attention_layernorm"),
        "up": (("mlp.gate_proj", "mlp.up_proj"),),
        "down": _one("mlp.down_proj"),
        "mlp_norm": _one("post_mlp_layernorm"),
    },
    prefixes=("", "nomic_bert."),
)

# As the models of the hub have it.
_NOMIC = EncoderNames(
    layer="encoder.layers.{}.",
    top={
        "tokens": "embeddings.word_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embedding_norm": "emb_ln",
    },
    parts={
        "qkv": _one("attn.Wqkv"),
        "output": _one("attn.out_proj"),
        "attention_norm": _one("norm1"),
        "up": (("mlp.fc12", "mlp.fc11"),),
        "down": _one("mlp.fc2"),
        "mlp_norm": _one("norm2"),
    },
    prefixes=("", "bert."),
)

_MODERN = EncoderNames(
    layer="layers.{}.",
    top={
        "tokens": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "last_norm": "final_norm",
    },
    parts={
        "qkv": _one("attn.Wqkv"),
        "output": _one("attn.Wo"),
        "attention_norm": _one("attn_norm"),
        "up": _one("mlp.Wi"),
        "down": _one("mlp.Wo"),
        "mlp_norm": _one("mlp_norm"),
    },
    prefixes=("", "model."),
)

_DECODER = EncoderNames(
    layer="layers.{}.",
    top={"tokens": "embed_tokens", "last_norm": "norm"},
    parts={
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
        "output": _one("self_attn.o_proj"),
        "query_norm": _one("self_attn.q_norm"),
        "key_norm": _one("self_attn.k_norm"),
        "attention_norm": _one("input_layernorm"),
        "up": (("mlp.gate_proj", "mlp.up_proj"),),
        "down": _one("mlp.down_proj"),
        "mlp_norm": _one("post_attention_layernorm"),
    },
    prefixes=("", "model."),
)

_GEMMA = EncoderNames(
    layer=_DECODER.layer,
    top=_DECODER.top,
    parts={
        **_DECODER.parts,
        "attention_out_norm": _one("post_attention_layernorm"),
        "mlp_norm": _one("pre_feedforward_layernorm"),
        "mlp_out_norm": _one("post_feedforward_layernorm"),
    },
    prefixes=_DECODER.prefixes,
)

_GGUF_PARTS: dict[str, Spellings] = {
    "qkv": (("attn_q", "attn_k", "attn_v"), ("attn_qkv",)),
    "output": _one("attn_output"),
    "query_norm": _one("attn_q_norm"),
    "key_norm": _one("attn_k_norm"),
    "up": (("ffn_gate", "ffn_up"), ("ffn_up",)),
    "down": _one("ffn_down"),
}
_GGUF_TOP = {
    "tokens": "token_embd",
    "positions": "position_embd",
    "types": "token_types",
    "embedding_norm": "token_embd_norm",
    "last_norm": "output_norm",
}
_GGUF_POST = EncoderNames(
    layer="blk.{}.",
    top=_GGUF_TOP,
    parts={
        **_GGUF_PARTS,
        "attention_norm": _one("attn_output_norm"),
        "mlp_norm": _one("layer_output_norm"),
    },
)
_GGUF_PRE = EncoderNames(
    layer="blk.{}.",
    top=_GGUF_TOP,
    parts={
        **_GGUF_PARTS,
        "attention_norm": _one("attn_norm"),
        "attention_out_norm": _one("post_attention_norm"),
        "mlp_norm": _one("ffn_norm"),
        "mlp_out_norm": _one("post_ffw_norm"),
    },
)

_HF: dict[str, tuple[EncoderNames, ...]] = {
    "nomic_bert": (_NOMIC, _NOMIC_NEW),
    "modernbert": (_MODERN,),
    "gemma3_text": (_GEMMA,),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (_BERT,)),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (_DECODER,)),
}


def names_of(architecture: str, placement: str, is_gguf: bool) -> tuple[EncoderNames, ...]:
    """The ways in which such a model may be spelt, the likeliest first."""
    if is_gguf:
        return (_GGUF_POST if placement == "post" else _GGUF_PRE,)
    return _HF[architecture]
