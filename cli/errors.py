"""What a command may fail with, besides what the daemon says (client.py)."""

from __future__ import annotations


class CommandFailed(Exception):
    """The words on the command line cannot be obeyed. The text says why and what to do."""
