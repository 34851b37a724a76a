"""Printing one answer while it arrives: thinking, word wrap, figures.

lines of the stream ──▶ AnswerPrinter ──▶ stdout        figures, spinner ──▶ stderr
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

from .units import duration_text

_GREY = "\x1b[90m"
_PLAIN = "\x1b[0m"
_LABEL_WIDTH = 22
Json = dict[str, Any]


class WordWrap:
    """Breaks lines between words. A word that turns out too long for its line is taken back.

    State: the column, and the word that is being written.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """What to write to the terminal for this piece of text."""
        return "".join(map(self._step, text))

    def _step(self, char: str) -> str:
        if char == "\n":
            self._column, self._word = 0, ""
            return char
        width = columns_of(char)
        self._column += width
        if char == " ":
            self._word = ""
            if self._column > self._width:
                self._column = 0
                return "\n"
            return char
        self._word += char
        if self._column <= self._width:
            return char
        word_width = sum(map(columns_of, self._word))
        if word_width >= self._width:  # the terminal breaks it
            self._column, self._word = width, ""
            return char
        back = word_width - width
        self._column = word_width
        return (f"\x1b[{back}D\x1b[K" if back else "") + f"\n{self._word}"


def columns_of(char: str) -> int:
    """How wide a terminal draws it."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class AnswerPrinter:
    """Writes the parts of one answer, and remembers them."""

    def __init__(
        self, output: TextIO | None = None, wrap: bool = True, hide_thinking: bool = False
    ) -> None:
        self._output = output or sys.stdout
        self._is_terminal = self._output.isatty()
        width = shutil.get_terminal_size().columns
        self._wrap = WordWrap(width) if wrap and self._is_terminal else None
        self._hides_thinking = hide_thinking
        self._is_thinking = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.final: Json = {}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def thinking(self) -> str:
        return "".join(self._thoughts)

    def take(self, line: Json) -> None:
        """One line of /api/generate or /api/chat."""
        message = line.get("message") or {}
        self._think(line.get("thinking") or message.get("thinking") or "")
        self._say(line.get("response") or message.get("content") or "")
        if line.get("done"):
            self.final = line

    def end(self) -> None:
        """The answer is over, or was stopped."""
        self._end_thinking()
        self._output.flush()

    def _think(self, text: str) -> None:
        if not text:
            return
        self._thoughts.append(text)
        if self._hides_thinking:
            return
        if not self._is_thinking:
            self._is_thinking = True
            self._write(f"{self._grey()}Thinking...\n")
        self._write(self._wrapped(text))

    def _say(self, text: str) -> None:
        if not text:
            return
        self._end_thinking()
        self._texts.append(text)
        self._write(self._wrapped(text))

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            newline = "" if self.thinking.endswith("\n") else "\n"
            self._write(f"{newline}...done thinking.{_PLAIN if self._is_terminal else ''}\n\n")
            if self._wrap:
                self._wrap = WordWrap(shutil.get_terminal_size().columns)

    def _grey(self) -> str:
        return _GREY if self._is_terminal else ""

    def _wrapped(self, text: str) -> str:
        return self._wrap.feed(text) if self._wrap else text

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def figures(final: Json) -> str:
    """What `--verbose` prints: one line for each figure that is not zero."""
    return "\n".join(f"{label + ':':<{_LABEL_WIDTH}}{value}" for label, value in _figures(final))


def _figures(final: Json) -> Iterable[tuple[str, str]]:
    for key in ("total_duration", "load_duration"):
        if final.get(key):
            yield key.replace("_", " "), duration_text(final[key])
    for kind in ("prompt eval", "eval"):
        key = kind.replace(" ", "_")
        count, duration = final.get(f"{key}_count", 0), final.get(f"{key}_duration", 0)
        if count:
            yield f"{kind} count", f"{count} token(s)"
        if duration:
            yield f"{kind} duration", duration_text(duration)
        if count and duration:
            yield f"{kind} rate", f"{count / (duration / 1e9):.2f} tokens/s"
