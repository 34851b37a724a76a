"""What the metadata of all GGUF architectures has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import BadModel, Experts, Family, LayerConfig, ModelConfig, UnsupportedModel
from ..rope import Rope, RopeScaling, yarn_attention_factor

TensorNames = frozenset[str]


class Metadata:
    """Keys of one architecture. A missing one without a default raises BadModel."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.architecture = str(raw["general.architecture"])
        self._raw = raw

    def value(self, key: str, default: Any = None) -> Any:
        """`key` without the architecture in front."""
        found = self._raw.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise BadModel(f"the GGUF metadata has no {self.architecture}.{key}")
        return found

    def optional(self, key: str) -> Any:
        """None where it is missing."""
        return self._raw.get(f"{self.architecture}.{key}")

    def vocab_size(self) -> int:
        """The number of tokens that are spelled out."""
        if "tokenizer.ggml.tokens" not in self._raw:
            raise BadModel("the GGUF metadata has no tokenizer.ggml.tokens")
        return len(self._raw["tokenizer.ggml.tokens"])

    def heads(self) -> int:
        """Of queries."""
        return _largest(self.value("attention.head_count"))

    def kv_heads(self) -> int:
        """Of keys; the most that a layer has."""
        return _largest(self.value("attention.head_count_kv", self.heads()))

    def head_dim(self) -> int:
        """Of keys, and values."""
        computed = int(self.value("embedding_length")) // self.heads()
        return int(self.value("attention.key_length", computed))


def _largest(value: Any) -> int:
    return max(int(each) for each in value) if isinstance(value, list | tuple) else int(value)


def base_config(
    meta: Metadata, family: Family, names: TensorNames, layers: Sequence[LayerConfig] = ()
) -> ModelConfig:
    """A ModelConfig with what all architectures spell alike; `layers` empty makes them equal."""
    num_layers = int(meta.value("block_count"))
    if not layers:
        layers = [layer_config(meta, rope_of(meta))] * num_layers
    eps = meta.optional("attention.layer_norm_rms_epsilon")
    return ModelConfig(
        architecture=meta.architecture,
        vocab_size=meta.vocab_size(),
        hidden_size=int(meta.value("embedding_length")),
        intermediate_size=_largest(meta.value("feed_forward_length", 0)),
        num_layers=num_layers,
        num_heads=meta.heads(),
        num_kv_heads=meta.kv_heads(),
        head_dim=meta.head_dim(),
        rms_norm_eps=float(meta.value("attention.layer_norm_epsilon") if eps is None else eps),
        context_length=int(meta.value("context_length")),
        family=family,
        layers=tuple(layers),
        tied_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
    )


def layer_config(meta: Metadata, rope: Rope | None, window: int | None = None) -> LayerConfig:
    """An attention layer of the model's own sizes."""
    return LayerConfig(meta.kv_heads(), meta.head_dim(), rope, window=window)


def window_of(meta: Metadata) -> int | None:
    """The window of the layers that have one."""
    return int(meta.value("attention.sliding_window", 0)) or None


def rope_of(meta: Metadata, *, is_interleaved: bool = False, theta: float = 10000.0) -> Rope:
    """The rotation. Factors that stand in tensors are added by the checkpoint."""
    return Rope(
        theta=float(meta.value("rope.freq_base", theta)),
        dim=int(meta.value("rope.dimension_count", meta.head_dim())),
        scaling=_scaling(meta),
        is_interleaved=is_interleaved,
    )


def _scaling(meta: Metadata) -> RopeScaling | None:
    kind = str(meta.value("rope.scaling.type", "none"))
    if kind in ("none", "longrope"):  # the latter's factors are tensors
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"RoPE scaling {kind} is not supported; none, linear, longrope and yarn are"
        )
    factor = float(meta.value("rope.scaling.factor", 1.0))
    original = int(meta.value("rope.scaling.original_context_length", meta.value("context_length")))
    attention_factor = 1.0
    if kind == "yarn":
        log_multiplier = float(meta.value("rope.scaling.yarn_log_multiplier", 0.0))
        attention_factor = yarn_attention_factor(
            factor, float(bool(log_multiplier)), log_multiplier
        )
        attention_factor *= float(meta.value("rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=float(meta.value("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(meta.value("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=attention_factor,
    )


def experts_of(
    meta: Metadata, *, renormalise: bool = True, has_shared_gate: bool = False
) -> Experts:
    """The mixture of a model that has one."""
    inner = meta.value("expert_feed_forward_length", meta.optional("feed_forward_length"))
    shared = int(meta.value("expert_shared_feed_forward_length", 0))
    return Experts(
        num_experts=int(meta.value("expert_count")),
        num_active=int(meta.value("expert_used_count")),
        intermediate_size=_largest(inner),
        renormalise=renormalise,
        scale=float(meta.value("expert_weights_scale", 1.0)),
        shared_size=shared,
        shared_gate=has_shared_gate,
    )


def windowed_layers(
    meta: Metadata, pattern: int, rope: Rope | None, windowed_rope: Rope | None
) -> list[LayerConfig]:
    """Every `pattern`-th layer sees everything, the others their window."""
    given = meta.value("attention.sliding_window_pattern", pattern)
    window = window_of(meta)
    layers = []
    for index in range(int(meta.value("block_count"))):
        if isinstance(given, list):
            is_windowed = bool(given[index])
        else:
            is_windowed = (index + 1) % int(given) != 0
        if is_windowed:
            layers.append(layer_config(meta, windowed_rope, window))
        else:
            layers.append(layer_config(meta, rope))
    return layers
