"""The operation MATMUL of a compiled step: quantised rows times packed weights. See cpu_program.

cpu_tiles has the inner loops and cpu_pack the layout. An item is 32 outputs of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import cpu_ir as vec
from . import cpu_tiles
from .cpu_compile import Intrinsic, Table, inlined, kernel
from .cpu_fetch import next_lines
from .cpu_step import BYTES_UNPACKED, CURSOR_BYTES, SCRATCH_STRIDE

MATMUL_STRIPS = 4  # of 8 outputs, an item
ROW_PANEL = 32  # rows that pass over an item's weights while both are in the nearest cache
UNPACK_ROWS = 16  # so many share unpacked weights


@inlined
def add_bias(out: int, bias: int, num_outputs: int) -> None:
    for column in range(num_outputs):
        at = out + column * 4
        vec.store_float(at, vec.load_float(at) + vec.load_float(bias + column * 4))


def _matmul(tiles: Sequence[Intrinsic], strip_alone: Intrinsic, block_bytes: int) -> Any:
    """Rows times the strips of an item, by tiles of two strips and one, two or four rows."""
    one, two, four = tiles

    @kernel
    def matmul(item: int, op: Table, num_rows: int) -> None:
        # op: x, scales, weights, inputs, outputs, out, bytes of an out row, bits, bias or 0, only
        # logit rows, number of the ATTEND that comes next or 0
        num_blocks, ldc = op[4] // 32, op[7]
        ldx, lds = num_blocks * 64, num_blocks * 8
        strip_bytes = num_blocks * block_bytes
        first = item * MATMUL_STRIPS
        last = min(first + MATMUL_STRIPS, op[5] // 8)
        for panel in range(0, num_rows, ROW_PANEL):
            end = min(panel + ROW_PANEL, num_rows)
            for strip in range(first, last, 2):
                w = op[3] + strip * strip_bytes
                row = panel
                while row < end:
                    x, s, c = op[1] + row * ldx, op[2] + row * lds, op[6] + row * ldc + strip * 32
                    if strip + 1 == last:
                        strip_alone(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 1
                    elif end - row >= 4:
                        four(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 4
                    elif end - row >= 2:
                        two(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 2
                    else:
                        one(x, ldx, s, lds, w, strip_bytes, c, ldc, num_blocks)
                        row += 1
        if op[9]:
            for row in range(num_rows):
                out = op[6] + row * ldc + first * 32
                add_bias(out, op[9] + first * 32, (last - first) * 8)

    return matmul


tiles4 = [cpu_tiles.tile_4bit(rows, 2) for rows in (1, 2, 4)]
tiles8 = [cpu_tiles.tile_8bit(rows, 2) for rows in (1, 2, 4)]
matmul4_packed = _matmul(tiles4, cpu_tiles.tile_4bit(1, 1), cpu_tiles.BYTES_4BIT)
matmul8 = _matmul(tiles8, cpu_tiles.tile_8bit(1, 1), cpu_tiles.BYTES_8BIT)

unpack_strips = cpu_tiles.unpack_4bit()
unpacked4, unpacked2, unpacked1 = (cpu_tiles.tile_unpacked(rows) for rows in (4, 2, 1))


@kernel
def matmul4(item: int, op: Table, num_rows: int, head: Table, scratch: int) -> None:
    """As matmul4_packed, and to the same bits; many rows pass over weights that were unpacked.

    They lie in this thread's scratch. So many rows take longer than memory does: the next strips,
    and keys and values of the next attention, are fetched meanwhile.
    """
    num_blocks, ldc = op[4] // 32, op[7]
    first = item * MATMUL_STRIPS
    room = head[SCRATCH_STRIDE] - CURSOR_BYTES
    is_whole = first + MATMUL_STRIPS <= op[5] // 8
    if num_rows < UNPACK_ROWS or num_blocks * BYTES_UNPACKED > room or not is_whole:
        matmul4_packed(item, op, num_rows)
        return
    ldx, lds = num_blocks * 64, num_blocks * 8
    strip_bytes = num_blocks * cpu_tiles.BYTES_4BIT
    for strip in range(first, first + MATMUL_STRIPS, 2):
        unpack_strips(op[3] + strip * strip_bytes, strip_bytes, scratch, num_blocks)
        later = op[3] + (strip + 2) * strip_bytes
        end = later + 2 * strip_bytes
        row = 0
        while row < num_rows:
            x, s, c = op[1] + row * ldx, op[2] + row * lds, op[6] + row * ldc + strip * 32
            ahead = later if later < end else scratch
            keys = scratch
            if op[11]:
                keys = next_lines(head, scratch, op[11], num_blocks * 128)
            later += num_blocks * 128
            if num_rows - row >= 4:
                unpacked4(x, ldx, s, lds, scratch, 0, c, ldc, num_blocks, ahead, keys)
            elif num_rows - row >= 2:
                unpacked2(x, ldx, s, lds, scratch, 0, c, ldc, num_blocks, ahead, keys)
            else:
                unpacked1(x, ldx, s, lds, scratch, 0, c, ldc, num_blocks, ahead, keys)
            row += 4 if num_rows - row >= 4 else 2 if num_rows - row >= 2 else 1
    if op[9]:
        for row in range(num_rows):
            add_bias(op[6] + row * ldc + first * 32, op[9] + first * 32, MATMUL_STRIPS * 8)


narrow3, narrow2, narrow1 = (vec.float_tile(n, True, False) for n in (3, 2, 1))


@kernel
def matmul16(item: int, op: Table, num_rows: int) -> None:
    # as the others; rows are float32, weights bfloat16 of [outputs / 32][inputs][32]
    inputs, ldc = op[4], op[7]
    w = op[3] + item * inputs * 64
    row = 0
    while row < num_rows:
        x, c = op[1] + row * inputs * 4, op[6] + row * ldc + item * 128
        if num_rows - row >= 3:
            narrow3(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        elif num_rows - row == 2:
            narrow2(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        else:
            narrow1(x, inputs * 4, w, 64, c, ldc, inputs, 0, 512)
        row += 3
    if op[9]:
        for row in range(num_rows):
            add_bias(op[6] + row * ldc + item * 128, op[9] + item * 128, 32)
