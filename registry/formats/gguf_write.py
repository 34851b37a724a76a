"""Writing a GGUF file: metadata as raw pairs, tensors as streams of bytes. Standard library only.

Sizes are known before the first byte, so the file is written once from front to back, whatever its
size. Source: as in gguf.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from .gguf import MAGIC, TENSOR_TYPES

VERSION = 3
ALIGNMENT = 32
TYPE_IDS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_U32 = 4


@dataclass(frozen=True, slots=True)
class TensorOut:
    """A tensor to write. `shape` rows first; `chunks` are its bytes, in order."""

    name: str
    shape: tuple[int, ...]
    type: str
    chunks: Callable[[], Iterable[bytes]]

    @property
    def size_bytes(self) -> int:
        """How long its bytes are together."""
        _, block, block_bytes = TENSOR_TYPES[TYPE_IDS[self.type]]
        count = 1
        for dim in self.shape:
            count *= dim
        return count // block * block_bytes


def uint_pair(key: str, value: int) -> tuple[str, bytes]:
    """A metadata pair whose value is an unsigned 32-bit number."""
    return key, _string(key) + struct.pack("<II", _U32, value)


def write_gguf(
    file: BinaryIO,
    pairs: Sequence[tuple[str, bytes]],
    tensors: Sequence[TensorOut],
    on_written: Callable[[int], None] = lambda size: None,
) -> None:
    """The whole file. `on_written` is told the tensors' bytes so far."""
    alignment = _alignment(pairs)
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(pairs)))
    for _, raw in pairs:
        file.write(raw)
    offset = 0
    for tensor in tensors:
        file.write(_described(tensor, offset))
        offset += tensor.size_bytes + _padding(tensor.size_bytes, alignment)
    file.write(bytes(_padding(file.tell(), alignment)))
    done = 0
    for tensor in tensors:
        written = 0
        for chunk in tensor.chunks():
            file.write(chunk)
            written += len(chunk)
            on_written(done + written)
        assert written == tensor.size_bytes, f"{tensor.name}: {written} of {tensor.size_bytes}"
        done += written
        file.write(bytes(_padding(written, alignment)))


def _described(tensor: TensorOut, offset: int) -> bytes:
    dims = tuple(reversed(tensor.shape))
    return (
        _string(tensor.name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", TYPE_IDS[tensor.type], offset)
    )


def _alignment(pairs: Sequence[tuple[str, bytes]]) -> int:
    for key, raw in pairs:
        if key == "general.alignment":
            return int.from_bytes(raw[-4:], "little")
    return ALIGNMENT


def _padding(size: int, alignment: int) -> int:
    return -size % alignment


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
