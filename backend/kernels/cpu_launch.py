"""Runs the compiled program on all threads, and says whether this machine can.

The threads are those of torch's own OpenMP runtime, asked for through `GOMP_parallel`: a second pool
would fight the first one for the cores, as idle OpenMP threads spin. Where that library is not to be
found, the calling thread works alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import torch

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
    """Compiled code and the threads to run it. Compiles on construction, or reads `cache_dir`."""

    def __init__(self, cache_dir: str, num_threads: int) -> None:
        if cache_dir:
            # numba reads it when it is imported, and offers no other way
            os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(cache_dir) / "kernels"))
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
