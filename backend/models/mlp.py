"""The second half of a layer: a gated MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..layers.activation import ACTIVATIONS, clamped_swiglu
from ..layers.linear import Linear
from ..layers.moe import mix, route
from .config import Experts
from .loader import Loader

Rows = Callable[[Tensor], Tensor]


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, load: Loader, prefix: str, size: int, has_bias: bool = False) -> None:
        hidden = load.config.hidden_size
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self._gate_up = load.linear(names, 2 * size, hidden, has_bias)
        self._down = load.linear((f"{prefix}.down_proj",), hidden, size, has_bias)
        self._activation = ACTIVATIONS[load.config.activation]
        experts = load.config.experts
        self._clamp = experts.clamp if experts is not None else 0.0

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        if self._clamp:
            return self._down(clamped_swiglu(gate, up, self._clamp))
        return self._down(self._activation(gate) * up)


class MixtureOfExperts:
    """Every row asks a few of many MLPs, and perhaps one that all share."""

    def __init__(self, load: Loader, experts: Experts) -> None:
        hidden = load.config.hidden_size
        self._config = experts
        router = ("mlp.router",)
        self._router = load.linear(router, experts.num_experts, hidden, experts.router_bias)
        self._choice_bias = None
        if load.has("mlp.choice_bias"):
            self._choice_bias = load.tensor("mlp.choice_bias", experts.num_experts)
        self._experts = [
            GatedMLP(load, f"mlp.experts.{index}", experts.intermediate_size, experts.expert_bias)
            for index in range(experts.num_experts)
        ]
        self._shared: GatedMLP | None = None
        self._shared_gate: Tensor | None = None
        if experts.shared_size:
            self._shared = GatedMLP(load, "mlp.shared", experts.shared_size)
        if experts.shared_gate:
            self._shared_gate = load.tensor("mlp.shared_gate.weight").reshape(1, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        config = self._config
        weights, ids = route(
            self._router(x),
            config.num_active,
            config.router,
            config.renormalise,
            config.scale,
            self._choice_bias,
        )
        mixed = mix(x, weights, ids, self._experts)
        if self._shared is None:
            return mixed
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = torch.sigmoid(Linear(self._shared_gate)(x)) * shared
        return mixed + shared
