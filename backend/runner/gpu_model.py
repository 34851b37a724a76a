"""The decoder over `kernels.select`: pre-norm RMSNorm, grouped-query attention, RoPE, a gated MLP.

The kernels decide how (Triton or torch), the layer map decides where: the hidden state moves when
the next layer lives elsewhere, and so do the step's inputs, once per device. Group-quantised GGUF
weights stay quantised; what a checkpoint cannot give as integers is dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.packed import PackedWeight, pack
from ..kernels.select import Kernels
from ..layers.rotary import Rotary
from ..models.checkpoint import Checkpoint
from ..models.decoder import frequencies_of
from .gpu_inputs import StepTensors


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each."""

    keys: Tensor
    values: Tensor


class Projection:
    """y = x · Wᵀ + b, with a dense or a packed weight."""

    def __init__(
        self, kernels: Kernels, weight: Tensor | PackedWeight, bias: Tensor | None
    ) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias
        if isinstance(weight, PackedWeight):
            self.size_bytes = weight.size_bytes
        else:
            self.size_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, PackedWeight):
            return self._kernels.quantized_matmul(x, self._weight, self._bias)
        return torch.nn.functional.linear(x, self._weight, self._bias)


class Layer:
    """One block of the network, on one device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        config = checkpoint.config
        self.device = device
        self._config = config
        self._kernels = kernels
        prefix = f"model.layers.{index}."

        def vector(name: str) -> Tensor:
            return checkpoint.tensor(f"{prefix}{name}.weight", dtype).to(device)

        def fused(names: Sequence[str]) -> Projection:
            return load_projection(checkpoint, [prefix + n for n in names], dtype, device, kernels)

        self._attention_norm = vector("input_layernorm")
        self._mlp_norm = vector("post_attention_layernorm")
        self._qkv = fused(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])
        self._output = fused(["self_attn.o_proj"])
        self._gate_up = fused(["mlp.gate_proj", "mlp.up_proj"])
        self._down = fused(["mlp.down_proj"])
        has_norm = config.family.qk_norm
        self._query_norm = vector("self_attn.q_norm") if has_norm else None
        self._key_norm = vector("self_attn.k_norm") if has_norm else None
        projections = (self._qkv, self._output, self._gate_up, self._down)
        self.size_bytes = sum(p.size_bytes for p in projections)

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        inputs: StepTensors,
        cache: Cache,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(output, residual): their sum is the hidden state, and the next norm adds them."""
        config, kernels = self._config, self._kernels
        eps = config.rms_norm_eps
        if residual is None:
            x, residual = kernels.rms_norm(hidden, self._attention_norm, eps), hidden
        else:
            x, residual = kernels.rms_norm(hidden, self._attention_norm, eps, residual)
        num_tokens = x.shape[0]
        heads = self._qkv(x).view(num_tokens, -1, config.head_dim)
        query, key, value = torch.split_with_sizes(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        query = kernels.rotary_store(
            query,
            key,
            value,
            cos,
            sin,
            cache.keys,
            cache.values,
            inputs.slot_mapping,
            q_weight=self._query_norm,
            k_weight=self._key_norm,
            eps=eps,
        )
        mixed = kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            inputs.block_tables,
            inputs.query_start,
            inputs.seq_lens,
            config.head_dim**-0.5,
            config.sliding_window,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
        )
        attended = self._output(mixed.reshape(num_tokens, -1))
        x, residual = kernels.rms_norm(attended, self._mlp_norm, eps, residual)
        assert residual is not None
        return self._down(kernels.silu_mul(self._gate_up(x))), residual


class GpuDecoder:
    """A loaded network. `progress` gets the share of the layers that are loaded."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        kernels: Kernels,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = dtype
        self._kernels = kernels
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", dtype).to(devices[0])
        self._layers: list[Layer] = []
        for index, device in enumerate(devices):
            self._layers.append(Layer(checkpoint, index, dtype, device, kernels))
            progress((index + 1) / (len(devices) + 1))
        self._norm = checkpoint.tensor("model.norm.weight", dtype).to(devices[-1])
        if config.tied_embeddings:
            self._head = Projection(kernels, self._embedding.to(devices[-1]), None)
        else:
            self._head = load_projection(checkpoint, ["lm_head"], dtype, devices[-1], kernels)
        rotary = Rotary(frequencies_of(checkpoint), config.context_length)
        self._angles = {d: (rotary.cos.to(d), rotary.sin.to(d)) for d in set(devices)}
        self.weights_bytes = (
            sum(layer.size_bytes for layer in self._layers)
            + self._head.size_bytes
            + self._embedding.numel() * self._embedding.element_size()
        )

    @torch.inference_mode()
    def forward(self, inputs: StepTensors, caches: Sequence[Cache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32, on the last layer's device."""
        hidden: Tensor = self._embedding[inputs.token_ids]
        residual: Tensor | None = None
        here: torch.device | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            if layer.device != here:
                here = layer.device
                inputs = inputs.to(here)
                hidden = hidden.to(here)
                residual = None if residual is None else residual.to(here)
                cos, sin = (table[inputs.positions] for table in self._angles[here])
            hidden, residual = layer(hidden, residual, inputs, cache, cos, sin)
        assert residual is not None
        # Rows without logits leave here: the head is the largest matrix of a small model.
        wanted = inputs.logit_rows
        eps = self.config.rms_norm_eps
        normed, _ = self._kernels.rms_norm(hidden[wanted], self._norm, eps, residual[wanted])
        return self._head(normed).float()


def load_projection(
    checkpoint: Checkpoint,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> Projection:
    """Several matrices that read the same rows, as one; packed if all of them are alike."""
    bias = None
    if checkpoint.has(f"{names[0]}.bias"):
        biases = [checkpoint.tensor(f"{name}.bias", dtype) for name in names]
        bias = torch.cat(biases).to(device)
    packed = _packed(checkpoint, names)
    if packed is not None:
        return Projection(kernels, packed.to(device), bias)
    weights = [checkpoint.tensor(f"{name}.weight", dtype) for name in names]
    return Projection(kernels, torch.cat(weights).to(device), bias)


def _packed(checkpoint: Checkpoint, names: Sequence[str]) -> PackedWeight | None:
    parts = []
    for name in names:
        part = checkpoint.blocks(f"{name}.weight")
        if part is None:
            return None
        parts.append(part)
    if len({(part.bits, part.offset is None) for part in parts}) > 1:
        return None
    offsets = [part.offset for part in parts if part.offset is not None]
    return pack(
        torch.cat([part.quants for part in parts]).flatten(1),
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets) if offsets else None,
        bits=parts[0].bits,
        group=32,
    )
