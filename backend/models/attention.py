"""The attention of a layer: grouped queries over the paged cache, with a family's variations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.cpu_attention import paged_attention
from ..layers.norm import Norm, RMSNorm
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
        self._split = [q, kv, kv]
        names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        if layer.shares_kv_of is not None:
            self._split, names = [q], names[:1]
        elif layer.keys_are_values:
            self._split, names = [q, kv], names[:2]
        self._qkv = load.linear(names, sum(self._split), config.hidden_size, config.qkv_bias)
        output = ("self_attn.o_proj",)
        self._output = load.linear(output, config.hidden_size, q, config.o_bias)
        self._gate = None
        if config.attention_gate:
            self._gate = load.linear(("self_attn.gate_proj",), q, config.hidden_size)
        self._query_norm: Norm | None = None
        self._key_norm: Norm | None = None
        self._norm_is_full = config.qk_norm_full
        if config.family.qk_norm or config.qk_norm_full:
            wide = config.qk_norm_full
            self._query_norm = load.norm("self_attn.q_norm", q if wide else layer.head_dim)
            if layer.shares_kv_of is None:
                self._key_norm = load.norm("self_attn.k_norm", kv if wide else layer.head_dim)
        self._value_norm = RMSNorm(None, config.rms_norm_eps) if config.gemma4 else None
        self._sinks = load.tensor("self_attn.sinks", config.num_heads) if config.sinks else None
        self._rotary = None if layer.rope is None else _rotary(load, layer)

    def __call__(self, x: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        parts = torch.split(self._qkv(x), self._split, dim=-1)
        angles = None if self._rotary is None else inputs.angles(self._rotary)
        query = self._prepared(parts[0], self._query_norm, self._num_heads, angles)
        query = self._grown(query, inputs)
        if len(parts) > 1:
            # All keys of the batch are written before any is read: chunks of one batch may share.
            num_kv_heads = self._layer.num_kv_heads
            key = self._prepared(parts[1], self._key_norm, num_kv_heads, angles)
            value = self._prepared(parts[-1], self._value_norm, num_kv_heads, None)
            cache.keys[inputs.block_ids, :, inputs.offsets] = key
            cache.values[inputs.block_ids, :, inputs.offsets] = value
        mixed = paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.spans,
            self._scale,
            self._layer.window,
            self._softcap,
            self._sinks,
        )
        mixed = mixed.reshape(len(x), -1)
        if self._gate is not None:
            mixed = mixed * self._gate(x).sigmoid()
        return self._output(mixed)

    def _prepared(
        self, x: Tensor, norm: Norm | None, num_heads: int, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Normed and rotated, [num_tokens, num_heads, head_dim]."""
        if norm is not None and self._norm_is_full:
            x = norm(x)
        heads = x.reshape(len(x), num_heads, self._layer.head_dim)
        if norm is not None and not self._norm_is_full:
            heads = norm(heads)
        if self._rotary is None or angles is None:
            return heads
        return self._rotary.rotate(heads, *angles)

    def _grown(self, query: Tensor, inputs: StepInputs) -> Tensor:
        """Llama 4's scaling: far positions would spread their attention too thin."""
        rope = self._layer.rope
        if rope is None or not rope.query_scaling_beta or rope.scaling is None:
            return query
        turns = torch.floor(inputs.positions / rope.scaling.original_context_length)
        growth = 1 + rope.query_scaling_beta * torch.log1p(turns)
        return query * growth.view(-1, 1, 1).to(query.dtype)


def _rotary(load: Loader, layer: LayerConfig) -> Rotary:
    assert layer.rope is not None
    frequencies, magnitude = load.config.rope_of(layer)
    return Rotary(frequencies, load.config.context_length, magnitude, layer.rope.is_interleaved)
