"""Rotary position embedding over split halves (Su et al., "RoFormer", 2021).

The tables are float32 whatever the model's dtype: bf16 tables flip near-tie tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rotary:
    """Rotates queries and keys by their positions."""

    def __init__(self, inverse_frequencies: Sequence[float], context_length: int) -> None:
        frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)
        self.cos = angles.cos()  # [context_length, head_dim / 2]
        self.sin = angles.sin()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions, each [num_tokens, 1, head_dim / 2]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim], in its own dtype; the arithmetic is float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
