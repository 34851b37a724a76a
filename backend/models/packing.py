"""A checkpoint's matrices in the layout of the compiled kernels, made on all cores.

    4 or 8 bit integers in the file  ──▶ the same integers
    anything else                    ──▶ rounded to 8 bit; in 16, if rounding would cost too much

GGUF's most frequent types are packed by compiled code (kernels.cpu_stored), straight from the
file's pages. All else goes through torch, to the same bits, in pieces of a few rows: what is
unpacked of a piece stays in a core's cache, and each core works for itself. torch's own threads
would meet after every one of the small operations of which packing consists, and wait there,
spinning, for a core that others use: on a busy machine that made loading ten times slower.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import cpu_pack
from ..kernels.cpu_launch import Launcher, pack_stored
from ..kernels.cpu_pack import PackedMatrix
from ..kernels.cpu_step import STORED_TYPES
from .checkpoint import Checkpoint, QuantBlocks
from .config import BadModel
from .container import StoredRows
from .dequantize import BLOCK_BYTES, BLOCK_SIZES, dequantize, integer_bits, quant_blocks

log = logging.getLogger("llmd.models")

PIECE = 1 << 18  # weights
COMPILED_PIECE = 1 << 22  # ... for compiled code: all threads share such a piece

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    """One stored matrix: its rows as integers, if it has such, and as floats."""

    num_rows: int
    num_inputs: int
    bits: int  # of the integers; 0: none
    stored: StoredRows | None = field(kw_only=True, default=None)  # as it lies in a GGUF
    integers: Callable[[int, int], QuantBlocks | None]  # of the rows from .. to
    floats: Callable[[int, int], Tensor]

    @property
    def is_compiled(self) -> bool:
        """There is compiled code that reads it."""
        return self.stored is not None and self.stored.type in STORED_TYPES


class Packer:
    """Packs matrices of one checkpoint. Made by `packing`, which ends its threads."""

    def __init__(
        self, checkpoint: Checkpoint, launcher: Launcher, pool: ThreadPoolExecutor
    ) -> None:
        self._checkpoint = checkpoint
        self._launcher = launcher
        self._pool = pool

    def matrix(self, names: Sequence[str]) -> PackedMatrix:
        """These stored matrices, one below the other. Raises BadModel if one does not fit."""
        parts = [self._part(name) for name in names]
        num_inputs = parts[0].num_inputs
        for name, part in zip(names, parts, strict=True):
            if part.num_inputs != num_inputs or not cpu_pack.fits(part.num_rows, num_inputs):
                raise BadModel(f"{name} has shape {(part.num_rows, part.num_inputs)}")
        kinds = {part.bits for part in parts}
        packed = self._exact(parts, kinds.pop()) if len(kinds) == 1 else None
        return packed or self._rounded(names[0], parts)

    def _part(self, name: str) -> _Part:
        stored = self._checkpoint.rows(name)
        if stored is not None and stored.raw.dim() == 2:
            return _of_stored(stored)
        blocks = self._checkpoint.blocks(name)
        if blocks is not None:
            return _of_integers(
                blocks, functools.cache(lambda: self._checkpoint.tensor(name, torch.float32))
            )
        return _of_floats(self._checkpoint.tensor(name, torch.float32))

    def _exact(self, parts: Sequence[_Part], bits: int) -> PackedMatrix | None:
        """The integers as they are stored; None if there are none, or one has no float16 scale."""
        if not bits:
            return None
        packed = cpu_pack.empty(bits, sum(part.num_rows for part in parts), parts[0].num_inputs)
        if all(part.is_compiled for part in parts):
            cost = self._by_compiled_code(parts, packed, bits)
            return packed if math.isfinite(cost.scale_squares) else None

        def pack(part: _Part, begin: int, end: int, row: int) -> bool:
            found = part.integers(begin, end)
            if found is None:
                return False
            out = cpu_pack.strips(packed, row, row + end - begin)
            if found.offset is None:
                cpu_pack.write_8bit(out, found.quants, found.scale)
            else:
                cpu_pack.write_4bit(out, found.quants, found.scale, found.offset)
            return True

        return packed if all(self._by_pieces(pack, parts)) else None

    def _by_compiled_code(
        self, parts: Sequence[_Part], packed: PackedMatrix, bits: int
    ) -> cpu_pack.Rounding:
        """What rounding costs; if the integers are kept, squares of scales that must be finite."""
        cost = cpu_pack.Rounding()
        for part, begin, end, row in _pieces(parts, COMPILED_PIECE):
            assert part.stored is not None
            out = cpu_pack.strips(packed, row, row + end - begin)
            raw, type = part.stored.raw[begin:end], part.stored.type
            cost += pack_stored(self._launcher, raw, type, bits, part.num_inputs, out)
            part.stored.let_go(begin, end)
        return cost

    def _rounded(self, name: str, parts: Sequence[_Part]) -> PackedMatrix:
        num_outputs = sum(part.num_rows for part in parts)
        packed = cpu_pack.empty(8, num_outputs, parts[0].num_inputs)

        def pack(part: _Part, begin: int, end: int, row: int) -> cpu_pack.Rounding:
            quants, scale, rounding = cpu_pack.rounded(part.floats(begin, end))
            cpu_pack.write_8bit(cpu_pack.strips(packed, row, row + end - begin), quants, scale)
            return rounding

        if all(part.is_compiled for part in parts):
            error = self._by_compiled_code(parts, packed, 0).error
        else:
            error = sum(self._by_pieces(pack, parts), cpu_pack.Rounding()).error
        if error <= cpu_pack.MAX_ROUNDING_ERROR or num_outputs % cpu_pack.COLUMNS:
            return packed
        log.warning("%s stays in 16 bits: 8 would be off by %.2f %%", name, 100 * error)
        return cpu_pack.pack_16bit(torch.cat([part.floats(0, part.num_rows) for part in parts]))

    def _by_pieces(
        self, pack: Callable[[_Part, int, int, int], T], parts: Sequence[_Part]
    ) -> list[T]:
        """`pack(part, from row, to row, row in the matrix)` of all pieces, in order."""
        return list(self._pool.map(lambda piece: pack(*piece), list(_pieces(parts))))


@contextmanager
def packing(checkpoint: Checkpoint, launcher: Launcher) -> Iterator[Packer]:
    """A packer, and threads for it. While it is open torch computes in one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(launcher.max_threads, "packing") as pool:
            yield Packer(checkpoint, launcher, pool)
    finally:
        torch.set_num_threads(before)


def _pieces(
    parts: Sequence[_Part], num_weights: int = PIECE
) -> Iterator[tuple[_Part, int, int, int]]:
    row = 0
    for part in parts:
        step = max(num_weights // part.num_inputs // cpu_pack.COLUMNS, 1) * cpu_pack.COLUMNS
        for begin in range(0, part.num_rows, step):
            yield part, begin, min(begin + step, part.num_rows), row + begin
        row += part.num_rows


def _of_stored(stored: StoredRows) -> _Part:
    raw, type = stored.raw, stored.type
    num_inputs = raw.shape[1] // BLOCK_BYTES[type] * BLOCK_SIZES[type]

    def integers(begin: int, end: int) -> QuantBlocks | None:
        found = quant_blocks(raw[begin:end].reshape(-1), type, end - begin)
        stored.let_go(begin, end)
        return found

    def floats(begin: int, end: int) -> Tensor:
        found = dequantize(raw[begin:end].reshape(-1), type, torch.float32).view(-1, num_inputs)
        stored.let_go(begin, end)
        return found

    return _Part(len(raw), num_inputs, integer_bits(type), integers, floats, stored=stored)


def _of_integers(blocks: QuantBlocks, floats: Callable[[], Tensor]) -> _Part:
    """`floats` are asked for only if the integers of another part are of another kind."""
    num_rows, num_blocks, size = blocks.quants.shape
    return _Part(
        num_rows,
        num_blocks * size,
        blocks.bits,
        lambda begin, end: blocks.rows(lambda rows: rows[begin:end]),
        lambda begin, end: floats()[begin:end],
    )


def _of_floats(weight: Tensor) -> _Part:
    num_rows, num_inputs = weight.shape
    return _Part(
        num_rows, num_inputs, 0, lambda begin, end: None, lambda begin, end: weight[begin:end]
    )
