"""Takes tensors out of a checkpoint as the layers want them, and counts their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.adapted_linear import AdaptedLinear
from ..layers.linear import Linear
from ..layers.norm import LayerNorm, Norm, RMSNorm
from .adapters import AdaptedCheckpoint
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
        parts = self._parts(names, "weight")
        linear = self._adapted(names, parts, self._together(names, parts), bias)
        found = (linear.out_features, linear.in_features)
        if found != (num_outputs, num_inputs):
            raise BadModel(
                f"{self._prefix}{names[0]} has shape {found}, {(num_outputs, num_inputs)} expected"
            )
        self.size_bytes += linear.size_bytes
        return linear

    def _adapted(
        self, names: tuple[str, ...], parts: list[Tensor], weight: Tensor, bias: Tensor | None
    ) -> Linear:
        checkpoint = self._checkpoint
        if isinstance(checkpoint, AdaptedCheckpoint) and checkpoint.named:
            changes = checkpoint.changes([self._prefix + name for name in names], parts)
            if changes:
                return AdaptedLinear(weight, bias, changes, checkpoint.active)
        return Linear(weight, bias)

    def _joined(self, names: tuple[str, ...], kind: str) -> Tensor:
        return self._together(names, self._parts(names, kind))

    def _parts(self, names: tuple[str, ...], kind: str) -> list[Tensor]:
        return [
            self._checkpoint.tensor(f"{self._prefix}{name}.{kind}", self.dtype) for name in names
        ]

    def _together(self, names: tuple[str, ...], parts: list[Tensor]) -> Tensor:
        try:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        except RuntimeError as error:
            raise BadModel(f"{self._prefix}{'/'.join(names)}: shapes do not fit") from error
