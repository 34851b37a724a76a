"""The flag-driven decoder over `kernels.select`: every family's layers, on the devices of a map.

The kernels decide how (Triton or torch, by device), the layer map decides where: the hidden state
moves when the next layer lives elsewhere, and so do the step's inputs, once per device.

A layer is two branches, attention and MLP; where their norms stand is the family's, as in
`models.decoder`. A branch's output is added by the norm that reads the sum, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ..kernels import select
from ..kernels.select import Kernels
from ..layers.activation import ACTIVATIONS, clamped_swiglu
from ..layers.moe import route
from ..models.checkpoint import Checkpoint
from ..models.config import Experts as ExpertsConfig
from ..models.config import LayerConfig, ModelConfig, UnsupportedModel
from .gpu_cache import Cache
from .gpu_inputs import StepTensors
from .gpu_weights import Projection, Weights


class AddedNorm:
    """(hidden, branch) to (norm(hidden + branch), hidden + branch); no weight: no norm."""

    def __init__(self, kernels: Kernels, weight: Tensor | None, eps: float, kind: str) -> None:
        self._kernels = kernels
        self._weight = weight
        self._eps = eps
        self._is_rms = kind == "rms"

    def __call__(self, hidden: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._weight is not None and self._is_rms and branch is not None:
            normed: tuple[Tensor, Tensor] = self._kernels.rms_norm(
                branch, self._weight, self._eps, hidden
            )
            return normed
        if branch is not None:
            hidden = hidden + branch
        return self.alone(hidden), hidden

    def alone(self, x: Tensor) -> Tensor:
        """Of one tensor."""
        if self._weight is None:
            return x
        if self._is_rms:
            normed: Tensor = self._kernels.rms_norm(x, self._weight, self._eps)
            return normed
        wide = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, self._eps)
        return wide.to(x.dtype) * self._weight


class Attention:
    """Rows in, rows out; keys and values go to the layer's cache on the way."""

    def __init__(self, load: Weights, layer: LayerConfig) -> None:
        config = load.config
        self._layer = layer
        self._kernels = load.kernels
        self._eps = config.rms_norm_eps
        self._scale = config.attention_scale or layer.head_dim**-0.5
        self._softcap = config.attention_softcap
        q, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        self._qkv = load.projection(names, q + 2 * kv, config.hidden_size)
        self._output = load.projection(["self_attn.o_proj"], config.hidden_size, q)
        self._split = [config.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        self._norm_is_full = config.qk_norm_full
        self._query_norm = self._key_norm = None
        if config.family.qk_norm or config.qk_norm_full:
            wide = config.qk_norm_full
            self._query_norm = load.tensor("self_attn.q_norm.weight", q if wide else layer.head_dim)
            self._key_norm = load.tensor("self_attn.k_norm.weight", kv if wide else layer.head_dim)
        self._sinks = load.tensor("self_attn.sinks", config.num_heads) if config.sinks else None

    def __call__(
        self, x: Tensor, inputs: StepTensors, cache: Cache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._layer.head_dim)
        query, key, value = torch.split_with_sizes(heads, self._split, dim=1)
        query_norm, key_norm = self._query_norm, self._key_norm
        if self._norm_is_full and query_norm is not None and key_norm is not None:
            query, key = self._fully_normed(query, query_norm), self._fully_normed(key, key_norm)
            query_norm = key_norm = None
        rope = self._layer.rope
        query = self._kernels.rotary_store(
            query,
            key,
            value,
            cos,
            sin,
            cache.keys,
            cache.values,
            inputs.slot_mapping,
            interleaved=rope is not None and rope.is_interleaved,
            q_weight=query_norm,
            k_weight=key_norm,
            eps=self._eps,
        )
        if rope is not None and rope.query_scaling_beta and rope.scaling is not None:
            turns = torch.floor(inputs.positions / rope.scaling.original_context_length)
            growth = 1 + rope.query_scaling_beta * torch.log1p(turns)
            query = query * growth.view(-1, 1, 1).to(query.dtype)
        mixed = self._kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.block_tables,
            inputs.query_start,
            inputs.seq_lens,
            self._scale,
            self._layer.window,
            self._softcap,
            self._sinks,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
        )
        return self._output(mixed.reshape(x.shape[0], -1))

    def _fully_normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.reshape(heads.shape[0], -1)
        normed: Tensor = self._kernels.rms_norm(flat, weight, self._eps)
        return normed.view(heads.shape)


def gating(load: Weights) -> Callable[[Tensor], Tensor]:
    """[T, 2 I] of gates and ups to [T, I]."""
    config = load.config
    if config.experts is not None and config.experts.clamp:
        limit = config.experts.clamp
        return partial(_clamped, limit)
    if config.activation == "silu":
        return load.kernels.silu_mul
    if config.activation == "gelu_tanh":
        return load.kernels.gelu_mul
    return partial(_gated, ACTIVATIONS[config.activation])


def _clamped(limit: float, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return clamped_swiglu(gate, up, limit)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, load: Weights, prefix: str, size: int) -> None:
        hidden = load.config.hidden_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load.projection(names, 2 * size, hidden)
        self._down = load.projection([f"{prefix}.down_proj"], hidden, size)
        self._gating = gating(load)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gating(self._gate_up(x)))


class MixtureOfExperts:
    """Every row asks a few of many MLPs, and perhaps one that all share.

    Pairs of (row, choice) are sorted by expert, once; both products walk them as ragged segments. A
    row's answers are added in the order of its own choices. Nothing here waits for the device.
    """

    def __init__(self, load: Weights, config: ExpertsConfig) -> None:
        hidden, inner = load.config.hidden_size, config.intermediate_size
        self._config = config
        self._router = load.projection(["mlp.router"], config.num_experts, hidden)
        self._choice_bias: Tensor | None = None
        if load.has("mlp.choice_bias"):
            self._choice_bias = load.tensor("mlp.choice_bias", config.num_experts)
        count = config.num_experts
        self._gate_up = load.experts(count, ["gate_proj", "up_proj"], 2 * inner)
        self._down = load.experts(count, ["down_proj"], hidden)
        self._gating = gating(load)
        self._shared: GatedMLP | None = None
        self._shared_gate: Projection | None = None
        if config.shared_size:
            self._shared = GatedMLP(load, "mlp.shared", config.shared_size)
        if config.shared_gate:
            gate = load.tensor("mlp.shared_gate.weight").reshape(1, hidden)
            self._shared_gate = Projection(load.kernels, gate, None)

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
        mixed = self._mixed(x, weights, ids)
        if self._shared is None:
            return mixed
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = torch.sigmoid(self._shared_gate(x)) * shared
        return mixed + shared

    def _mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        num_tokens, num_active = ids.shape
        experts, order = torch.sort(ids.flatten(), stable=True)
        borders = torch.arange(self._config.num_experts + 1, device=x.device)
        starts = torch.searchsorted(experts, borders).to(torch.int32)
        inner = self._gating(self._gate_up(x, (order // num_active).to(torch.int32), starts))
        pairs = torch.arange(num_tokens * num_active, dtype=torch.int32, device=x.device)
        answers = self._down(inner, pairs, starts)
        by_token = torch.empty_like(answers)
        by_token[order] = answers
        weighed = by_token.view(num_tokens, num_active, -1).float() * weights[..., None]
        return weighed.sum(1).to(x.dtype)


class Layer:
    """One block of the network, on one device."""

    def __init__(self, load: Weights, layer: LayerConfig) -> None:
        config = load.config
        self.device = load.device
        self.rotation = rotation_of(config, layer)
        self._is_parallel = config.norms == "parallel"
        self._residual_scale = config.residual_scale

        def norm(name: str, *placements: str) -> AddedNorm:
            weight = None
            if config.norms in placements:
                weight = load.tensor(f"{name}.weight", config.hidden_size)
            return AddedNorm(load.kernels, weight, config.rms_norm_eps, config.norm_kind)

        self._attention_norm = norm("input_layernorm", "pre", "sandwich", "parallel")
        self._attention_out_norm = norm("attention_out_norm", "post", "sandwich")
        self._mlp_norm = norm("post_attention_layernorm", "pre", "sandwich")
        self._mlp_out_norm = norm("mlp_out_norm", "post", "sandwich")
        self._attention = Attention(load, layer)
        self._mlp: Callable[[Tensor], Tensor]
        if layer.has_experts and config.experts is not None:
            self._mlp = MixtureOfExperts(load, config.experts)
        else:
            self._mlp = GatedMLP(load, "mlp", config.intermediate_size)
        self.size_bytes = load.size_bytes

    def __call__(
        self,
        hidden: Tensor,
        branch: Tensor | None,
        inputs: StepTensors,
        cache: Cache,
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """(hidden, branch): their sum is the state, and the next norm adds them."""
        x, hidden = self._attention_norm(hidden, branch)
        attended = self._attention_out_norm.alone(self._attention(x, inputs, cache, *angles))
        if self._is_parallel:
            return hidden, attended + self._mlp(x)
        x, hidden = self._mlp_norm(hidden, self._scaled(attended))
        return hidden, self._scaled(self._mlp_out_norm.alone(self._mlp(x)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self._residual_scale == 1 else branch * self._residual_scale


Rotation = tuple[tuple[float, ...], float]  # frequencies, and what cos and sin are multiplied with


def rotation_of(config: ModelConfig, layer: LayerConfig) -> Rotation:
    """Layers of the same rotation share their angles. No positions: one pair that stands still."""
    if layer.rope is None:
        return (0.0,), 1.0
    frequencies, magnitude = config.rope_of(layer)
    return tuple(frequencies), magnitude


class GpuDecoder:
    """A loaded network. `progress` gets the share of the layers that are loaded.

    `choice` None asks `kernels.select` for each device. `keeps_packed` None keeps quantised weights
    as they are on every device but the CPU.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        *,
        choice: select.Choice | None = None,
        keeps_packed: bool | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        config = checkpoint.config
        reason = why_not_on_devices(config)
        if reason:
            raise UnsupportedModel(f"{reason} run on the CPU alone so far")
        self.config = config
        self.dtype = dtype
        self.devices = tuple(devices)
        chosen = {device: choice or select.choose(device) for device in devices}
        self.choices = {str(device): str(why) for device, why in chosen.items()}
        kernels = {device: select.load(why) for device, why in chosen.items()}
        self.last_kernels = kernels[devices[-1]]
        self.products: list[Projection] = []  # with packed weights, for tuning

        def weights(prefix: str, device: torch.device) -> Weights:
            packs = device.type != "cpu" if keeps_packed is None else keeps_packed
            where = (prefix, dtype, device, kernels[device], packs)
            return Weights(checkpoint, *where, self.products)

        first, last = weights("", devices[0]), weights("", devices[-1])
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = first.embedding("model.embed_tokens", *shape)
        self._layers: list[Layer] = []
        for index, (layer, device) in enumerate(zip(config.layers, devices, strict=True)):
            self._layers.append(Layer(weights(f"model.layers.{index}.", device), layer))
            progress((index + 1) / (len(devices) + 1))
        norm = last.tensor("model.norm.weight", config.hidden_size)
        eps, kind = config.rms_norm_eps, config.norm_kind
        self._norm = AddedNorm(self.last_kernels, norm, eps, kind)
        if config.tied_embeddings:
            table = self._embedding.weight
            self._head = Projection(self.last_kernels, table.to(devices[-1]), None)
        else:
            self._head = last.projection(["lm_head"], *shape)
        self._frequencies = {
            (layer.device, layer.rotation): torch.tensor(layer.rotation[0]).to(layer.device)
            for layer in self._layers
        }
        loaded = [(layer.device, layer.size_bytes) for layer in self._layers]
        loaded += [(devices[0], first.size_bytes), (devices[-1], last.size_bytes)]
        self.weights_bytes = sum(size for _, size in loaded)
        self.weights_vram_bytes = sum(size for where, size in loaded if where.type != "cpu")

    @torch.inference_mode()
    def forward(self, inputs: StepTensors, caches: Sequence[Cache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32, on the last layer's device."""
        config = self.config
        hidden = self._embedding(inputs.token_ids)
        if config.embedding_scale != 1:
            # rounded as the model's own code rounds it
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        branch: Tensor | None = None
        here: torch.device | None = None
        angles: dict[Rotation, tuple[Tensor, Tensor]] = {}
        for layer, cache in zip(self._layers, caches, strict=True):
            if layer.device != here:
                here = layer.device
                inputs = inputs.to(here)
                hidden = hidden.to(here)
                branch = None if branch is None else branch.to(here)
                angles = {}
            if layer.rotation not in angles:
                angles[layer.rotation] = self._angles(layer, inputs.positions)
            with current(here):
                hidden, branch = layer(hidden, branch, inputs, cache, angles[layer.rotation])
        assert branch is not None
        # Rows without logits leave here: the head is the largest matrix of a small model.
        wanted = inputs.logit_rows
        with current(self.devices[-1]):
            normed, _ = self._norm(hidden[wanted], branch[wanted])
            logits = self._head(normed).float()
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def _angles(self, layer: Layer, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [T, R / 2]: bf16 angles flip near-tie tokens."""
        frequencies = self._frequencies[layer.device, layer.rotation]
        turned = positions.float()[:, None] * frequencies
        magnitude = layer.rotation[1]
        return turned.cos() * magnitude, turned.sin() * magnitude


def current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def why_not_on_devices(config: ModelConfig) -> str:
    """What this decoder cannot do that the CPU's can; empty if it can do all."""
    kinds = sorted({layer.kind for layer in config.layers} - {"attention"})
    if kinds:
        return f"{', '.join(kinds)} layers"
    if any(layer.shares_kv_of is not None for layer in config.layers):
        return "layers that share keys and values"
    return ""
