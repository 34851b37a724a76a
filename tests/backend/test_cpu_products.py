"""Products of many rows: the bits of each alone; and what they fetch meanwhile."""

from __future__ import annotations

import math
import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from llmd.backend.kernels import cpu_pack, cpu_step
from llmd.backend.kernels.cpu_launch import Launcher, _product, why_not

from .compiled import Compiled

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"compiled kernels: {why_not()}")

Code = tuple[Compiled, Compiled]  # begins to fetch; says what comes next

KV_HEADS, DIM = 3, 64
HALF = KV_HEADS * DIM * cpu_step.BLOCK_SIZE * 2  # bytes of a block's keys
STRIDE = 5 * HALF  # from a block to the next
TARGET = 2
WINDOW = 40


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(2)


def irregular(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def matrix_4bit(outputs: int, inputs: int) -> cpu_pack.PackedMatrix:
    quants = (irregular(outputs, inputs // 32, 32).abs() * 6).clamp(max=15).to(torch.uint8)
    scales = irregular(outputs, inputs // 32).half()
    return cpu_pack.join_4bit(quants, scales, (3 * scales).half())


@pytest.mark.parametrize("inputs", [96, 576, 1536])
@pytest.mark.parametrize("outputs", [64, 72, 120])
@pytest.mark.parametrize("num_rows", [16, 19, 33])
def test_a_row_among_many_has_the_bits_that_it_has_alone(
    launcher: Launcher, inputs: int, outputs: int, num_rows: int
) -> None:
    rows, matrix = irregular(num_rows, inputs), matrix_4bit(outputs, inputs)
    together = _product(launcher, rows, matrix)
    alone = torch.cat([_product(launcher, row.unsqueeze(0), matrix) for row in rows])
    assert torch.equal(together, alone)
    wanted = rows @ cpu_pack.unpack(matrix).T
    assert (together - wanted).norm() < 0.02 * wanted.norm()


class Fetching:
    """A step of one thread or more whose products fetch for the attention at TARGET."""

    def __init__(self, tiles: list[tuple[int, int, list[int]]], threads: int, window: int) -> None:
        """Of each tile: the first query's position, how many there are, the block table."""
        self.tables = [np.array(table, dtype=np.int64) for _, _, table in tiles]
        rows = [
            (0, count, first, table.ctypes.data)
            for (first, count, _), table in zip(tiles, self.tables, strict=True)
        ]
        self.tiles = np.array(rows, dtype=np.int64).reshape(-1, cpu_step.TILE_FIELDS)
        self.ops = np.zeros((3, cpu_step.OP_FIELDS), dtype=np.int64)
        self.ops[TARGET, 2:4] = (10**9, 2 * 10**9)  # keys and values of block 0
        self.ops[TARGET, 7:12] = (window, 9, KV_HEADS, DIM, STRIDE)
        self.scratch = np.zeros(64 * threads, dtype=np.int64)
        self.header = np.zeros(cpu_step.HEADER_FIELDS, dtype=np.int64)
        self.header[cpu_step.OPS] = self.ops.ctypes.data
        self.header[cpu_step.NUM_TILES] = len(tiles)
        self.header[cpu_step.TILES] = self.tiles.ctypes.data
        self.header[cpu_step.NUM_THREADS] = threads
        self.header[cpu_step.SCRATCH_STRIDE] = 512

    def fetched(self, code: Code, me: int) -> list[int]:
        """The addresses that this thread asks for, 1,152 bytes at a time, until nothing is left."""
        begin, following = code
        head, scratch = self.header.ctypes.data, self.scratch.ctypes.data + 512 * me
        begin(head, scratch, me)
        found = []
        for _ in range(len(self.tiles) * 300):
            address = following(head, scratch, TARGET, 1152)
            if address != scratch:
                found.append(address)
        return found


def expected(tiles: list[tuple[int, int, list[int]]], window: int) -> list[int]:
    """Keys, then values, of the blocks that each tile sees; a prompt's whole tiles are left out."""
    found = []
    for first, count, table in tiles:
        begin = max(0, first - window + 1) // 32 if window else 0
        seen = table[begin : -(-(first + count) // 32)] if count < cpu_step.QUERY_TILE else []
        for block in seen:
            for base in (10**9, 2 * 10**9):
                found += [base + block * STRIDE + at for at in range(0, HALF, 1152)]
    return found


@pytest.fixture(scope="module")
def code() -> Code:
    from llmd.backend.kernels import cpu_fetch

    begin = Compiled(cpu_fetch.begin_fetching, "begin_fetching", 3)
    return begin, Compiled(cpu_fetch.next_lines, "next_lines", 4)


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_next_attention_is_fetched_once_and_in_its_order(
    code: Code, threads: int, window: int
) -> None:
    rng = random.Random(5)
    tiles = []
    for count in (1, 1, 8, 3, 1, 8, 1):
        first = rng.randrange(0, 300)
        tiles.append((first, count, rng.sample(range(1000), -(-(first + count) // 32))))
    step = Fetching(tiles, threads, window)
    found = [step.fetched(code, me) for me in range(threads)]
    assert list(chain(*found)) == expected(tiles, window)
    assert all(found)


def test_a_cursor_of_a_larger_step_reads_nothing_of_a_smaller_one(
    code: Code,
) -> None:
    step = Fetching([(100, 1, [1, 2, 3, 4])] * 4, 1, 0)
    begin, following = code
    head, scratch = step.header.ctypes.data, step.scratch.ctypes.data
    begin(head, scratch, 0)
    for _ in range(100):
        following(head, scratch, TARGET, 1152)
    step.header[cpu_step.NUM_TILES] = 1
    found = step.fetched(code, 0)
    assert found == expected([(100, 1, [1, 2, 3, 4])], 0)
