"""The safetensors container: a JSON header, and where each tensor's bytes lie.

    header length u64 | JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data

Source: the format section of the safetensors README. Reads the header alone, never the data.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import FormatError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a name of DTYPE_BITS
    offset: int
    size_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors by name. Raises FormatError naming the file, OSError if it can't be opened."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if size < 8:
                raise FormatError(f"{size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise FormatError(f"a header of {length} bytes can't fit the file's {size}")
            return _tensors(_parse(file.read(length)), 8 + length, size)
        except FormatError as error:
            raise FormatError(f"{path.name}: {error}") from error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _tensors(header: dict[str, Any], start: int, size: int) -> dict[str, TensorInfo]:
    return {name: _tensor(name, entry, start, size) for name, entry in header.items()}


def _tensor(name: str, entry: Any, start: int, size: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"tensor {name} is described without {error}") from error
    whole = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in whole):
        raise FormatError(f"tensor {name}: its shape or offsets are not natural numbers")
    if dtype not in DTYPE_BITS:
        raise FormatError(f"tensor {name}: dtype {dtype!r} is unknown")
    if end > size - start or begin > end:
        raise FormatError(f"cut off: tensor {name} ends at byte {start + end}, the file at {size}")
    info = TensorInfo(name, tuple(shape), dtype, start + begin, end - begin)
    if info.num_elements * DTYPE_BITS[dtype] // 8 != info.size_bytes:
        raise FormatError(f"tensor {name}: {shape} of {dtype} are not {info.size_bytes} bytes")
    return info
