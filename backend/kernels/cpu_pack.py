"""Weights in the layout that the compiled CPU kernels read.

A matrix [N, K] is cut into strips of 8 outputs, and a strip into blocks of 32 inputs, which lie one
after the other as the kernel walks them. Two forms; scales and offsets are float16, one of each for
an output's 32 inputs:

    4 bit   w = scale · q + offset, q in 0..15     160 bytes a block, 5 bits a weight
            128 bytes of nibbles, [4 quarters][8 outputs][4 inputs]; a quarter's low nibbles are its
            inputs 0..3, the high ones 4..7; then 8 scales, 8 offsets
    8 bit   w = scale · q, q in -127..127          272 bytes a block, 8.5 bits a weight
            256 bytes, [16 pairs of inputs][8 outputs][2 inputs]; then 8 scales

GGUF's Q4_0 and Q4_1 go into the first without any loss, Q8_0 into the second; all other types are
rounded to 8 bit. A matrix with such outliers that rounding would cost more than MAX_ROUNDING_ERROR
of its norm stays in 16 bits, as bfloat16 of [N / 32][K][32 outputs].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRIP = 8
BLOCK = 32
COLUMNS = 32  # outputs that lie together in 16 bits
BLOCK_BYTES = {4: 160, 8: 272}
MAX_ROUNDING_ERROR = 0.008  # normally distributed weights lose 0.005


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`data` is uint8, 64-byte aligned. `bits` is 4, 8 or 16."""

    data: Tensor
    bits: int
    num_outputs: int
    num_inputs: int

    @property
    def size_bytes(self) -> int:
        return self.data.numel()


def fits(num_outputs: int, num_inputs: int) -> bool:
    """Only whole strips and blocks can be packed."""
    return num_outputs % STRIP == 0 and num_inputs % BLOCK == 0


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding to 8 bit is expected to cost: squares of norms, which add up over pieces."""

    scale_squares: float = 0.0
    weight_squares: float = 0.0

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            self.scale_squares + other.scale_squares, self.weight_squares + other.weight_squares
        )

    @property
    def error(self) -> float:
        """The rounding error's norm by the weights' norm.

        Rounding to whole numbers leaves a variance of 1/12: the scales alone tell the error.
        """
        if self.weight_squares <= 0:
            return 0.0
        return math.sqrt(self.scale_squares * BLOCK / 12 / self.weight_squares)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Rounding]:
    """weight [N, K] float32: int8 [N, K / 32, 32], float16 scales [N, K / 32], and the cost.

    Each 32 inputs of an output share a scale: their largest magnitude / 127.
    """
    n, k = weight.shape
    blocks = weight.view(n, k // BLOCK, BLOCK)
    scale = (torch.linalg.vector_norm(blocks, torch.inf, dim=-1) / 127).half()
    wide = scale.float()
    inverse = torch.where(scale > 0, 1 / wide, 0.0)
    quants = (blocks * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
    return quants, scale, Rounding(_squares(wide), _squares(weight))


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values).item()) ** 2


def pack_8bit(weight: Tensor) -> PackedMatrix:
    """weight [N, K] float, rounded."""
    quants, scale, _ = rounded(weight.float())
    return join_8bit(quants, scale)


def pack_16bit(weight: Tensor) -> PackedMatrix:
    """weight [N, K] float, N a multiple of 32: bfloat16, nothing else lost."""
    n, k = weight.shape
    columns = weight.bfloat16().view(n // COLUMNS, COLUMNS, k).transpose(1, 2)
    flat, shaped = _aligned_empty((n // COLUMNS, k, 2 * COLUMNS))
    shaped.view(torch.bfloat16).copy_(columns)
    return PackedMatrix(flat, 16, n, k)


def empty(bits: int, num_outputs: int, num_inputs: int) -> PackedMatrix:
    """A matrix of 4 or 8 bit that is still to be written, strip by strip."""
    num_blocks = num_inputs // BLOCK
    flat, _ = _aligned_empty((num_outputs // STRIP, num_blocks, BLOCK_BYTES[bits]))
    return PackedMatrix(flat, bits, num_outputs, num_inputs)


def strips(matrix: PackedMatrix, begin: int, end: int) -> Tensor:
    """The bytes of these outputs, whole strips: uint8 [strips, K / 32, bytes of a block]."""
    num_blocks = matrix.num_inputs // BLOCK
    shaped = matrix.data.view(-1, num_blocks, BLOCK_BYTES[matrix.bits])
    return shaped[begin // STRIP : end // STRIP]


def write_8bit(out: Tensor, quants: Tensor, scale: Tensor) -> None:
    """quants int8 [N, K / 32, 32], scale float16 [N, K / 32], into `strips` of a matrix."""
    n, num_blocks, _ = quants.shape
    pairs = quants.contiguous().view(torch.int16).view(n // STRIP, STRIP, num_blocks, BLOCK // 2)
    in_order = pairs.permute(0, 2, 3, 1).contiguous()
    out[..., : STRIP * BLOCK] = in_order.view(torch.uint8).view(n // STRIP, num_blocks, -1)
    out[..., STRIP * BLOCK :] = _by_strip(scale)


def write_4bit(out: Tensor, quants: Tensor, scale: Tensor, offset: Tensor) -> None:
    """quants uint8 [N, K / 32, 32] of 0..15, scale and offset float16 [N, K / 32]."""
    n, num_blocks, _ = quants.shape
    # Four inputs are one word of 32 bits: no value of 0..15 shifted by 4 leaves its byte.
    words = quants.contiguous().view(torch.int32).view(n // STRIP, STRIP, num_blocks, 4, 2)
    nibbles = (words[..., 0] | (words[..., 1] << 4)).permute(0, 2, 3, 1).contiguous()
    half = STRIP * BLOCK // 2
    out[..., :half] = nibbles.view(torch.uint8).view(n // STRIP, num_blocks, half)
    out[..., half : half + 2 * STRIP] = _by_strip(scale)
    out[..., half + 2 * STRIP :] = _by_strip(offset)


def join_8bit(quants: Tensor, scale: Tensor) -> PackedMatrix:
    """A whole matrix by `write_8bit`."""
    n, num_blocks, _ = quants.shape
    matrix = empty(8, n, num_blocks * BLOCK)
    write_8bit(strips(matrix, 0, n), quants, scale)
    return matrix


def join_4bit(quants: Tensor, scale: Tensor, offset: Tensor) -> PackedMatrix:
    """A whole matrix by `write_4bit`."""
    n, num_blocks, _ = quants.shape
    matrix = empty(4, n, num_blocks * BLOCK)
    write_4bit(strips(matrix, 0, n), quants, scale, offset)
    return matrix


def _by_strip(values: Tensor) -> Tensor:
    """float16 [N, blocks] to bytes [N / 8, blocks, 16]."""
    n, num_blocks = values.shape
    strips = values.view(n // STRIP, STRIP, num_blocks).transpose(1, 2).contiguous()
    return strips.view(torch.uint8).view(n // STRIP, num_blocks, 2 * STRIP)


def _aligned_empty(shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Bytes that begin at a multiple of 64, flat and in shape; torch promises that alignment."""
    flat = torch.empty(math.prod(shape), dtype=torch.uint8)
    assert flat.data_ptr() % 64 == 0
    return flat, flat.view(tuple(shape))


def unpack(matrix: PackedMatrix) -> Tensor:
    """The weights that the kernels see, float32 [N, K]. For tests and the load's self-test."""
    n, k = matrix.num_outputs, matrix.num_inputs
    if matrix.bits == 16:
        columns = matrix.data.view(torch.bfloat16).view(n // COLUMNS, k, COLUMNS)
        return columns.transpose(1, 2).reshape(n, k).float()
    num_strips, num_blocks = n // STRIP, k // BLOCK
    blocks = matrix.data.view(num_strips, num_blocks, -1)

    def halves(begin: int) -> Tensor:
        raw = blocks[..., begin : begin + 16].contiguous().view(torch.float16).float()
        return raw.transpose(1, 2).reshape(n, num_blocks, 1)

    if matrix.bits == 8:
        quants = blocks[..., :256].contiguous().view(torch.int8)
        quants = quants.view(num_strips, num_blocks, 16, STRIP, 2).permute(0, 3, 1, 2, 4)
        return (quants.reshape(n, num_blocks, BLOCK) * halves(256)).reshape(n, k)
    packed = blocks[..., :128].view(num_strips, num_blocks, 4, STRIP, 4)
    both = torch.stack((packed & 15, packed >> 4), dim=3)  # [strip, block, quarter, half, 8, 4]
    quants = both.permute(0, 4, 1, 2, 3, 5).reshape(n, num_blocks, BLOCK)
    return (quants * halves(128) + halves(144)).reshape(n, k)
