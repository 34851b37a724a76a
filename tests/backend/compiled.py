"""A kernel as machine code of its own, for tests that call one alone."""

from __future__ import annotations

import ctypes
from typing import Any


class Compiled:
    """Call it with int64s, addresses among them. `name` is the kernel's function's."""

    def __init__(self, kernel: Any, name: str, num_arguments: int) -> None:
        import llvmlite.binding as llvm

        from llmd.backend.kernels import cpu_compile

        text = cpu_compile.translate(kernel, frozenset())
        features = llvm.get_host_cpu_features().flatten()
        code = cpu_compile.machine_code(text, llvm.get_host_cpu_name(), features)
        self._loaded = cpu_compile.Loaded(code)  # the address lies in it
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)
        self._call = kind(self._loaded.address_of(name))

    def __call__(self, *arguments: int) -> int:
        return int(self._call(*arguments))
