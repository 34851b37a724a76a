"""Runs the compiled program on all threads, and says whether this machine can.

The threads are those of torch's own OpenMP runtime, asked for through `GOMP_parallel`: a second
pool would fight the first one for the cores, as idle OpenMP threads spin. Where that library is not
to be found, the calling thread works alone.

Compiling takes about 3 s, once per machine and version (`prepare`): the object code is kept in the
user's cache folder, under a name made of the sources and the processor, with a checksum.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import importlib.util
import itertools
import logging
import math
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import Tensor

from . import cpu_pack, cpu_step
from .cpu_pack import Rounding
from .cpu_step import STORED_TYPES
from .cpu_threads import ThreadGovernor

log = logging.getLogger("llmd.kernels")

NEEDED_FEATURES = ("avx2", "fma", "f16c")
_PARTS = "compile ir tiles step rows attend stored fetch products program"
SOURCES = tuple(f"cpu_{part}.py" for part in _PARTS.split())


def why_not() -> str:
    """The reason why the compiled kernels can't run here; empty if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"no compiled kernels for {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED_FEATURES if not features.get(name)]
    return f"this CPU has no {', '.join(missing)}" if missing else ""


class Launcher:
    """Compiled code and the threads to run it. Compiles on construction, or reads the cache."""

    def __init__(self, num_threads: int) -> None:
        from . import cpu_compile

        self._code = cpu_compile.Loaded(_object_code())  # the addresses below lie in it
        self._address = self._code.address_of("run")
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._address)
        self._gomp: Any = None
        limit = 1
        if num_threads > 1:
            self._gomp, limit = _gomp()
        self._threads = ThreadGovernor(min(num_threads, limit))

    @property
    def num_threads(self) -> int:
        """So many the next step gets, and its header must say so."""
        return self._threads.num_threads

    @property
    def max_threads(self) -> int:
        """`num_threads` never exceeds it."""
        return self._threads.max_threads

    def run(self, header: Any) -> None:
        """Execute the step that this int64 array describes. Releases the GIL."""
        threads, address = self._threads.num_threads, header.ctypes.data
        header[cpu_step.NUM_THREADS] = threads
        began, busy = time.perf_counter(), time.process_time()
        if self._gomp is None or threads == 1:
            self._call(address)
        else:
            self._gomp(self._address, address, threads, 0)
        now = time.perf_counter()
        self._threads.observe(now - began, time.process_time() - busy, now)

    def run_alone(self, op: Sequence[int], num_items: int) -> None:
        """Execute one operation, whose items are rows or the like."""
        table = np.zeros(cpu_step.OP_FIELDS, dtype=np.int64)
        table[: len(op)] = op
        cells = np.zeros(40, dtype=np.int64)  # counter, arrivals, threads: lines of their own
        header = np.zeros(cpu_step.HEADER_FIELDS, dtype=np.int64)
        header[cpu_step.NUM_OPS], header[cpu_step.NUM_ROWS] = 1, num_items
        header[cpu_step.OPS], header[cpu_step.COUNTERS] = table.ctypes.data, cells.ctypes.data
        header[cpu_step.ARRIVALS] = cells.ctypes.data + 128
        header[cpu_step.THREADS_SEEN] = cells.ctypes.data + 256
        self.run(header)


def prepare() -> None:
    """What the first load would compile is compiled now: the installation calls this."""
    if not why_not():
        _object_code()


def pack_stored(
    launcher: Launcher, rows: Tensor, type: str, bits: int, num_inputs: int, out: Tensor
) -> Rounding:
    """Rows of GGUF blocks, as they lie in the file, into the strips of a packed matrix.

    rows uint8 [N, bytes of a row], N a multiple of 8; out uint8, contiguous. `bits` 4 or 8: the
    stored integers are kept; 0: the weights are rounded to 8 bit. Where a scale is no number, the
    squares of the answer are none.
    """
    assert rows.stride(1) == 1 and len(rows) % cpu_pack.STRIP == 0 and out.is_contiguous()
    sums = torch.empty((len(rows) // cpu_pack.STRIP, 2), dtype=torch.float32)
    source = (rows.data_ptr(), rows.stride(0), num_inputs // cpu_pack.BLOCK)
    op = (cpu_step.PACK, *source, out.data_ptr(), STORED_TYPES[type], bits, sums.data_ptr())
    launcher.run_alone(op, len(sums))
    return Rounding(*sums.sum(0, dtype=torch.float64).tolist())


def _object_code() -> bytes:
    """From the cache, else compiled and put there."""
    import llvmlite
    import llvmlite.binding as llvm

    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    flags = features.flatten()
    here = Path(__file__).parent
    key = hashlib.sha256(f"{llvmlite.__version__} {cpu} {flags}".encode())
    for name in SOURCES:
        key.update((here / name).read_bytes())
    path = _cache_folder() / f"kernels-{key.hexdigest()[:32]}.o"
    code = _read(path)
    if code is None:
        from . import cpu_compile, cpu_program  # what is compiled is not wanted otherwise

        text = cpu_compile.translate(cpu_program.run, intrinsic_features(features))
        code = cpu_compile.machine_code(text, cpu, flags)
        _write(path, code)
    return code


def intrinsic_features(features: Any) -> frozenset[str]:
    """What the tiles are told of LLVM's list: VNNI counts where it works on 256 bits."""
    has_vnni = features.get("avx512vnni") and features.get("avx512vl")
    return frozenset({"vnni"}) if has_vnni else frozenset()


def _read(path: Path) -> bytes | None:
    """The file's content if it is there and whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """In one move, so that nobody ever reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("compiled kernels can't be kept for the next start: %s", error)


def _cache_folder() -> Path:
    folder = platformdirs.user_cache_path("llmd", appauthor=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home
        return Path(tempfile.gettempdir()) / f"llmd-{getpass.getuser()}"
    return folder


def _gomp() -> tuple[Any, int]:
    """OpenMP's entry for a parallel region, and how many threads it will surely give."""
    folder = Path(torch.__file__).parent
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    for path in found:
        try:
            library = ctypes.CDLL(str(path))
            function = library.GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        # OMP_DYNAMIC lets it give fewer than asked for, and the others would wait for them forever
        limit = 1 if library.omp_get_dynamic() else library.omp_get_thread_limit()
        return function, max(1, limit)
    return None, 1


def self_test(launcher: Launcher) -> str:
    """What is wrong with the products of this machine's code; empty if they are right."""
    weight = _irregular(72, 96)
    nibbles = (8 + 7.9 * _irregular(72, 3, 32)).to(torch.uint8)
    halves = _irregular(72, 3).abs().half()
    packed = (
        cpu_pack.pack_8bit(weight),
        cpu_pack.join_4bit(nibbles, halves, -halves),
        cpu_pack.pack_16bit(weight[:64]),
    )
    for matrix, num_rows in itertools.product(packed, (7, 23)):  # many rows go another way
        rows = _irregular(num_rows, 96)
        found = _product(launcher, rows, matrix)
        wanted = rows @ cpu_pack.unpack(matrix).T
        error = ((found - wanted).norm() / wanted.norm()).item()
        if not error < (0.01 if matrix.bits == 4 else 1e-3):
            return f"products of {matrix.bits}-bit weights are off by {error:.1%}"
    return ""


def _irregular(*shape: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern. Not torch.randn: whoever makes a generator for it
    has a part of torch imported that nobody else wants (backend.deferred)."""
    return torch.arange(1.0, 1.0 + math.prod(shape)).square().sin().reshape(shape)


def _product(launcher: Launcher, rows: Tensor, matrix: cpu_pack.PackedMatrix) -> Tensor:
    """rows · Wᵀ by two operations of a program."""
    num_rows, width = rows.shape
    quants = torch.zeros((num_rows, 2 * width), dtype=torch.int16)
    scales = torch.zeros((num_rows, width // 16))
    out = torch.zeros((num_rows, matrix.num_outputs))
    ops = np.zeros((2, cpu_step.OP_FIELDS), dtype=np.int64)
    inputs = (quants.data_ptr(), scales.data_ptr())
    ops[0, :6] = (cpu_step.QUANTIZE, rows.data_ptr(), width, matrix.bits, *inputs)
    ops[1, :9] = (
        cpu_step.MATMUL,
        *inputs,
        matrix.data.data_ptr(),
        width,
        matrix.num_outputs,
        out.data_ptr(),
        4 * matrix.num_outputs,
        matrix.bits,
    )
    counters = np.zeros((launcher.max_threads + 1, 8), dtype=np.int64)  # last: arrivals, threads
    stride = cpu_step.scratch_stride([cpu_step.unpacked_bytes(width)])
    scratch = torch.empty(stride * launcher.max_threads, dtype=torch.uint8)
    header = np.zeros(cpu_step.HEADER_FIELDS, dtype=np.int64)
    header[cpu_step.NUM_OPS] = 2
    header[cpu_step.OPS] = ops.ctypes.data
    header[cpu_step.COUNTERS] = counters.ctypes.data
    header[cpu_step.COUNTER_STRIDE] = counters.strides[0]
    header[cpu_step.ARRIVALS] = counters[-1, 0:].ctypes.data
    header[cpu_step.THREADS_SEEN] = counters[-1, 1:].ctypes.data
    header[cpu_step.NUM_ROWS] = num_rows
    header[cpu_step.SCRATCH], header[cpu_step.SCRATCH_STRIDE] = scratch.data_ptr(), stride
    launcher.run(header)
    return out
