"""Randomly initialised Llamas of known shapes, made on the device that computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend.models.config import ModelConfig, config_from_hf
from ..backend.models.container import StoredRows
from ..backend.models.dequantize import QuantBlocks


@dataclass(frozen=True)
class Shape:
    """A network's sizes, as in the configurations of Llama 3.2 1B and Llama 3.1 8B."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 128_256
    tied: bool = False

    def raw(self) -> dict[str, Any]:
        """As a config.json."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
        }

    @property
    def matrix_elements(self) -> int:
        """Of all matrices that a token is multiplied with, the head among them."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size


LLAMA_1B = Shape("1B", 2048, 8192, 16, 32, 8, 64, tied=True)
LLAMA_8B = Shape("8B", 4096, 14336, 32, 32, 8, 128)
TINY = Shape("tiny", 64, 96, 2, 4, 2, 16, vocab_size=97)


class RandomCheckpoint:
    """A `Checkpoint`: normal weights of a deviation that keeps activations finite. `bits` 4 gives
    random codes in groups of 32 with an offset, as Q4_1 has them."""

    format = "random"
    metadata: Mapping[str, Any] = {}

    def __init__(self, shape: Shape, bits: int, device: torch.device) -> None:
        self.config: ModelConfig = config_from_hf(shape.raw())
        self.quantization = f"{bits} bits"
        self._bits = bits
        self._device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self._shape(name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        made = torch.empty(shape, dtype=dtype, device=self._device)
        return made.normal_(0, 0.02, generator=self._generator)

    def blocks(self, name: str) -> QuantBlocks | None:
        if self._bits != 4 or "proj" not in name:
            return None
        rows, columns = self._shape(name)
        groups = (rows, columns // 32)
        quants = torch.randint(
            0, 16, (*groups, 32), generator=self._generator, device=self._device, dtype=torch.uint8
        )
        scale = torch.full(groups, 0.02 / 4.6, dtype=torch.float16, device=self._device)
        return QuantBlocks(4, quants, scale, scale * -7.5)

    def rows(self, name: str) -> StoredRows | None:
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (q, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, q),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        return next((shape for part, shape in shapes.items() if part in name), (c.hidden_size,))
