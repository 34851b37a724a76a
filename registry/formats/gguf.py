"""The GGUF container: metadata, and where each tensor's bytes lie.

    "GGUF" | version u32 | n_tensors u64 | n_kv u64 | kv pairs | tensor table | padding | data

Dimensions are stored fastest first; shapes here are the reverse, as torch has them. A row is a
whole number of blocks. Reads the header alone, never the data. Source: the GGUF specification in
the ggml repository (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import FormatError

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_NESTING = 1  # arrays of arrays exist in the specification, not in files

# type id -> (name, elements of a block, bytes of a block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# general.file_type -> the name that people know the quantisation by
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]  # as torch has it: the last dimension is contiguous
    type: str  # a name of TENSOR_TYPES
    offset: int
    size_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A whole header."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantization(self) -> str:
        """The name people know, or the type that holds most of the weights."""
        name = FILE_TYPES.get(self.metadata.get("general.file_type", -1))
        if name is not None:
            return name
        bytes_by_type: dict[str, int] = {}
        for tensor in self.tensors.values():
            bytes_by_type[tensor.type] = bytes_by_type.get(tensor.type, 0) + tensor.size_bytes
        return max(bytes_by_type, key=lambda type: bytes_by_type[type], default="unknown")


def read_header(path: Path) -> GGUFHeader:
    """Raises FormatError naming the file and the place, OSError if it can't be opened."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise FormatError(f"{path.name}: {size} bytes are too few for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data, size).read()
            except FormatError as error:
                raise FormatError(f"{path.name}: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 0

    def read(self) -> GGUFHeader:
        if self._take(4) != MAGIC:
            raise FormatError("not a GGUF file (the first four bytes are not 'GGUF')")
        version = self._u32()
        if version not in (2, 3):
            raise FormatError(f"GGUF version {version} is not supported; 2 and 3 are")
        num_tensors = self._count("tensors", least_bytes=24)
        num_pairs = self._count("metadata entries", least_bytes=13)
        metadata = dict(self._pairs(num_pairs))
        tensors = list(self._tensors(num_tensors))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise FormatError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(version, metadata, self._placed(tensors, start))

    def _placed(self, tensors: list[TensorInfo], start: int) -> dict[str, TensorInfo]:
        placed: dict[str, TensorInfo] = {}
        for tensor in tensors:
            offset = start + tensor.offset
            end = offset + tensor.size_bytes
            if end > self._size:
                raise FormatError(
                    f"cut off: tensor {tensor.name} ends at byte {end}, the file at {self._size}"
                )
            if tensor.name in placed:
                raise FormatError(f"tensor {tensor.name} occurs twice")
            placed[tensor.name] = TensorInfo(
                tensor.name, tensor.shape, tensor.type, offset, tensor.size_bytes
            )
        return placed

    def _pairs(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self._string()
            yield key, self._value(self._u32(), key, 0)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < MAX_NESTING:
            return self._array(key, depth)
        raise FormatError(f"metadata {key}: value type {kind} at byte {self._at} is unknown")

    def _array(self, key: str, depth: int) -> list[Any]:
        kind = self._u32()
        count = self._u64()
        if kind in _SCALARS:
            code = _SCALARS[kind][1:]
            raw = self._take(count * struct.calcsize(code), f"metadata {key}")
            return list(struct.unpack(f"<{count}{code}", raw))
        if count * 8 > self._size - self._at:
            raise FormatError(f"metadata {key}: {count} entries can't fit the file")
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has a quarter of a million of them: one loop, few calls."""
        data, size, at = self._data, self._size, self._at
        length_of = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > size:
                raise FormatError(f"cut off at byte {at}, inside a list of strings")
            (length,) = length_of(data, at)
            at += 8
            if length > size - at:
                raise FormatError(f"a string of {length} bytes at {at} is longer than the file")
            strings.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return strings

    def _tensors(self, count: int) -> Iterator[TensorInfo]:
        for _ in range(count):
            name = self._string()
            num_dims = self._u32()
            if not 1 <= num_dims <= MAX_DIMENSIONS:
                raise FormatError(f"tensor {name} has {num_dims} dimensions")
            dims = [self._u64() for _ in range(num_dims)]
            type_id = self._u32()
            offset = self._u64()
            if type_id not in TENSOR_TYPES:
                raise FormatError(f"tensor {name}: type number {type_id} is unknown")
            type_name, block, block_bytes = TENSOR_TYPES[type_id]
            yield TensorInfo(
                name,
                tuple(reversed(dims)),
                type_name,
                offset,
                self._tensor_bytes(name, dims, block, block_bytes),
            )

    def _tensor_bytes(self, name: str, dims: list[int], block: int, block_bytes: int) -> int:
        if dims[0] % block:
            raise FormatError(f"tensor {name}: a row of {dims[0]} is not a multiple of {block}")
        size = dims[0] // block * block_bytes
        for dim in dims[1:]:
            size *= dim
        if not 0 < size <= self._size:
            raise FormatError(f"tensor {name} would take {size} bytes, the file has {self._size}")
        return size

    def _count(self, what: str, least_bytes: int) -> int:
        count = self._u64()
        if count * least_bytes > self._size:
            raise FormatError(f"{count} {what} can't fit a file of {self._size} bytes")
        return count

    def _string(self) -> str:
        return self._take(self._u64()).decode("utf-8", "replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _u32(self) -> int:
        return int(self._scalar("<I"))

    def _u64(self) -> int:
        return int(self._scalar("<Q"))

    def _take(self, count: int, what: str = "the header") -> bytes:
        if count > self._size - self._at:
            raise FormatError(f"cut off: {what} wants {count} bytes at {self._at} of {self._size}")
        raw = self._data[self._at : self._at + count]
        self._at += count
        return raw
