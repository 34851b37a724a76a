"""The tensors of a model's files under the names that stand there, whatever the container.

    GGUF          one file, or all parts of a split one
    safetensors   one file or several shards, with their config.json

Files are mapped, not read: a tensor costs memory when it is asked for, and a page that was read
belongs to the system's cache.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...registry.formats import gguf, safetensors
from ...registry.formats.errors import FormatError
from ..protocol import ModelFile
from .config import BadModel, UnsupportedModel
from .dequantize import SUPPORTED_TYPES, QuantBlocks, dequantize, quant_blocks
from .quantized import layout_of


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Quantised rows as they lie in a GGUF: uint8 [..., rows, bytes of a row], of a type."""

    raw: Tensor
    type: str
    is_mapped: bool = False  # `raw` are the file's own pages

    def let_go(self, begin: int, end: int) -> None:
        """These rows were read: their pages need not stay in this process's memory. A later touch
        maps them again. Nothing that was written to must come here, and nothing is."""
        rows = self.raw[begin:end]
        if not self.is_mapped or not rows.is_contiguous() or sys.platform != "linux":
            return
        first = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (rows.data_ptr() + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
            )


class Container(Protocol):
    """What a checkpoint asks of its files."""

    format: str  # "gguf", "safetensors"
    quantization: str  # "Q4_1", "BF16": the type that most bytes are of
    metadata: Mapping[str, Any]  # of a GGUF; empty for safetensors
    config: Mapping[str, Any]  # config.json; empty for a GGUF
    names: frozenset[str]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh tensor of this dtype. Raises BadModel if the name is missing."""
        ...

    def blocks(self, name: str) -> QuantBlocks | None:
        """The matrix as the integers that are stored, if they are of a kind to compute with."""
        ...

    def rows(self, name: str) -> StoredRows | None:
        """The matrix, or the stack of matrices, as its bytes lie in the file, if its rows are
        quantised one by one."""
        ...

    def forget_vocabulary(self) -> None:
        """A tokenizer was made of it: the metadata need not hold its lists any more."""
        ...


def open_container(files: Sequence[ModelFile]) -> Container:
    """Raises BadModel or UnsupportedModel with one sentence; nothing is read but headers."""
    weights = sorted((file for file in files if file.role == "weights"), key=lambda f: f.name)
    if not weights:
        raise BadModel("the model has no weights file")
    try:
        if weights[0].name.endswith(".gguf") or gguf.is_gguf(Path(weights[0].path)):
            return GGUFContainer([Path(file.path) for file in weights])
        return SafetensorsContainer(read_config(files), [Path(file.path) for file in weights])
    except FormatError as error:
        raise BadModel(str(error)) from error
    except OSError as error:
        raise BadModel(f"{weights[0].name} can't be read: {error.strerror}") from error


def mapped_bytes(path: Path, offset: int, size: int) -> Tensor:
    """A mapped range as uint8. Copy-on-write: torch wants writable memory, nobody writes.

    Not numpy's memmap, which resolves the path and measures the file again for each tensor.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    before = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=offset - before
        )
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=before)


class GGUFContainer:
    """GGUF, one file or several parts."""

    format = "gguf"

    def __init__(self, paths: Sequence[Path]) -> None:
        headers = [gguf.read_header(path) for path in paths]
        self._tensors: dict[str, tuple[Path, gguf.TensorInfo]] = {}
        for path, header in zip(paths, headers, strict=True):
            for name, tensor in header.tensors.items():
                if name in self._tensors:
                    raise BadModel(f"two parts of the GGUF have a tensor {name}")
                self._tensors[name] = (path, tensor)
        self._metadata = dict(_metadata_of_parts(headers))
        self.metadata: Mapping[str, Any] = self._metadata
        self.config: Mapping[str, Any] = {}
        self.names = frozenset(self._tensors)
        self._check_types()
        self.quantization = _type_of_most_bytes(
            (info.type, info.size_bytes) for _, info in self._tensors.values()
        )

    def forget_vocabulary(self) -> None:
        """They are the largest thing beside the weights."""
        for key in ("tokens", "scores", "token_type", "merges"):
            self._metadata.pop(f"tokenizer.ggml.{key}", None)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        raw, info = self._raw(name)
        tensor = dequantize(raw, info.type, dtype).reshape(info.shape)
        return tensor.clone() if info.type in ("F32", "F16", "BF16") else tensor

    def blocks(self, name: str) -> QuantBlocks | None:
        raw, info = self._raw(name)
        return quant_blocks(raw, info.type, info.shape[0]) if len(info.shape) == 2 else None

    def rows(self, name: str) -> StoredRows | None:
        raw, info = self._raw(name)
        if info.type in ("F32", "F16", "BF16") or len(info.shape) < 2:
            return None
        return StoredRows(raw.view(*info.shape[:-1], -1), info.type, is_mapped=True)

    def _raw(self, name: str) -> tuple[Tensor, gguf.TensorInfo]:
        if name not in self._tensors:
            raise BadModel(f"the GGUF has no tensor {name}")
        path, info = self._tensors[name]
        return mapped_bytes(path, info.offset, info.size_bytes), info

    def _check_types(self) -> None:
        for name, (_, info) in self._tensors.items():
            if info.type not in SUPPORTED_TYPES:
                raise UnsupportedModel(
                    f"tensor {name} is of type {info.type}, which is not supported; supported are "
                    f"{', '.join(SUPPORTED_TYPES)}"
                )


def _metadata_of_parts(headers: Sequence[gguf.GGUFHeader]) -> Mapping[str, Any]:
    """The first part's, which has all of it. Raises BadModel unless every part is here, once."""
    numbers = [int(header.metadata.get("split.no", 0) or 0) for header in headers]
    first = headers[numbers.index(min(numbers))]
    wanted = int(first.metadata.get("split.count", 1) or 1)
    if sorted(numbers) != list(range(wanted)):
        raise BadModel(f"the GGUF is split in {wanted} files, {len(headers)} of them are here")
    num_tensors = sum(len(header.tensors) for header in headers)
    announced = int(first.metadata.get("split.tensors.count", num_tensors))
    if announced != num_tensors:
        raise BadModel(f"the GGUF's parts should hold {announced} tensors and hold {num_tensors}")
    return first.metadata


def _type_of_most_bytes(sizes: Any) -> str:
    counted: Counter[str] = Counter()
    for kind, size in sizes:
        counted[kind] += size
    return counted.most_common(1)[0][0] if counted else "unknown"


SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # bare exponents
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "U32": torch.int32,  # words of codes
    "I64": torch.int64,
}
_FLOATS = ("F32", "F16", "BF16", "F64")


class SafetensorsContainer:
    """A Hugging Face folder: config.json and one or more safetensors files.

    Weights that are stored quantised appear under the name that they would have as floats.
    """

    format = "safetensors"

    def __init__(self, config: Mapping[str, Any], paths: Sequence[Path]) -> None:
        self.metadata: Mapping[str, Any] = {}
        self.config = config
        self._tensors = {
            name: (path, info)
            for path in paths
            for name, info in safetensors.read_header(path).tensors.items()
        }
        stored = frozenset(self._tensors)
        self._layout = layout_of(config, stored, self._stored)
        self._quantized = frozenset() if self._layout is None else self._layout.weights()
        self.names = stored | self._quantized
        self.quantization = (
            self._layout.method.upper()
            if self._layout is not None
            else _type_of_most_bytes(
                (info.dtype, info.size_bytes) for _, info in self._tensors.values()
            )
        )

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if self._layout is not None and name in self._quantized:
            return self._layout.dense(name).to(dtype)
        stored = self._stored(name)
        dtype_name = self._tensors[name][1].dtype
        if dtype_name not in _FLOATS:
            raise UnsupportedModel(
                f"tensor {name} is of dtype {dtype_name}, which is not supported here; supported "
                f"are {', '.join(_FLOATS)}"
            )
        return stored.to(dtype, copy=True)

    def blocks(self, name: str) -> QuantBlocks | None:
        if self._layout is None or name not in self._quantized:
            return None
        groups = self._layout.groups(name)
        return None if groups is None else groups.blocks()

    def rows(self, name: str) -> StoredRows | None:
        return None

    def forget_vocabulary(self) -> None:
        """There is none among the tensors."""

    def _stored(self, name: str) -> Tensor:
        """As it lies in the file."""
        if name not in self._tensors:
            raise BadModel(f"the safetensors files have no tensor {name}")
        path, info = self._tensors[name]
        if info.dtype not in SAFETENSORS_DTYPES:
            raise UnsupportedModel(
                f"tensor {name} is of dtype {info.dtype}, which is not supported; supported are "
                f"{', '.join(SAFETENSORS_DTYPES)}"
            )
        raw = mapped_bytes(path, info.offset, info.size_bytes)
        return _aligned_view(raw, SAFETENSORS_DTYPES[info.dtype]).reshape(info.shape)


def _aligned_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as numbers; copied where they do not lie at a multiple of the numbers' size."""
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)


def read_config(files: Sequence[ModelFile]) -> dict[str, Any]:
    """The object in config.json. Raises BadModel."""
    for file in files:
        if file.name == "config.json":
            try:
                raw = json.loads(Path(file.path).read_text(encoding="utf-8"))
            except ValueError as error:
                raise BadModel(f"config.json is not JSON: {error}") from error
            if isinstance(raw, dict):
                return raw
            raise BadModel("config.json is not a JSON object")
    raise BadModel("the model has safetensors but no config.json")
