"""What a process that rests may give back besides its own data: freed heap, and code.

The C library keeps freed memory for the next call. And loading a model runs much code that serving
it does not: the pages of the libraries' code lie in the system's cache too, and are mapped again
at the next touch, without a read from disk. On a system that is not Linux nothing is done.

Source: madvise(2), MADV_DONTNEED on a private file mapping; proc(5), smaps.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MADV_DONTNEED = 4
SMAPS = Path("/proc/self/smaps")


def give_back() -> None:
    """Leave nothing resident that is not needed at rest."""
    if sys.platform != "linux":
        return
    trim_heap()
    libc = ctypes.CDLL(None)
    try:
        lines = SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for begin, end in clean_code(lines):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)


def trim_heap() -> None:
    """What was freed goes back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
    if trim is not None:
        trim(0)


def clean_code(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """The address ranges of libraries' code and constants that were not written since mapped.

    One that was written (a breakpoint, a relocation) would come back without what was written.
    """
    span: tuple[int, int] | None = None
    for line in smaps:
        fields = line.split()
        if not fields[0].endswith(":"):
            is_library = len(fields) > 5 and ".so" in fields[5]
            is_code = is_library and fields[1] in ("r-xp", "r--p")
            begin, _, end = fields[0].partition("-")
            span = (int(begin, 16), int(end, 16)) if is_code else None
        elif fields[0] == "Private_Dirty:" and span is not None:
            if fields[1] == "0":
                yield span
            span = None
