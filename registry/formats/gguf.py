"""The header of a GGUF file: its metadata and where each tensor lies. Standard library only.

    "GGUF"  version  num_tensors  num_pairs     4 + 4 + 8 + 8 bytes, little-endian
    pairs   key, type, value                    strings and arrays are counted, not ended
    tensors name, dims (fastest first), type, offset from the start of the data
    data    begins at the next multiple of `general.alignment`

Nothing in the file is believed: every count is compared with the bytes that are there before memory
is taken for it, and every tensor must lie inside the file. Whatever is wrong ends in FormatError.
Read, not mapped: a file that another process cuts short meanwhile must not kill the daemon.

A vocabulary is 100,000 strings, so strings are parsed in one tight loop; the first read takes what
is enough for most headers, and a larger one is read again with all that a header may have.

Source: the GGUF specification of the ggml project (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import FormatError

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIRST_READ_BYTES = 8 << 20  # a vocabulary of 262,144; one of 128,256 with its merges
MAX_HEADER_BYTES = 24 << 20  # half as much again as a vocabulary of 262,144 with its merges
MAX_ITEMS = 1 << 20  # of one list; twice the longest in use
MAX_ITEMS_IN_ALL = 3 << 19  # of all lists together; a vocabulary of 262,144 has 1.3 million
MAX_ENTRIES = 1 << 15  # tensors, or pairs; ten times the most in use
MAX_DIMS = 4  # what ggml can hold
MAX_ARRAY_DEPTH = 2
MAX_TEXT_BYTES = 4 << 20  # of one text: a chat template, a licence
MAX_NESTED = 1024  # arrays in an array; no header in use has any

# Type id: (name, weights in a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
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
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# `general.file_type`: the mixture of types that the file's maker chose.
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
    39: "NVFP4",
    40: "Q1_0",
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type id: (struct format, array typecode, bytes).
_SCALARS: dict[int, tuple[str, str, int]] = {
    0: ("<B", "B", 1),
    1: ("<b", "b", 1),
    2: ("<H", "H", 2),
    3: ("<h", "h", 2),
    4: ("<I", "I", 4),
    5: ("<i", "i", 4),
    6: ("<f", "f", 4),
    _BOOL: ("<?", "B", 1),
    10: ("<Q", "Q", 8),
    11: ("<q", "q", 8),
    12: ("<d", "d", 8),
}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in torch order, rows first, as the reverse of ggml's."""

    name: str
    shape: tuple[int, ...]
    type: str  # a name of TENSOR_TYPES
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
class GGUFHeader:
    """All that stands before the tensors' data."""

    version: int
    metadata: Mapping[str, Any]  # int, float, bool, str, or a list of one of these
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" if it is missing."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def num_parameters(self) -> int:
        """Weights of all tensors together."""
        return sum(tensor.num_elements for tensor in self.tensors.values())


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF does. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path, name: str | None = None, max_items: int = MAX_ITEMS) -> GGUFHeader:
    """Raises FormatError, whose text names the file, and OSError if it cannot be read.

    `name` is what the file is called in such a text, where its path says little. Lists longer than
    `max_items` are passed over and come out empty: who does not want a vocabulary saves its memory.
    """
    return _parsed(path, name or path.name, lambda parser: parser.header(), max_items)


def read_pairs(path: Path) -> list[tuple[str, bytes]]:
    """Each metadata key with its whole pair as it stands in the file, to be written elsewhere.

    Raises as `read_header` does.
    """
    return _parsed(path, path.name, lambda parser: parser.pairs())


def read_start(data: bytes, file_size: int, name: str) -> GGUFHeader | str | None:
    """What the first bytes of a file tell: its header; else, if that goes on after them, its
    architecture; None if not even that is known yet. Raises FormatError."""
    parser = _Parser(data, file_size, max_items=0)
    try:
        return parser.header()
    except _OutOfData:
        return parser.architecture
    except FormatError as error:
        raise FormatError(f"{name} is not a usable GGUF file: {error}") from None


def _parsed(path: Path, name: str, parse: Callable[[_Parser], T], max_items: int = MAX_ITEMS) -> T:
    file_size = path.stat().st_size
    limit = FIRST_READ_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(0)
            data = file.read(min(limit, file_size))
            try:
                return parse(_Parser(data, file_size, max_items))
            except _OutOfData:
                if len(data) < min(limit, file_size) or len(data) == file_size:
                    raise FormatError(
                        f"{name} is truncated: its header does not end within the file's "
                        f"{file_size} bytes"
                    ) from None
            except FormatError as error:
                raise FormatError(f"{name} is not a usable GGUF file: {error}") from None
            if limit >= MAX_HEADER_BYTES:
                raise FormatError(f"{name}: the header is larger than {MAX_HEADER_BYTES} bytes")
            limit = MAX_HEADER_BYTES
            del data  # not two of them at once


class _OutOfData(Exception):
    """The header goes on after the bytes that were read."""


class _Parser:
    """One pass over the first bytes of a file. `offset` is where the next item begins."""

    def __init__(self, data: bytes, file_size: int, max_items: int) -> None:
        self.data = data
        self.max_items = max_items
        self.file_size = file_size
        self.offset = 0
        self.num_items = 0  # of all lists so far
        self.architecture: str | None = None  # as soon as it was met

    def header(self) -> GGUFHeader:
        version, num_tensors, num_pairs = self._start()
        metadata = self._metadata(num_pairs)
        alignment = _alignment(metadata)
        raw: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(self._entries(num_tensors, 24, "tensors")):
            name, dims, type_id, offset = self._tensor()
            if name in raw:
                raise FormatError(f"two tensors are called {name[:100]!r}")
            raw[name] = (dims, type_id, offset)
        data_offset = -(-self.offset // alignment) * alignment
        tensors = {
            name: self._placed(name, dims, type_id, offset, data_offset, alignment)
            for name, (dims, type_id, offset) in raw.items()
        }
        return GGUFHeader(version, metadata, tensors, data_offset)

    def _start(self) -> tuple[int, int, int]:
        if self.data[:4] != MAGIC:
            raise FormatError("it does not begin with the letters GGUF")
        self.offset = 4
        version = int(self._scalar("<I"))
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise FormatError("it is big-endian, which is not supported")
            raise FormatError(f"its version is {version}; supported are 2 and 3")
        return version, int(self._scalar("<Q")), int(self._scalar("<Q"))

    def _metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._entries(num_pairs, 13, "metadata pairs")):
            key = self._string(strict=True)
            if key in metadata:
                raise FormatError(f"the key {key[:100]!r} stands there twice")
            metadata[key] = self._value(int(self._scalar("<I")), depth=0)
            if key == "general.architecture":
                self.architecture = str(metadata[key])
        return metadata

    def pairs(self) -> list[tuple[str, bytes]]:
        """The metadata, unread."""
        _, _, num_pairs = self._start()
        found = []
        for _ in range(self._entries(num_pairs, 13, "metadata pairs")):
            start = self.offset
            key = self._string(strict=True)
            self._value(int(self._scalar("<I")), depth=0)
            found.append((key, self.data[start : self.offset]))
        return found

    def _value(self, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(depth + 1)
        if type_id not in _SCALARS:
            raise FormatError(f"a metadata value has the unknown type {type_id}")
        return self._scalar(_SCALARS[type_id][0])

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise FormatError("metadata arrays are nested too deeply")
        type_id, count = int(self._scalar("<I")), int(self._scalar("<Q"))
        if type_id == _STRING:
            return self._strings(self._counted(count, 8, "strings"))
        if type_id in _SCALARS and count > self.max_items:
            size = _SCALARS[type_id][2]
            end = self.offset + self._counted(count, size, "array items") * size
            self._require(end)
            self.offset = end
            return []
        if type_id == _ARRAY:
            if count > MAX_NESTED:
                raise FormatError(f"{count} arrays are nested in one")
            return [self._array(depth + 1) for _ in range(self._counted(count, 12, "arrays"))]
        if type_id not in _SCALARS:
            raise FormatError(f"a metadata array has the unknown type {type_id}")
        _, typecode, item_size = _SCALARS[type_id]
        end = self.offset + self._counted(count, item_size, "array items") * item_size
        self._require(end)
        self._take(count)
        values = array(typecode, self._bytes_until(end))
        if struct.pack("=H", 1) != struct.pack("<H", 1):
            values.byteswap()
        return [value != 0 for value in values] if type_id == _BOOL else values.tolist()

    def _strings(self, count: int) -> list[str]:
        if count > self.max_items:
            self._pass_strings(count)
            return []
        self._take(count)
        data, offset, unpack = self.data, self.offset, _U64.unpack_from
        end = len(data)
        values: list[str] = []
        append = values.append
        try:
            for _ in range(count):
                start = offset + 8
                length = unpack(data, offset)[0]
                offset = start + length
                if offset > end or length > MAX_TEXT_BYTES:
                    self._require(offset, is_far=length > MAX_TEXT_BYTES)
                append(data[start:offset].decode("utf-8", "replace"))
        except struct.error:
            raise _OutOfData from None
        self.offset = offset
        return values

    def _pass_strings(self, count: int) -> None:
        data, offset, unpack, end = self.data, self.offset, _U64.unpack_from, len(self.data)
        try:
            for _ in range(count):
                offset += 8 + unpack(data, offset)[0]
                if offset > end:
                    self._require(offset)
        except struct.error:
            raise _OutOfData from None
        self.offset = offset

    def _string(self, strict: bool = False) -> str:
        length = int(self._scalar("<Q"))
        self._require(self.offset + length, is_far=length > MAX_TEXT_BYTES)
        try:
            text = self._bytes_until(self.offset + length)
            return text.decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError:
            raise FormatError("a name in it is not UTF-8") from None

    def _scalar(self, form: str) -> Any:
        start = self.offset
        end = start + struct.calcsize(form)
        self._require(end)
        self.offset = end
        return struct.unpack_from(form, self.data, start)[0]

    def _bytes_until(self, end: int) -> bytes:
        self._require(end)
        start, self.offset = self.offset, end
        return self.data[start:end]

    def _require(self, end: int, is_far: bool = False) -> None:
        if end > self.file_size:
            raise FormatError(
                f"it is truncated or damaged: {end} bytes are announced, the file has "
                f"{self.file_size}"
            )
        if is_far:
            raise FormatError(f"a text in it is longer than {MAX_TEXT_BYTES} bytes")
        if end > len(self.data):
            raise _OutOfData

    def _counted(self, count: int, item_size: int, what: str) -> int:
        """`count`, if that many items of at least this size can still follow."""
        if count * item_size > self.file_size - self.offset:
            raise FormatError(
                f"it is truncated or damaged: {count} {what} are announced, "
                f"{self.file_size - self.offset} bytes are left"
            )
        return count

    def _entries(self, count: int, item_size: int, what: str) -> int:
        """`count`, if a header may have so many of them."""
        if self._counted(count, item_size, what) > MAX_ENTRIES:
            raise FormatError(f"{count} {what} are announced, more than {MAX_ENTRIES}")
        return count

    def _take(self, count: int) -> None:
        """So many items of a list will be kept."""
        self.num_items += count
        if self.num_items > MAX_ITEMS_IN_ALL:
            raise FormatError(f"its lists have more than {MAX_ITEMS_IN_ALL} items")

    def _tensor(self) -> tuple[str, list[int], int, int]:
        name = self._string(strict=True)
        num_dims = int(self._scalar("<I"))
        if num_dims > MAX_DIMS:
            raise FormatError(f"tensor {name[:100]!r} has {num_dims} dimensions")
        dims = [int(self._scalar("<Q")) for _ in range(num_dims)]
        return name, dims, int(self._scalar("<I")), int(self._scalar("<Q"))

    def _placed(
        self, name: str, dims: list[int], type_id: int, offset: int, base: int, alignment: int
    ) -> TensorInfo:
        shown = repr(name[:100])
        if type_id not in TENSOR_TYPES:
            known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
            raise FormatError(f"tensor {shown} has the unknown type {type_id}; known are {known}")
        type_name, block_size, block_bytes = TENSOR_TYPES[type_id]
        row = dims[0] if dims else 1
        if row % block_size:
            raise FormatError(
                f"tensor {shown} has rows of {row}, no whole number of {type_name} blocks"
            )
        if offset % alignment:
            raise FormatError(f"tensor {shown} is not aligned to {alignment} bytes")
        info = TensorInfo(name, tuple(reversed(dims)), type_name, base + offset, 0)
        size = info.num_elements // block_size * block_bytes
        if base + offset + size > self.file_size:
            raise FormatError(
                f"it is truncated: tensor {shown} ends at byte {base + offset + size}, "
                f"the file has {self.file_size}"
            )
        return TensorInfo(name, info.shape, type_name, info.offset, size)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    is_sane = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20
    if not is_sane or value & (value - 1):
        raise FormatError(f"its alignment is {str(value)[:40]}, not a power of two")
    return int(value)
