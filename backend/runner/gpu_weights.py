"""A checkpoint's tensors on the devices that compute with them.

Group-quantised weights stay quantised on a GPU, in the one packed form of the kernels; on the CPU,
and where a file has none, a matrix is dense in the model's dtype. Files are mapped, so that a
matrix is read once, from the file to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import packed
from ..kernels.packed import PackedWeight
from ..kernels.repack import GGUF_TYPES, from_gguf
from ..kernels.select import Kernels
from ..models.checkpoint import Checkpoint
from ..models.config import BadModel


class Projection:
    """y = x · Wᵀ + b, with a dense or a packed weight."""

    def __init__(
        self, kernels: Kernels, weight: Tensor | PackedWeight, bias: Tensor | None
    ) -> None:
        self._kernels = kernels
        self.weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return self._kernels.quantized_matmul(x, self.weight, self._bias)
        return torch.nn.functional.linear(x, self.weight, self._bias)


class Embedding:
    """The rows of a dense or a packed matrix."""

    def __init__(self, weight: Tensor | PackedWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return packed.dequantize(self.weight.rows(token_ids)).to(self._dtype)
        return self.weight[token_ids]


class Experts:
    """A stack of matrices, one per expert: rows sorted by expert in, in the same order out."""

    def __init__(self, kernels: Kernels, weight: PackedWeight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, row_ids: Tensor, expert_start: Tensor) -> Tensor:
        return self._kernels.expert_matmul(x, self._weight, row_ids, expert_start, self._bias)


class Weights:
    """Loads what lies below one prefix of canonical names, and counts the bytes.

    `keeps_packed` False makes every matrix dense. Raises BadModel if a tensor is missing, or of
    another shape than is asked for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        keeps_packed: bool,
        products: list[Projection],
    ) -> None:
        self.config = checkpoint.config
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self.size_bytes = 0
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._keeps_packed = keeps_packed
        self._products = products  # all that were made with a packed weight, for tuning

    def has(self, name: str) -> bool:
        """The tensor is stored."""
        return self._checkpoint.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """As it is, in the model's dtype."""
        tensor = self._checkpoint.tensor(self._prefix + name, self.dtype)
        self._expect(name, tuple(tensor.shape), shape)
        return self._placed(tensor)

    def projection(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> Projection:
        """Several matrices that read the same rows, as one; packed if all of them are alike."""
        bias = None
        if self.has(f"{names[0]}.bias"):
            bias = self._placed(torch.cat([self._dense(f"{name}.bias") for name in names]))
        weight = self._matrix(names)
        shape = (
            (weight.num_rows, weight.num_columns)
            if isinstance(weight, PackedWeight)
            else tuple(weight.shape)
        )
        self._expect(names[0], shape, (num_outputs, num_inputs))
        made = Projection(self.kernels, weight, bias)
        if isinstance(weight, PackedWeight):
            self._products.append(made)
        return made

    def embedding(self, name: str, *shape: int) -> Embedding:
        """A table whose rows are looked up."""
        weight = self._matrix([name])
        rows = weight.num_rows if isinstance(weight, PackedWeight) else weight.shape[0]
        self._expect(name, (rows, shape[1]), shape)
        return Embedding(weight, self.dtype)

    def experts(self, count: int, parts: Sequence[str], num_outputs: int) -> Experts:
        """The matrices `mlp.experts.{e}.{part}` of all experts, the parts of each joined."""
        stacks: list[PackedWeight] = []
        biases: list[Tensor] = []
        for index in range(count):
            names = [f"mlp.experts.{index}.{part}" for part in parts]
            found = self._packed(names)
            if found is None:
                found = packed.dense(torch.cat([self._dense(f"{name}.weight") for name in names]))
            self._expect(names[0], (found.num_rows,), (num_outputs,))
            stacks.append(found)
            if self.has(f"{names[0]}.bias"):
                biases.append(torch.cat([self._dense(f"{name}.bias") for name in names]))
        try:
            weight = packed.stack(stacks)
        except ValueError:  # the experts of a layer are quantised in different ways
            weight = packed.stack(
                [packed.dense(packed.dequantize(each).to(self.dtype)) for each in stacks]
            )
        bias = self._placed(torch.stack(biases)) if biases else None
        return Experts(self.kernels, self._placed_packed(weight), bias)

    def _matrix(self, names: Sequence[str]) -> Tensor | PackedWeight:
        found = self._packed(names)
        if found is not None:
            return self._placed_packed(found)
        parts = [self._dense(f"{name}.weight") for name in names]
        return self._placed(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _packed(self, names: Sequence[str]) -> PackedWeight | None:
        if not self._keeps_packed:
            return None
        parts: list[PackedWeight] = []
        for name in names:
            part = stored_packed(self._checkpoint, f"{self._prefix}{name}.weight", self.device)
            if part is None:
                return None
            parts.append(part)
        try:
            return parts[0] if len(parts) == 1 else packed.concatenate(parts)
        except ValueError:  # not alike: llama.cpp gives some matrices of a layer more bits
            return None

    def _dense(self, name: str) -> Tensor:
        return self._checkpoint.tensor(self._prefix + name, self.dtype)

    def _placed(self, tensor: Tensor) -> Tensor:
        self.size_bytes += tensor.nbytes
        return tensor.to(self.device)

    def _placed_packed(self, weight: PackedWeight) -> PackedWeight:
        self.size_bytes += weight.size_bytes
        return weight.to(self.device)

    def _expect(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if wanted and found != wanted:
            raise BadModel(f"{self._prefix}{name} has shape {found}, {wanted} expected")


def stored_packed(checkpoint: Checkpoint, name: str, device: torch.device) -> PackedWeight | None:
    """The matrix in the packed form, if the file has it group-quantised.

    A GGUF's bytes go from the mapped file to the device as they are, and are repacked there.
    """
    stored = checkpoint.rows(name)
    if stored is not None and stored.type in GGUF_TYPES:
        return from_gguf(stored.raw.to(device), stored.type)
    part = checkpoint.blocks(name)
    if part is None:
        return None
    offset = None if part.offset is None else part.offset.to(device)
    return packed.pack(
        part.quants.to(device).flatten(1), part.scale.to(device), offset, bits=part.bits, group=32
    )
