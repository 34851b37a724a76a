"""Takes tensors out of a checkpoint as the layers want them, and counts their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.linear import Linear
from ..layers.norm import LayerNorm, Norm, RMSNorm
from .checkpoint import Checkpoint
from .config import BadModel


class Loader:
    """One layer's, if the prefix is "model.layers.0."; the names are canonical.

    Raises BadModel if a tensor is missing or of another shape than the configuration says.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        self.config = checkpoint.config
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.size_bytes = 0

    def has(self, name: str) -> bool:
        """The tensor is stored."""
        return self._checkpoint.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """As it is."""
        tensor = self._checkpoint.tensor(self._prefix + name, self.dtype)
        if shape and tensor.shape != shape:
            raise BadModel(
                f"{self._prefix}{name} has shape {tuple(tensor.shape)}, {shape} expected"
            )
        self.size_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str, size: int, kind: str = "rms") -> Norm:
        """RMSNorm or LayerNorm over `size` elements."""
        weight = self.tensor(f"{name}.weight", size)
        eps = self.config.rms_norm_eps
        return RMSNorm(weight, eps) if kind == "rms" else LayerNorm(weight, eps)

    def linear(
        self, names: tuple[str, ...], num_outputs: int, num_inputs: int, has_bias: bool = False
    ) -> Linear:
        """Several matrices that read the same rows, as one."""
        has_bias = has_bias and self.has(f"{names[0]}.bias")
        bias = self._joined(names, "bias") if has_bias else None
        linear = Linear(self._joined(names, "weight"), bias)
        found = (linear.out_features, linear.in_features)
        if found != (num_outputs, num_inputs):
            raise BadModel(
                f"{self._prefix}{names[0]} has shape {found}, {(num_outputs, num_inputs)} expected"
            )
        self.size_bytes += linear.size_bytes
        return linear

    def _joined(self, names: tuple[str, ...], kind: str) -> Tensor:
        parts = [
            self._checkpoint.tensor(f"{self._prefix}{name}.{kind}", self.dtype) for name in names
        ]
        try:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        except RuntimeError as error:
            raise BadModel(f"{self._prefix}{'/'.join(names)}: shapes do not fit") from error
