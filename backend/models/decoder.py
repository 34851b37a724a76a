"""The flag-driven decoder in torch: every family, in any dtype, on the CPU.

One step runs all chunks of a batch as one flat row of tokens. What ties them to sequences is in
`StepInputs` alone; layers see rows. A layer is two branches, attention and MLP, and where their
norms stand is the family's:

    pre       h += branch(norm(h))
    post      h += norm(branch(h))
    sandwich  h += norm'(branch(norm(h)))
    parallel  h += attention(norm(h)) + mlp(norm(h)), one norm for both
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..kernels.cpu_attention import Span
from ..layers.linear import Linear
from ..layers.norm import Norm
from ..layers.rotary import Rotary
from .attention import Attention
from .checkpoint import Checkpoint
from .config import LayerConfig, ModelConfig
from .gemma4_layer import Gemma4Extras, LayerInputs
from .loader import Loader
from .mlp import GatedMLP, MixtureOfExperts, Rows
from .state_layers import DeltaNet, SequenceState, ShortConv


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One batch as tensors. num_tokens counts the rows of all chunks."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    block_ids: Tensor  # [num_tokens] int64: where each token's key and value go
    offsets: Tensor  # [num_tokens] int64: the slot inside the block
    spans: tuple[Span, ...]
    logit_rows: Tensor  # [num_logits] int64: the rows whose logits are wanted
    _angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    # Where the keys and values of the other groups of layers lie; see engine.batch.BlockGroups.
    others: tuple[StepInputs, ...] = ()
    layer_inputs: Tensor | None = None  # Gemma 4's, [num_tokens, num_layers, size]
    states: tuple[SequenceState, ...] = ()  # one for each span; of layers that have one

    def of_group(self, group: int) -> StepInputs:
        """The same rows, over the blocks of one group of layers."""
        return self.others[group - 1] if group else self

    def with_layer_inputs(self, layer_inputs: Tensor) -> StepInputs:
        """The same rows, and what each layer gets of their tokens."""
        others = tuple(replace(other, layer_inputs=layer_inputs) for other in self.others)
        return replace(self, layer_inputs=layer_inputs, others=others)

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin of all rows; layers that rotate alike share them."""
        if rotary.key not in self._angles:
            self._angles[rotary.key] = rotary.angles(self.positions)
        return self._angles[rotary.key]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the paged cache, [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Tensor
    values: Tensor
    group: int = 0


class _Layer:
    """One block of the network."""

    def __init__(self, load: Loader, layer: LayerConfig, index: int) -> None:
        config = load.config
        self._is_parallel = config.norms == "parallel"
        self._residual_scale = config.residual_scale

        def norm(name: str, *placements: str) -> Norm | None:
            if config.norms not in placements:
                return None
            return load.norm(name, config.hidden_size, config.norm_kind)

        self._attention_norm = norm("input_layernorm", "pre", "sandwich", "parallel")
        self._attention_out_norm = norm("attention_out_norm", "post", "sandwich")
        self._mlp_norm = norm("post_attention_layernorm", "pre", "sandwich")
        self._mlp_out_norm = norm("mlp_out_norm", "post", "sandwich")
        self._attention: Attention | DeltaNet | ShortConv
        if layer.kind == "delta":
            self._attention = DeltaNet(load, index)
        elif layer.kind == "conv":
            self._attention = ShortConv(load, index)
        else:
            self._attention = Attention(load, layer)
        self._mlp: Rows
        self._extras: Gemma4Extras | None = None
        if layer.has_experts and config.experts is not None and config.gemma4 is None:
            self._mlp = MixtureOfExperts(load, config.experts)
        else:
            size = config.intermediate_size * (2 if layer.has_wide_mlp else 1)
            self._mlp = mlp = GatedMLP(load, "mlp", size, config.mlp_bias)
            if config.gemma4 is not None:
                self._extras = Gemma4Extras(load, config.gemma4, layer, index, mlp)
        self.size_bytes = load.size_bytes

    def __call__(self, hidden: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        x = _maybe(self._attention_norm, hidden)
        attended = _maybe(self._attention_out_norm, self._attention(x, inputs, cache))
        if self._is_parallel:
            return hidden + attended + self._mlp(x)
        hidden = self._added(hidden, attended)
        x = _maybe(self._mlp_norm, hidden)
        answer = self._mlp(x) if self._extras is None else self._extras.mlp(x, hidden)
        hidden = self._added(hidden, _maybe(self._mlp_out_norm, answer))
        return hidden if self._extras is None else self._extras.finish(hidden, inputs)

    def _added(self, hidden: Tensor, branch: Tensor) -> Tensor:
        if self._residual_scale != 1:
            branch = branch * self._residual_scale
        return hidden + branch


def _maybe(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


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
        self._layers = []
        load = Loader(checkpoint, "", dtype)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = load.tensor("model.embed_tokens.weight", *shape)
        self._layer_inputs: LayerInputs | None = None
        if config.gemma4 is not None and config.gemma4.layer_input_size:
            self._layer_inputs = LayerInputs(load, config.gemma4.layer_input_size)
        for index, layer in enumerate(config.layers):
            prefix = f"model.layers.{index}."
            self._layers.append(_Layer(Loader(checkpoint, prefix, dtype), layer, index))
            progress((index + 1) / (config.num_layers + 1))
        self._norm = load.norm("model.norm", config.hidden_size, config.norm_kind)
        if config.tied_embeddings:
            self._head = Linear(self._embedding)
            load.size_bytes += self._head.size_bytes  # its own copy, in another layout
        else:
            self._head = load.linear(("lm_head",), *shape)
        self.weights_bytes = load.size_bytes + sum(layer.size_bytes for layer in self._layers)
        self.linear_layout = self._head.layout

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32."""
        config = self.config
        if config.has_state:
            for span, state in zip(inputs.spans, inputs.states, strict=True):
                state.begin(span.seq_len - span.num_tokens)
        hidden = self._embedding[inputs.token_ids]
        if config.embedding_scale != 1:
            # rounded as the model's own code rounds it
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=self.dtype)
        if self._layer_inputs is not None:
            inputs = inputs.with_layer_inputs(self._layer_inputs(inputs.token_ids, hidden))
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden = layer(hidden, inputs.of_group(cache.group), cache)
        for span, state in zip(inputs.spans, inputs.states, strict=False):
            state.num_tokens = span.seq_len
        logits = self._head(self._norm(hidden[inputs.logit_rows])).float()
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers that keep their own."""
    sizes = [
        layer.num_kv_heads * layer.head_dim for layer in config.layers if layer.shares_kv_of is None
    ]
    return 2 * sum(sizes) * dtype.itemsize
