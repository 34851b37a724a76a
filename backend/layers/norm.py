"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016), in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """y = x / rms(x) · weight over the last dimension. weight [hidden], or none."""

    def __init__(self, weight: Tensor | None, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self.size_bytes = 0 if weight is None else weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        normed = (wide * scale).to(x.dtype)
        return normed if self._weight is None else normed * self._weight


class LayerNorm:
    """y = (x - mean(x)) / std(x) · weight over the last dimension. weight [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self.size_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(x.dtype) * self._weight


Norm = RMSNorm | LayerNorm
