"""RMSNorm (Zhang and Sennrich, 2019), in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """y = x / rms(x) · weight over the last dimension. weight [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self.size_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(x.dtype) * self._weight
