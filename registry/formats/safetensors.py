"""The header of a safetensors file: dtype, shape and place of each tensor. Standard library only.

    8 bytes     N, little-endian
    N bytes     JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    the rest    the tensors' data; offsets count from here

Nothing is believed: N is compared with the file's size before it is read, and each tensor must lie
inside the file and be as long as its dtype and shape say. No code of the file is ever run.

Source: the format's description in the safetensors project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FormatError

MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors
MAX_DIMS = 16
MAX_DIM = 1 << 62

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies in its file."""

    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int  # absolute, in the file
    size_bytes: int

    @property
    def num_elements(self) -> int:
        """How many weights it holds."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All that stands before the tensors' data."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @property
    def num_parameters(self) -> int:
        """Weights of all tensors together."""
        return sum(tensor.num_elements for tensor in self.tensors.values())


def read_header(path: Path, name: str | None = None) -> SafetensorsHeader:
    """Raises FormatError, whose text names the file, and OSError if it cannot be read.

    `name` is what the file is called in such a text, where its path says little.
    """
    try:
        return _read(path)
    except FormatError as error:
        raise FormatError(
            f"{name or path.name} is not a usable safetensors file: {error}"
        ) from None


def _read(path: Path) -> SafetensorsHeader:
    file_size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_size < 8 or length > file_size - 8:
            raise FormatError(
                f"it is truncated or damaged: a header of {length} bytes is announced, the file "
                f"has {file_size}"
            )
        if length > MAX_HEADER_BYTES:
            raise FormatError(f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
        header = _json_object(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError("its __metadata__ is no object")
    data_offset = 8 + length
    tensors = {name: _tensor(name, entry, data_offset, file_size) for name, entry in header.items()}
    return SafetensorsHeader(
        {key: str(value) for key, value in metadata.items()}, tensors, data_offset
    )


def _json_object(data: bytes) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise FormatError("its header is no JSON object")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its header is no JSON ({str(error)[:100]})") from None
    assert isinstance(header, dict), "JSON that begins with a brace is an object"
    return header


def _tensor(name: str, entry: object, base: int, file_size: int) -> TensorInfo:
    shown = repr(name[:100])
    if not isinstance(entry, dict):
        raise FormatError(f"tensor {shown} has no description")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(
            f"tensor {shown} has the unknown dtype {str(dtype)[:40]!r}; known are "
            + ", ".join(DTYPE_BITS)
        )
    shape = _integers(entry.get("shape"), MAX_DIMS)
    offsets = _integers(entry.get("data_offsets"), 2)
    if shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"tensor {shown} has a wrong shape or wrong offsets")
    begin, end = offsets
    if begin > end or base + end > file_size:
        raise FormatError(
            f"it is truncated: tensor {shown} lies at {begin} to {end} of {file_size - base} bytes"
        )
    info = TensorInfo(name, dtype, tuple(shape), base + begin, end - begin)
    if info.num_elements * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise FormatError(f"tensor {shown} is not as long as its shape says")
    return info


def _integers(value: object, max_length: int) -> list[int] | None:
    """The value, if it is a list of so many counts at most."""
    if not isinstance(value, list) or len(value) > max_length:
        return None
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_DIM:
            return None
    return value
