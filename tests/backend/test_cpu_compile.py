"""The kernels' compiler: a kernel computes what Python would, and what it can't say is refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmd.backend.kernels.cpu_launch import Launcher, _read, _write, why_not

from .compiled import Compiled

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"compiled kernels: {why_not()}")

cpu_compile = pytest.importorskip("llmd.backend.kernels.cpu_compile")
cpu_ir = pytest.importorskip("llmd.backend.kernels.cpu_ir")
cpu_tiles = pytest.importorskip("llmd.backend.kernels.cpu_tiles")

Table = cpu_compile.Table
TEN = 10


def collatz(start: int) -> int:
    steps = 0
    while start != 1 and steps < 1000:
        start = start // 2 if start % 2 == 0 else 3 * start + 1
        steps += 1
    return steps


def squares_but(end: int, skipped: int) -> int:
    total = 0
    for number in range(1, end, 2):
        if number == skipped:
            continue
        if number > 50:
            break
        total += number * number - min(number, TEN) + max(-number, -3)
    return total


def first_over(values: Table, count: int, limit: int) -> int:  # type: ignore[valid-type]
    for index in range(count):
        if values[index] > limit:  # type: ignore[index]
            return index
    return -1


def slices(text: int) -> int:
    parts = [text]
    return parts[0]


def mixed(x: float, n: int) -> float:
    return x * n


def compiled(function: Callable[..., Any], num_arguments: int) -> Compiled:
    return Compiled(cpu_compile.kernel(function), function.__name__, num_arguments)


def test_a_kernel_computes_what_python_computes() -> None:
    rng = random.Random(0)
    call = compiled(collatz, 1)
    starts = [rng.randrange(1, 10_000) for _ in range(50)]
    assert [call(start) for start in starts] == [collatz(start) for start in starts]
    call = compiled(squares_but, 2)
    for _ in range(50):
        end, skipped = rng.randrange(100), rng.randrange(60)
        assert call(end, skipped) == squares_but(end, skipped)


def test_a_table_is_read_where_it_lies() -> None:
    values = np.array([3, 1, 4, 1, 5], dtype=np.int64)
    call = compiled(first_over, 3)
    assert [call(values.ctypes.data, 5, limit) for limit in (0, 3, 4, 5)] == [0, 2, 4, -1]


def made_with(step: int) -> Callable[..., Any]:
    def stepped(value: int) -> int:
        return value + step

    return stepped


def test_a_kernel_sees_what_its_maker_was_given() -> None:
    assert [compiled(made_with(step), 1)(10) for step in (1, 5)] == [11, 15]


@pytest.mark.parametrize("function", [slices, mixed])
def test_what_a_kernel_cannot_say_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}, line \d"):
        cpu_compile.translate(cpu_compile.kernel(function), frozenset())


@pytest.mark.parametrize(("bits", "instruction"), [(4, "vpdpbusd"), (8, "vpdpwssd")])
def test_where_there_is_vnni_the_tiles_use_it(bits: int, instruction: str) -> None:
    """Compiled only: such a processor may not be here."""
    tile = cpu_tiles.tile_4bit(4, 2) if bits == 4 else cpu_tiles.tile_8bit(4, 2)

    def product(x: int, s: int, w: int, c: int) -> None:
        tile(x, 64, s, 16, w, 320, c, 64, 2)

    product.__globals__["tile"] = tile
    entry = cpu_compile.kernel(product)
    found = [
        instruction
        in cpu_compile.assembly(
            cpu_compile.translate(entry, features), "sapphirerapids", "+avx512vnni,+avx512vl"
        )
        for features in (frozenset({"vnni"}), frozenset())
    ]
    assert found == [True, False]


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_float_tile_keeps_its_twelve_sums_in_registers(is_narrow: bool, adds: bool) -> None:
    """A sum that goes by the stack waits for it at each step: attention took twice as long."""
    tile = cpu_ir.float_tile(3, is_narrow, adds)

    def product(a: int, b: int, c: int, depth: int) -> None:
        tile(a, 256, b, 128, c, 128, depth, a, 0)

    product.__globals__["tile"] = tile
    text = cpu_compile.translate(cpu_compile.kernel(product), frozenset())
    code = cpu_compile.assembly(text, "znver3", "+avx2,+fma,+f16c")
    assert code.count("vfmadd") == 12
    assert not [line for line in code.splitlines() if "ymm" in line and "(%rsp)" in line]


def test_damaged_code_in_the_cache_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "kernels.o"
    assert _read(path) is None
    _write(path, b"machine code")
    assert _read(path) == b"machine code"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    assert _read(path) is None


def test_one_thread_needs_no_runtime() -> None:
    assert Launcher(num_threads=1).num_threads == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("OMP_DYNAMIC", "true", 1), ("OMP_THREAD_LIMIT", "1", 1), ("OMP_NUM_THREADS", "1", 2)],
)
def test_threads_that_openmp_may_not_give_are_not_waited_for(
    name: str, value: str, expected: int
) -> None:
    code = (
        "from llmd.backend.kernels.cpu_launch import Launcher, self_test\n"
        "launcher = Launcher(2)\n"
        "print(launcher.max_threads, self_test(launcher) or 'sound')"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.split() == [str(expected), "sound"], ran.stderr
