"""The attention of a layer: grouped queries over the paged cache, with a family's variations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.cpu_attention import paged_attention
from ..layers.rotary import Rotary
from .config import LayerConfig
from .loader import Loader

if TYPE_CHECKING:
    from .decoder import LayerCache, StepInputs


class Attention:
    """Rows in, rows out; keys and values go to the layer's cache on the way."""

    def __init__(self, load: Loader, layer: LayerConfig) -> None:
        config = load.config
        self._layer = layer
        self._num_heads = config.num_heads
        self._scale = config.attention_scale or layer.head_dim**-0.5
        self._softcap = config.attention_softcap
        q, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._qkv = load.linear(names, q + 2 * kv, config.hidden_size, config.qkv_bias)
        output = ("self_attn.o_proj",)
        self._output = load.linear(output, config.hidden_size, q, config.o_bias)
        self._gate = None
        if config.attention_gate:
            self._gate = load.linear(("self_attn.gate_proj",), q, config.hidden_size)
        self._split = [q, kv, kv]
        self._query_norm = self._key_norm = None
        self._norm_is_full = config.qk_norm_full
        if config.family.qk_norm or config.qk_norm_full:
            wide = config.qk_norm_full
            self._query_norm = load.norm("self_attn.q_norm", q if wide else layer.head_dim)
            self._key_norm = load.norm("self_attn.k_norm", kv if wide else layer.head_dim)
        self._sinks = load.tensor("self_attn.sinks", config.num_heads) if config.sinks else None
        self._rotary = None if layer.rope is None else _rotary(load, layer)

    def __call__(self, x: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        num_tokens, layer = len(x), self._layer
        query, key, value = torch.split(self._qkv(x), self._split, dim=-1)
        if self._norm_is_full:
            query, key = self._normed(query, key)
        query = query.reshape(num_tokens, self._num_heads, layer.head_dim)
        key = key.reshape(num_tokens, layer.num_kv_heads, layer.head_dim)
        value = value.reshape(num_tokens, layer.num_kv_heads, layer.head_dim)
        if not self._norm_is_full:
            query, key = self._normed(query, key)
        query, key = self._rotated(query, key, inputs)
        # All keys of the batch are written before any is read: chunks of one batch may share.
        cache.keys[inputs.block_ids, :, inputs.offsets] = key
        cache.values[inputs.block_ids, :, inputs.offsets] = value
        mixed = paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.spans,
            self._scale,
            layer.window,
            self._softcap,
            self._sinks,
        )
        mixed = mixed.reshape(num_tokens, -1)
        if self._gate is not None:
            mixed = mixed * self._gate(x).sigmoid()
        return self._output(mixed)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._query_norm is None or self._key_norm is None:
            return query, key
        return self._query_norm(query), self._key_norm(key)

    def _rotated(self, query: Tensor, key: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        rope = self._layer.rope
        if self._rotary is None or rope is None:
            return query, key
        cos, sin = inputs.angles(self._rotary)
        query, key = self._rotary.rotate(query, cos, sin), self._rotary.rotate(key, cos, sin)
        if rope.query_scaling_beta and rope.scaling is not None:
            # Llama 4's: far positions would spread their attention too thin
            turns = torch.floor(inputs.positions / rope.scaling.original_context_length)
            growth = 1 + rope.query_scaling_beta * torch.log1p(turns)
            query = query * growth.view(-1, 1, 1).to(query.dtype)
        return query, key


def _rotary(load: Loader, layer: LayerConfig) -> Rotary:
    assert layer.rope is not None
    frequencies, magnitude = load.config.rope_of(layer)
    return Rotary(frequencies, load.config.context_length, magnitude, layer.rope.is_interleaved)
