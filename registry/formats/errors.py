"""What is said of a file that cannot be read."""

from __future__ import annotations


class FormatError(Exception):
    """The file breaks its format, or uses a part of it that is not known here. One sentence."""
