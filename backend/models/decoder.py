"""The flag-driven decoder: pre-norm RMSNorm, grouped-query attention, SwiGLU, RoPE.

One step runs all chunks of a batch as one flat row of tokens. What ties them to sequences is in
`StepInputs` alone; layers see rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.cpu_attention import Span, paged_attention
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary, rotate
from .checkpoint import Checkpoint
from .config import BadModel, ModelConfig


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One batch as tensors. num_tokens counts the rows of all chunks."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    block_ids: Tensor  # [num_tokens] int64: where each token's key and value go
    offsets: Tensor  # [num_tokens] int64: the slot inside the block
    spans: tuple[Span, ...]
    logit_rows: Tensor  # [num_logits] int64: the rows whose logits are wanted


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the paged cache, [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Tensor
    values: Tensor


class _Layer:
    """One block of the network."""

    def __init__(self, checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> None:
        config = checkpoint.config
        self._config = config
        load = _Loader(checkpoint, f"model.layers.{index}.", dtype)
        self._attention_norm = load.norm("input_layernorm")
        self._mlp_norm = load.norm("post_attention_layernorm")
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._qkv = load.fused(names, config.qkv_bias)
        self._output = load.fused(("self_attn.o_proj",), config.o_bias)
        self._gate_up = load.fused(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias)
        self._down = load.fused(("mlp.down_proj",), config.mlp_bias)
        self._query_norm = load.norm("self_attn.q_norm") if config.family.qk_norm else None
        self._key_norm = load.norm("self_attn.k_norm") if config.family.qk_norm else None
        self.size_bytes = load.size_bytes
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        _expect(self._qkv, q + 2 * kv, config.hidden_size, f"layer {index} attention")
        _expect(self._gate_up, 2 * config.intermediate_size, config.hidden_size, f"layer {index}")
        self._split = [q, kv, kv]

    def __call__(
        self, hidden: Tensor, inputs: StepInputs, cache: LayerCache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        hidden = hidden + self._attend(self._attention_norm(hidden), inputs, cache, cos, sin)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(functional.silu(gate) * up)

    def _attend(
        self, x: Tensor, inputs: StepInputs, cache: LayerCache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self._config
        query, key, value = torch.split(self._qkv(x), self._split, dim=-1)
        query = query.reshape(len(x), config.num_heads, config.head_dim)
        key = key.reshape(len(x), config.num_kv_heads, config.head_dim)
        value = value.reshape(len(x), config.num_kv_heads, config.head_dim)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        # All keys of the batch are written before any is read: chunks of one batch may share.
        cache.keys[inputs.block_ids, :, inputs.offsets] = key
        cache.values[inputs.block_ids, :, inputs.offsets] = value
        mixed = paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.spans,
            config.head_dim**-0.5,
            config.sliding_window,
        )
        return self._output(mixed.reshape(len(x), -1))


class Decoder:
    """A loaded network.

    `progress` gets the share of the layers that are loaded. Raises BadModel if a tensor is missing
    or of another shape than the configuration says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = dtype
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", dtype)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_Layer(checkpoint, index, dtype))
            progress((index + 1) / (config.num_layers + 1))
        load = _Loader(checkpoint, "", dtype)
        self._norm = load.norm("model.norm")
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self._head = Linear(checkpoint.tensor(head, dtype))
        _expect(self._head, config.vocab_size, config.hidden_size, "the head")
        self._rotary = Rotary(frequencies_of(checkpoint), config.context_length)
        embedding_bytes = self._embedding.numel() * self._embedding.element_size()
        self.weights_bytes = (
            sum(layer.size_bytes for layer in self._layers)
            + load.size_bytes
            + self._head.size_bytes
            + embedding_bytes
        )
        self.linear_layout = self._head.layout

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32."""
        cos, sin = self._rotary.angles(inputs.positions)
        hidden = self._embedding[inputs.token_ids]
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden = layer(hidden, inputs, cache, cos, sin)
        return self._head(self._norm(hidden[inputs.logit_rows])).float()


class _Loader:
    """Takes a layer's tensors out of the checkpoint and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._dtype = dtype
        self.size_bytes = 0

    def norm(self, name: str) -> RMSNorm:
        weight = self._checkpoint.tensor(f"{self._prefix}{name}.weight", self._dtype)
        norm = RMSNorm(weight, self._checkpoint.config.rms_norm_eps)
        self.size_bytes += norm.size_bytes
        return norm

    def fused(self, names: tuple[str, ...], has_bias: bool) -> Linear:
        """Several matrices that read the same rows, as one."""
        linear = Linear(self._joined(names, "weight"), self._bias(names) if has_bias else None)
        self.size_bytes += linear.size_bytes
        return linear

    def _bias(self, names: tuple[str, ...]) -> Tensor | None:
        has = self._checkpoint.has(f"{self._prefix}{names[0]}.bias")
        return self._joined(names, "bias") if has else None

    def _joined(self, names: tuple[str, ...], kind: str) -> Tensor:
        parts = [
            self._checkpoint.tensor(f"{self._prefix}{name}.{kind}", self._dtype) for name in names
        ]
        try:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        except RuntimeError as error:
            raise BadModel(f"{self._prefix}{'/'.join(names)}: shapes do not fit") from error


def _expect(linear: Linear, out_features: int, in_features: int, what: str) -> None:
    found = (linear.out_features, linear.in_features)
    if found != (out_features, in_features):
        raise BadModel(f"{what} has shape {found}, {(out_features, in_features)} expected")


def frequencies_of(checkpoint: Checkpoint) -> list[float]:
    """The model's rotary frequencies, a checkpoint's own factors applied."""
    frequencies = checkpoint.config.inverse_frequencies()
    factors = checkpoint.rope_factors()
    if factors is None:
        return frequencies
    if len(factors) != len(frequencies):
        raise BadModel(f"{len(factors)} RoPE factors for {len(frequencies)} frequencies")
    return [value / factor for value, factor in zip(frequencies, factors, strict=True)]


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
