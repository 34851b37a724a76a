"""A two-layer model with random weights, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmd.backend.models.checkpoint import QuantBlocks
from llmd.backend.models.config import ModelConfig, config_from_hf


class TinyCheckpoint:
    """A `Checkpoint` of a Llama, or with `qk_norm` of a Qwen3. `bits` 4 or 8 quantises it."""

    format = "memory"
    quantization = "random"
    metadata: Mapping[str, Any] = {}

    def __init__(self, *, qk_norm: bool = False, bits: int = 0, layers: int = 2) -> None:
        raw = {
            "model_type": "qwen3" if qk_norm else "llama",
            "vocab_size": 97,
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
        self._bits = bits
        self._tensors: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name.endswith("weight")

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        blocks = self.blocks(name)
        if blocks is None:
            return self._dense(name).to(dtype)
        dense = blocks.quants.float() * blocks.scale.float()[..., None]
        if blocks.offset is not None:
            dense = dense + blocks.offset.float()[..., None]
        return dense.flatten(1).to(dtype)

    def blocks(self, name: str) -> QuantBlocks | None:
        if not self._bits or "proj" not in name:
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

    def rope_factors(self) -> list[float] | None:
        return None

    def _dense(self, name: str) -> Tensor:
        if name not in self._tensors:
            generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
            made = torch.randn(self._shape(name), generator=generator)
            self._tensors[name] = 1 + made * 0.1 if "norm" in name else made * 0.15
        return self._tensors[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        if "q_norm" in name or "k_norm" in name:
            return (c.head_dim,)
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (c.num_heads * c.head_dim, c.hidden_size),
            "k_proj": (c.num_kv_heads * c.head_dim, c.hidden_size),
            "v_proj": (c.num_kv_heads * c.head_dim, c.hidden_size),
            "o_proj": (c.hidden_size, c.num_heads * c.head_dim),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        return next((shape for key, shape in shapes.items() if key in name), (c.hidden_size,))
