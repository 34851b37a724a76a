"""Runs the compiled program on all threads, and says whether this machine can.

The threads are those of torch's own OpenMP runtime, asked for through `GOMP_parallel`: a second
pool would fight the first one for the cores, as idle OpenMP threads spin. Where that library is not
to be found, the calling thread works alone.

The machine code is kept in the user's cache folder. Compiling takes about 15 s, once per machine
and version.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import Tensor

from . import cpu_pack

NEEDED_FEATURES = ("avx2", "fma", "f16c")


def why_not() -> str:
    """The reason why the compiled kernels can't run here; empty if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"no compiled kernels for {platform.machine()}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED_FEATURES if not features.get(name)]
    return f"this CPU has no {', '.join(missing)}" if missing else ""


class Launcher:
    """Compiled code and the threads to run it. Compiles on construction, or reads the cache."""

    def __init__(self, num_threads: int) -> None:
        # numba reads it when it is imported, and offers no other way
        os.environ["NUMBA_CACHE_DIR"] = str(_cache_folder())
        from . import cpu_program

        self.program: Any = cpu_program
        self._address = cpu_program.run.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._address)
        self._gomp = _gomp() if num_threads > 1 else None
        self.num_threads = num_threads if self._gomp is not None else 1

    def run(self, header_address: int) -> None:
        """Execute the step that is described there. Releases the GIL."""
        if self._gomp is None:
            self._call(header_address)
        else:
            self._gomp(self._address, header_address, self.num_threads, 0)


def _cache_folder() -> Path:
    """Where the machine code is kept: another folder for other sources, as numba itself looks at
    one of the two files alone."""
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in ("cpu_ir.py", "cpu_program.py"))
    name = f"kernels-{hashlib.sha256(sources).hexdigest()[:16]}"
    folder = platformdirs.user_cache_path("llmd", appauthor=False) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home
        return Path(tempfile.gettempdir()) / f"llmd-{getpass.getuser()}" / name
    return folder


def _gomp() -> Any:
    folder = Path(torch.__file__).parent
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    for path in found:
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


def self_test(launcher: Launcher) -> str:
    """What is wrong with the products of this machine's code; empty if they are right."""
    code = launcher.program
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((72, 96), generator=generator)
    rows = torch.randn((7, 96), generator=generator)
    nibbles = torch.randint(0, 16, (72, 3, 32), generator=generator, dtype=torch.uint8)
    halves = torch.rand((72, 3), generator=generator).half()
    for matrix in (cpu_pack.pack_8bit(weight), cpu_pack.join_4bit(nibbles, halves, -halves)):
        found = _product(launcher, code, rows, matrix)
        wanted = rows @ cpu_pack.unpack(matrix).T
        error = ((found - wanted).norm() / wanted.norm()).item()
        if not error < (0.01 if matrix.bits == 4 else 1e-3):
            return f"products of {matrix.bits}-bit weights are off by {error:.1%}"
    return ""


def _product(launcher: Launcher, code: Any, rows: Tensor, matrix: cpu_pack.PackedMatrix) -> Tensor:
    """rows · Wᵀ by two operations of a program."""
    num_rows, width = rows.shape
    quants = torch.zeros((num_rows, width), dtype=torch.int16)
    scales = torch.zeros((num_rows, width // 16))
    out = torch.zeros((num_rows, matrix.num_outputs))
    ops = np.zeros((2, code.OP_FIELDS), dtype=np.int64)
    inputs = (quants.data_ptr(), scales.data_ptr())
    ops[0, :6] = (code.QUANTIZE, rows.data_ptr(), width, matrix.bits, *inputs)
    ops[1, :9] = (
        code.MATMUL,
        *inputs,
        matrix.data.data_ptr(),
        width,
        matrix.num_outputs,
        out.data_ptr(),
        4 * matrix.num_outputs,
        matrix.bits,
    )
    counters = np.zeros(4, dtype=np.int64)
    header = np.zeros(code.HEADER_FIELDS, dtype=np.int64)
    header[code.NUM_OPS] = 2
    header[code.OPS] = ops.ctypes.data
    header[code.COUNTERS] = counters.ctypes.data
    header[code.ARRIVALS] = counters.ctypes.data + 16
    header[code.THREADS_SEEN] = counters.ctypes.data + 24
    header[code.NUM_THREADS] = launcher.num_threads
    header[code.NUM_ROWS] = num_rows
    launcher.run(header.ctypes.data)
    return out
