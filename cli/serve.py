"""This process becomes the daemon. Little is imported: nothing else delays the daemon's start."""

from __future__ import annotations

import os
import sys


def daemon_command() -> list[str]:
    """-P: a folder named llmd in the current directory must not be taken for the package."""
    return [sys.executable, "-P", "-m", "llmd.daemon"]


def become_daemon() -> int:
    """Does not return where a process can become another program: signals then reach the daemon
    itself. Elsewhere the daemon's exit code."""
    sys.stdout.flush()
    if os.name == "posix":
        os.execv(sys.executable, daemon_command())
    import subprocess

    return subprocess.call(daemon_command())
