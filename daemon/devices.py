"""How much memory the models may use, without torch.

The CPU's memory is the machine's or the control group's, whichever is smaller: in a container the
kernel kills at the group's limit, not at the machine's.
"""

from __future__ import annotations

from pathlib import Path

import psutil

DEFAULT_SHARE = 0.85  # of all memory, for all models together; the rest is the person's
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
CGROUP_USAGES = (
    Path("/sys/fs/cgroup/memory.current"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def total_memory_bytes(limit_files: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """What this process may use at most."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for path in limit_files if (limit := _number_in(path)) > 0)])


def available_memory_bytes() -> int:
    """What could be allocated now without pushing others out, in the machine or the group."""
    machine = int(psutil.virtual_memory().available)
    rooms = [
        limit - _number_in(usage)
        for path, usage in zip(CGROUP_LIMITS, CGROUP_USAGES, strict=True)
        if (limit := _number_in(path)) > 0
    ]
    return max(min([machine, *rooms]), 0)


def default_limit_bytes() -> int:
    """The memory limit where none is set."""
    return int(total_memory_bytes() * DEFAULT_SHARE)


def _number_in(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return 0  # no control group of this version
    return int(text) if text.isdigit() else 0
