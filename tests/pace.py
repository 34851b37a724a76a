"""What a figure that was promised for an idle machine may be on a busy one."""

from __future__ import annotations

import psutil


def slowness() -> float:
    """How much slower than an idle machine this one is now: 1.0, or more while others work."""
    cores = psutil.cpu_count() or 1
    return max(1.0, psutil.getloadavg()[0] / cores)
