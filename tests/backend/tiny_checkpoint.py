"""A two-layer model with random weights, in memory, of any family's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmd.backend.models.checkpoint import QuantBlocks
from llmd.backend.models.config import Experts, Family, ModelConfig, config_from_hf
from llmd.backend.models.container import StoredRows
from llmd.backend.models.rope import Rope


class TinyCheckpoint:
    """A `Checkpoint` of a Llama, or with `qk_norm` of a Qwen3. `bits` 4 or 8 quantises it;
    `changes` are those of a variant to its configuration, see `VARIANTS`."""

    format = "memory"
    quantization = "random"
    metadata: Mapping[str, Any] = {}

    def __init__(
        self,
        *,
        qk_norm: bool = False,
        bits: int = 0,
        layers: int = 2,
        variant: str = "",
        vocab_size: int = 97,
    ) -> None:
        raw = {
            "model_type": "qwen3" if qk_norm else "llama",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }
        self.config: ModelConfig = config_from_hf(raw)
        if variant:
            self.config = VARIANTS[variant](self.config)
        self._bits = bits
        self._tensors: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        if not name.endswith(".bias"):
            return "choice_bias" not in name
        flags = {
            "_proj": self.config.qkv_bias and "o_proj" not in name and "mlp" not in name,
            "router": self.config.experts is not None and self.config.experts.router_bias,
            "experts": self.config.experts is not None and self.config.experts.expert_bias,
        }
        return any(part in name and is_set for part, is_set in flags.items())

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        blocks = self.blocks(name)
        if blocks is None:
            return self._dense(name).to(dtype)
        dense = blocks.quants.float() * blocks.scale.float()[..., None]
        if blocks.offset is not None:
            dense = dense + blocks.offset.float()[..., None]
        return dense.flatten(1).to(dtype)

    def blocks(self, name: str) -> QuantBlocks | None:
        if not self._bits or "proj" not in name or name.endswith(".bias"):
            return None
        groups = torch.unflatten(self._dense(name), 1, (-1, 32))
        if self._bits == 8:
            scale = (groups.abs().amax(-1) / 127).half()
            quants = (groups / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
            return QuantBlocks(8, quants, scale)
        low = groups.amin(-1).half()
        scale = ((groups.amax(-1) - low.float()) / 15).half()
        steps = (groups - low.float()[..., None]) / scale.float()[..., None]
        return QuantBlocks(4, steps.round().clamp(0, 15).to(torch.uint8), scale, low)

    def rows(self, name: str) -> StoredRows | None:
        return None

    def _dense(self, name: str) -> Tensor:
        if name not in self._tensors:
            generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
            made = torch.randn(self._shape(name), generator=generator)
            self._tensors[name] = 1 + made * 0.1 if "norm" in name else made * 0.15
        return self._tensors[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        inner = c.intermediate_size
        if c.experts is not None and "experts" in name:
            inner = c.experts.intermediate_size
        if c.experts is not None and "shared." in name:
            inner = c.experts.shared_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes = {
            "q_norm": (q if c.qk_norm_full else c.head_dim,),
            "k_norm": (kv if c.qk_norm_full else c.head_dim,),
            "sinks": (c.num_heads,),
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (q, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, q),
            "gate_proj": (inner, c.hidden_size),
            "up_proj": (inner, c.hidden_size),
            "down_proj": (c.hidden_size, inner),
            "shared_gate": (1, c.hidden_size),
            "router": (c.experts.num_experts if c.experts else 0, c.hidden_size),
        }
        found = next((shape for key, shape in shapes.items() if key in name), (c.hidden_size,))
        return found[:1] if name.endswith(".bias") else found


def _gemma(config: ModelConfig) -> ModelConfig:
    """Windows in every other layer, capped scores and logits, norms on both sides."""
    first, second = config.layers
    return replace(
        config,
        layers=(replace(first, window=5), second),
        norms="sandwich",
        activation="gelu_tanh",
        attention_scale=0.2,
        attention_softcap=20.0,
        logit_softcap=10.0,
        embedding_scale=8.0,
        tied_embeddings=True,
    )


def _gpt_oss(config: ModelConfig) -> ModelConfig:
    """Sinks, windows, experts with biases and their own activation."""
    first, second = config.layers
    return replace(
        config,
        layers=(replace(first, window=7, has_experts=True), replace(second, has_experts=True)),
        sinks=True,
        qkv_bias=True,
        family=Family(qkv_bias=True),
        experts=Experts(4, 2, 64, "topk_softmax", router_bias=True, expert_bias=True, clamp=2.0),
    )


def _olmo(config: ModelConfig) -> ModelConfig:
    """Norms after the branches, and over all heads at once."""
    return replace(config, norms="post", qk_norm_full=True)


def _cohere(config: ModelConfig) -> ModelConfig:
    """Both branches read one LayerNorm; neighbouring pairs turn; a layer without positions."""
    first, second = config.layers
    turning = replace(first, rope=Rope(10000.0, 16, is_interleaved=True))
    return replace(
        config,
        layers=(turning, replace(second, rope=None)),
        norms="parallel",
        norm_kind="layer",
        logit_scale=0.5,
    )


def _glm(config: ModelConfig) -> ModelConfig:
    """Half of each head turns; residuals are scaled, as Granite's; exact GELU."""
    layers = tuple(replace(layer, rope=Rope(10000.0, 8)) for layer in config.layers)
    return replace(config, layers=layers, residual_scale=0.5, activation="gelu")


def _qwen_moe(config: ModelConfig) -> ModelConfig:
    """One layer of experts beside a shared one, one without."""
    first, second = config.layers
    experts = Experts(5, 2, 32, "sigmoid", scale=1.5, shared_size=64, shared_gate=True)
    return replace(config, layers=(first, replace(second, has_experts=True)), experts=experts)


VARIANTS = {
    "gemma": _gemma,
    "gpt-oss": _gpt_oss,
    "olmo": _olmo,
    "cohere": _cohere,
    "glm": _glm,
    "qwen-moe": _qwen_moe,
}
