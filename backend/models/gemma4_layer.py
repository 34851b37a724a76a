"""What a Gemma 4 layer has besides attention and MLP.

layer inputs   each layer gets a small vector of the token itself, from an embedding of its own
experts        beside the MLP, not in its place; each branch has norms of its own
scale          the layer's result is multiplied with a number
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..layers.activation import gelu_tanh
from ..layers.moe import mix, route
from ..layers.norm import RMSNorm
from .config import Gemma4Shape, LayerConfig
from .loader import Loader
from .mlp import GatedMLP

if TYPE_CHECKING:
    from .decoder import StepInputs


class LayerInputs:
    """The vectors of all layers for the tokens of a step: [num_tokens, num_layers, size]."""

    def __init__(self, load: Loader, size: int) -> None:
        config = load.config
        self._shape = (config.num_layers, size)
        self._embedding = load.tensor("model.embed_tokens_per_layer.weight")
        names = ("model.per_layer_model_projection",)
        self._projection = load.linear(names, config.num_layers * size, config.hidden_size)
        self._norm = load.norm("model.per_layer_projection_norm", size)
        self._projection_scale = config.hidden_size**-0.5
        self._embedding_scale = size**0.5

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        shape = (len(token_ids), *self._shape)
        own = (self._embedding[token_ids] * self._embedding_scale).view(shape)
        projected = (self._projection(hidden) * self._projection_scale).view(shape)
        inputs: Tensor = (self._norm(projected) + own) * 2**-0.5
        return inputs


class LayerInputGate:
    """hidden + norm(projection(gelu(gate(hidden)) · input))"""

    def __init__(self, load: Loader, size: int) -> None:
        hidden = load.config.hidden_size
        self._gate = load.linear(("per_layer_input_gate",), size, hidden)
        self._projection = load.linear(("per_layer_projection",), hidden, size)
        self._norm = load.norm("post_per_layer_input_norm", hidden)

    def __call__(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        return hidden + self._norm(self._projection(gelu_tanh(self._gate(hidden)) * layer_input))


class DenseAndExperts:
    """norm(mlp(x)) + norm(experts(norm(hidden))), where x is the normed hidden state."""

    def __init__(self, load: Loader, mlp: GatedMLP) -> None:
        config, hidden = load.config, load.config.hidden_size
        assert config.experts is not None
        self._mlp, self._config = mlp, config.experts
        count = config.experts.num_experts
        self._dense_norm = load.norm("post_feedforward_layernorm_1", hidden)
        self._experts_in_norm = load.norm("pre_feedforward_layernorm_2", hidden)
        self._experts_norm = load.norm("post_feedforward_layernorm_2", hidden)
        self._router = load.linear(("mlp.router",), count, hidden)
        self._router_norm = RMSNorm(None, config.rms_norm_eps)
        self._router_scale = load.tensor("router.scale", hidden) * hidden**-0.5
        self._expert_scales = load.tensor("router.per_expert_scale", count).float()
        self._experts = [
            GatedMLP(load, f"mlp.experts.{index}", config.experts.intermediate_size)
            for index in range(count)
        ]

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        logits = self._router(self._router_norm(hidden) * self._router_scale)
        weights, ids = route(logits, self._config.num_active)
        weights = weights * self._expert_scales[ids]
        mixed = mix(self._experts_in_norm(hidden), weights, ids, self._experts)
        return self._dense_norm(self._mlp(x)) + self._experts_norm(mixed)


class Gemma4Extras:
    """One layer's."""

    def __init__(
        self, load: Loader, shape: Gemma4Shape, layer: LayerConfig, index: int, mlp: GatedMLP
    ) -> None:
        self._index = index
        self._mlp = mlp
        self._experts = DenseAndExperts(load, mlp) if layer.has_experts else None
        size = shape.layer_input_size
        self._gate = LayerInputGate(load, size) if size else None
        self._scale = load.tensor("layer_scalar", 1) if load.has("layer_scalar") else None

    def mlp(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The second branch: x is the normed hidden state."""
        return self._mlp(x) if self._experts is None else self._experts(x, hidden)

    def finish(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """What comes after both branches."""
        if self._gate is not None and inputs.layer_inputs is not None:
            hidden = self._gate(hidden, inputs.layer_inputs[:, self._index])
        return hidden if self._scale is None else hidden * self._scale
