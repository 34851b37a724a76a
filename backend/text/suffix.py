"""How much of a text's end must wait, because it may be the beginning of a mark."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that is a proper beginning of one of the marks."""
    longest = 0
    for mark in marks:
        start = max(0, len(text) - len(mark) + 1)
        at = text.find(mark[0], start)
        while at >= 0:
            if mark.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(mark[0], at + 1)
    return longest
