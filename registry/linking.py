"""One content at two places without a second copy of its bytes.

    reflink     a file of its own that shares the blocks until one of the two is written to
    hard link   a second name of the same file; what its owner writes into it is seen here too
    neither     another disk, or a system that forbids it: the path must do

Source: ioctl_ficlonerange(2) for Linux (btrfs, XFS, bcachefs); elsewhere no reflink is tried.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_FICLONE = 0x40049409


def reflink(source: Path, target: Path) -> bool:
    """Make `target` a file that shares the blocks of `source`; False where that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        with source.open("rb") as original, target.open("xb") as clone:
            fcntl.ioctl(clone.fileno(), _FICLONE, original.fileno())
            os.fsync(clone.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def hard_link(source: Path, target: Path) -> bool:
    """Make `target` a second name of `source`; False where the system refuses that."""
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:
        return False
    return True
