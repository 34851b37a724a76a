"""Rotary position embedding (Su et al., "RoFormer", 2021), over split halves or adjacent pairs.

Angles are float32 whatever the model's dtype: bf16 angles flip near-tie tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class Rotary:
    """Rotates queries and keys by their positions."""

    def __init__(
        self,
        inverse_frequencies: Sequence[float],
        context_length: int,
        magnitude: float = 1.0,
        is_interleaved: bool = False,
    ) -> None:
        self._frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
        self._context_length = context_length
        self._magnitude = magnitude
        self.is_interleaved = is_interleaved
        self.key = hash((tuple(inverse_frequencies), magnitude))  # equal: the same angles

    @cached_property
    def cos(self) -> Tensor:
        """Of all positions, [context_length, dim / 2]: for programs that look them up."""
        return self._all().cos() * self._magnitude

    @cached_property
    def sin(self) -> Tensor:
        """As `cos`."""
        return self._all().sin() * self._magnitude

    def _all(self) -> Tensor:
        positions = torch.arange(self._context_length, dtype=torch.float32)
        return torch.outer(positions, self._frequencies)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for these positions, each [num_tokens, 1, dim / 2]."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies).unsqueeze(1)
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_tokens, num_heads, head_dim], in its own dtype; the arithmetic is float32.

        The first 2 · (dim / 2) elements of a head turn, the others stay.
        """
        dim = 2 * cos.shape[-1]
        turning = x[..., :dim].float()
        if self.is_interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        if self.is_interleaved:
            rotated = torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
        else:
            rotated = torch.cat(turned, dim=-1).to(x.dtype)
        return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)
