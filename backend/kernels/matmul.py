"""Products with group-quantised weights in Triton, dequantised in registers; twins in `packed`.

One kernel, two shapes of tile: few rows (decode) are bound by reading the weight, so the tile is 16
rows, the columns of the weight are split over programs, and a fixed number of partial sums is added
in a fixed order; many rows (prefill) are bound by the matrix unit. The number of parts depends on
the weight alone, and so a row's bits do not depend on how many others there are, up to the change
of shape at SMALL_M rows.

`accumulate` is what `moe` shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dot import dot
from .packed import PackedWeight
from .tiles import SMALL_M, Tile

WANTED_PROGRAMS = 256  # two per multiprocessor of a large card


@triton.jit
def scaled(
    q,
    column,
    scale_row_ptr,
    offset_row_ptr,
    num_groups,
    dtype: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_FP4: tl.constexpr,
):
    """Codes [N, WIDTH] to weights. Runs of RUN of them share a scale; the r-th run begins at
    column + (r * RUN // 32) * STEP + r * RUN % 32, as half chunks lie STEP apart."""
    RUN: tl.constexpr = 16 if GROUP == 16 else 32
    RUNS: tl.constexpr = WIDTH // RUN
    runs = tl.arange(0, RUNS) * RUN
    group = (column + runs // 32 * STEP + runs % 32) // GROUP
    real = (group < num_groups)[None, :]
    scales = tl.load(scale_row_ptr[:, None] + group[None, :], mask=real, other=0)
    if IS_FP4:
        exponent = (q >> 1) & 3
        half = (q & 1).to(tl.float32) * 0.5
        power = (1 << exponent).to(tl.float32) * 0.5
        values = tl.where(exponent == 0, half, (1.0 + half) * power)
        values = tl.where(q > 7, -values, values)
        scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        values = q.to(tl.float32) - ZERO
        scales = scales.to(tl.float32)
    values = tl.reshape(values, (N, RUNS, RUN)) * scales[:, :, None]
    if HAS_OFFSETS:
        offsets = tl.load(offset_row_ptr[:, None] + group[None, :], mask=real, other=0.0)
        values = values + offsets.to(tl.float32)[:, :, None]
    return tl.reshape(values, (N, WIDTH)).to(dtype)


@triton.jit
def accumulate(
    acc,
    x_row_ptr,
    real_rows,
    low_row_ptr,
    high_row_ptr,
    scale_row_ptr,
    offset_row_ptr,
    begin,
    end,
    num_columns,
    num_groups,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_FP4: tl.constexpr,
):
    """acc [M, BLOCK_N] + x[:, begin:end] @ weight[:, begin:end]^T. begin is a multiple of BLOCK_K,
    a multiple of 64. The row pointers are vectors: x's [M], the weight's tensors' [BLOCK_N]."""
    dtype: tl.constexpr = x_row_ptr.dtype.element_ty
    if BITS == 16:
        columns = tl.arange(0, BLOCK_K)
        for start in range(begin, end, BLOCK_K):
            k = start + columns
            real = k < num_columns
            x = tl.load(
                x_row_ptr[:, None] + k[None, :], mask=real_rows[:, None] & real[None, :], other=0.0
            )
            w = tl.load(low_row_ptr[:, None] + k[None, :], mask=real[None, :], other=0.0)
            acc = dot(x, tl.trans(w.to(dtype)), acc)
    elif BITS == 8:
        columns = tl.arange(0, BLOCK_K)
        for start in range(begin, end, BLOCK_K):
            k = start + columns
            real = k < num_columns
            x = tl.load(
                x_row_ptr[:, None] + k[None, :], mask=real_rows[:, None] & real[None, :], other=0.0
            )
            q = tl.load(low_row_ptr[:, None] + k[None, :], mask=real[None, :], other=0)
            w = scaled(
                q,
                start,
                scale_row_ptr,
                offset_row_ptr,
                num_groups,
                dtype,
                BLOCK_N,
                BLOCK_K,
                32,
                ZERO,
                GROUP,
                HAS_OFFSETS,
                IS_FP4,
            )
            acc = dot(x, tl.trans(w), acc)
    else:
        WIDTH: tl.constexpr = BLOCK_K // 2
        lanes = tl.arange(0, WIDTH)
        columns = lanes // 32 * 64 + lanes % 32
        for start in range(begin, end, BLOCK_K):
            first = start + columns
            second = first + 32
            # Whole chunks are there; in the padding of the last one x is masked.
            real = first // 64 * 64 < num_columns
            low = tl.load(
                low_row_ptr[:, None] + (start // 2 + lanes)[None, :], mask=real[None, :], other=0
            )
            q_first = low & 15
            q_second = low >> 4
            if BITS > 4:
                HIGH: tl.constexpr = BITS - 4
                BYTES: tl.constexpr = 8 * HIGH
                place = (start // 64 + lanes // 32) * BYTES + lanes % BYTES
                high = tl.load(high_row_ptr[:, None] + place[None, :], mask=real[None, :], other=0)
                high = (high.to(tl.int32) >> ((lanes % 32) // BYTES * (2 * HIGH))[None, :]) & (
                    (1 << (2 * HIGH)) - 1
                )
                q_first = q_first.to(tl.int32) | ((high & ((1 << HIGH) - 1)) << 4)
                q_second = q_second.to(tl.int32) | ((high >> HIGH) << 4)
            x = tl.load(
                x_row_ptr[:, None] + first[None, :],
                mask=real_rows[:, None] & (first < num_columns)[None, :],
                other=0.0,
            )
            w = scaled(
                q_first,
                start,
                scale_row_ptr,
                offset_row_ptr,
                num_groups,
                dtype,
                BLOCK_N,
                WIDTH,
                64,
                ZERO,
                GROUP,
                HAS_OFFSETS,
                IS_FP4,
            )
            acc = dot(x, tl.trans(w), acc)
            x = tl.load(
                x_row_ptr[:, None] + second[None, :],
                mask=real_rows[:, None] & (second < num_columns)[None, :],
                other=0.0,
            )
            w = scaled(
                q_second,
                start + 32,
                scale_row_ptr,
                offset_row_ptr,
                num_groups,
                dtype,
                BLOCK_N,
                WIDTH,
                64,
                ZERO,
                GROUP,
                HAS_OFFSETS,
                IS_FP4,
            )
            acc = dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def quantized_matmul_kernel(
    out_ptr,
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    num_rows,
    num_outputs,
    num_columns,
    part_columns,
    x_stride,
    low_stride,
    high_stride,
    scale_stride,
    out_stride_part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Programs: (tile of outputs, tile of rows, part of the columns)."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * part_columns
    end = tl.minimum(begin + part_columns, num_columns)
    # Outputs behind the last repeat it: they are read and not stored.
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    acc = accumulate(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
        x_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64) * x_stride,
        rows < num_rows,
        low_ptr + weight_rows * low_stride,
        high_ptr + weight_rows * high_stride,
        scale_ptr + weight_rows * scale_stride,
        offset_ptr + weight_rows * scale_stride,
        begin,
        end,
        num_columns,
        scale_stride,
        BLOCK_N,
        BLOCK_K,
        BITS,
        ZERO,
        GROUP,
        HAS_OFFSETS,
        IS_FP4,
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    place = out_ptr + tl.program_id(2) * out_stride_part + rows.to(tl.int64)[:, None] * num_outputs
    real = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(place + outputs[None, :], acc.to(out_ptr.dtype.element_ty), mask=real)


def num_parts(num_outputs: int, num_columns: int, config: Tile) -> int:
    """Into how many parts the columns are split, for few rows: a function of the weight alone."""
    tiles = triton.cdiv(num_outputs, config.block_n)
    longest = max(num_columns // (4 * config.block_k), 1)  # a part is four loads at least
    return int(max(min(WANTED_PROGRAMS // tiles, longest, 8), 1))


def quantized_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """As `packed.quantized_matmul`."""
    num_rows, num_columns = x.shape
    num_outputs = weight.num_rows
    assert num_columns == weight.num_columns, (num_columns, weight.num_columns)
    assert x.stride(-1) == 1
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    config = weight.tuned.tile(num_rows, x.element_size())
    parts = num_parts(num_outputs, num_columns, config) if num_rows <= SMALL_M else 1
    steps = triton.cdiv(num_columns, config.block_k)
    part_columns = triton.cdiv(steps, parts) * config.block_k
    target = out
    if parts > 1:
        shape = (parts, num_rows, num_outputs)
        target = torch.empty(shape, dtype=torch.float32, device=x.device)
    grid = (
        triton.cdiv(num_outputs, config.block_n),
        triton.cdiv(num_rows, config.block_m),
        parts,
    )
    quantized_matmul_kernel[grid](
        target,
        x,
        *pointers(weight),
        x if bias is None else bias,
        num_rows,
        num_outputs,
        num_columns,
        part_columns,
        x.stride(0),
        *strides(weight),
        num_rows * num_outputs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BITS=weight.bits,
        ZERO=weight.zero,
        GROUP=weight.group,
        HAS_OFFSETS=weight.offsets is not None,
        IS_FP4=weight.is_fp4,
        HAS_BIAS=bias is not None and parts == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts == 1:
        return out
    total = target.sum(dim=0)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def pointers(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors in the kernels' order; one that is not there is stood in for."""
    high = weight.low if weight.high is None else weight.high
    offsets = weight.scales if weight.offsets is None else weight.offsets
    return weight.low, high, weight.scales, offsets


def strides(weight: PackedWeight) -> tuple[int, int, int]:
    """From row to row: low, high, scales (and offsets)."""
    high = 0 if weight.high is None else weight.high.stride(-2)
    return weight.low.stride(-2), high, weight.scales.stride(-2)
