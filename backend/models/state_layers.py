"""Layers that remember a sequence in a state of fixed size instead of keys and values.

A `SequenceState` belongs to a row of the runner: made empty when a sequence starts, gone with it.
It cannot be shared or turned back. So a model with such layers gets no prefix from the cache and no
drafts (`BlockGroups.is_shareable`), and a sequence that was preempted is read from its beginning;
a state that is not at the token where a step begins is an error, never a wrong answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..layers.norm import RMSNorm
from ..layers.recurrent import causal_conv, gated_delta_rule, softplus_decay
from .loader import Loader

if TYPE_CHECKING:
    from .decoder import LayerCache, StepInputs


class SequenceState:
    """What the layers remember of one sequence after `num_tokens` tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    def begin(self, position: int) -> None:
        """A step goes on at this token. Raises RuntimeError if the state is elsewhere."""
        if position != self.num_tokens:
            raise RuntimeError(
                f"the state of a sequence is at token {self.num_tokens}, the step at {position}"
            )


class ShortConv:
    """LFM2's operator: a gated convolution over the last few tokens."""

    def __init__(self, load: Loader, index: int) -> None:
        config = load.config
        assert config.short_conv is not None
        hidden, width = config.hidden_size, config.short_conv.width
        has_bias = config.short_conv.has_bias
        self._index = index
        self._input = load.linear(("conv.in_proj",), 3 * hidden, hidden, has_bias)
        self._output = load.linear(("conv.out_proj",), hidden, hidden, has_bias)
        self._weight = load.tensor("conv.conv.weight").reshape(hidden, width)
        self._bias = load.tensor("conv.conv.bias", hidden) if has_bias else None

    def __call__(self, x: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        gate_in, gate_out, value = self._input(x).chunk(3, dim=-1)
        gated = gate_in * value
        mixed = torch.empty_like(gated)
        for span, state in zip(inputs.spans, inputs.states, strict=True):
            rows = slice(span.start, span.start + span.num_tokens)
            past = state.layers.get(self._index) or (_zeros(self._weight),)
            mixed[rows], after = causal_conv(gated[rows], self._weight, past[0])
            state.layers[self._index] = (after,)
        if self._bias is not None:
            mixed = mixed + self._bias
        return self._output(gate_out * mixed)


class DeltaNet:
    """A gated delta net, as in Qwen3-Next: convolved queries, keys and values, and a memory."""

    def __init__(self, load: Loader, index: int) -> None:
        config = load.config
        assert config.delta_net is not None
        self._shape = shape = config.delta_net
        self._index = index
        hidden = config.hidden_size
        keys = shape.num_key_heads * shape.key_dim
        values = shape.num_value_heads * shape.value_dim
        self._split = [keys, keys, values]
        self._qkv = load.linear(("delta.qkv",), 2 * keys + values, hidden)
        self._gate = load.linear(("delta.z",), values, hidden)
        self._beta = load.linear(("delta.b",), shape.num_value_heads, hidden)
        self._step = load.linear(("delta.a",), shape.num_value_heads, hidden)
        self._conv = load.tensor("delta.conv.weight").reshape(2 * keys + values, shape.conv_width)
        if load.has("delta.rate"):  # a GGUF has it as it is used
            self._rate = load.tensor("delta.rate", shape.num_value_heads).float()
        else:
            self._rate = -load.tensor("delta.log_rate", shape.num_value_heads).float().exp()
        self._step_bias = load.tensor("delta.step_bias", shape.num_value_heads).float()
        weight = load.tensor("delta.out_weight", shape.value_dim)
        self._norm = RMSNorm(weight, config.rms_norm_eps)
        self._output = load.linear(("delta.out",), hidden, values)

    def __call__(self, x: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        shape = self._shape
        qkv = self._qkv(x)
        decay = softplus_decay(self._step(x), self._rate, self._step_bias)
        beta = self._beta(x).sigmoid()
        answers = torch.empty((len(x), shape.num_value_heads, shape.value_dim))
        for span, state in zip(inputs.spans, inputs.states, strict=True):
            rows = slice(span.start, span.start + span.num_tokens)
            past, memory = state.layers.get(self._index) or (_zeros(self._conv), self._empty())
            convolved, past = causal_conv(qkv[rows], self._conv, past)
            mixed = functional.silu(convolved)
            query, key, value = torch.split(mixed, self._split, dim=-1)
            answers[rows], memory = gated_delta_rule(
                self._per_value_head(query),
                self._per_value_head(key),
                value.reshape(len(value), shape.num_value_heads, -1),
                decay[rows],
                beta[rows],
                memory,
            )
            state.layers[self._index] = (past, memory)
        normed = self._norm(answers.to(x.dtype)).flatten(1)
        gated = (normed.float() * functional.silu(self._gate(x).float())).to(x.dtype)
        return self._output(gated)

    def _per_value_head(self, x: Tensor) -> Tensor:
        heads = x.reshape(len(x), self._shape.num_key_heads, -1)
        times = self._shape.num_value_heads // self._shape.num_key_heads
        if self._shape.is_tiled:
            return heads.repeat(1, times, 1)
        return heads.repeat_interleave(times, dim=1)

    def _empty(self) -> Tensor:
        shape = self._shape
        return torch.zeros((shape.num_value_heads, shape.key_dim, shape.value_dim))


def _zeros(weight: Tensor) -> Tensor:
    """The past of a sequence that begins."""
    return torch.zeros((weight.shape[1] - 1, weight.shape[0]), dtype=weight.dtype)
