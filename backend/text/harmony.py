"""The answer format of gpt-oss: messages with a header that names channel and recipient.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>            thinking
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>   a tool call
    <|channel|>final<|message|>...<|return|>                              content

The prompt ends in `<|start|>assistant`, so the text begins inside a header. Commentary without a
recipient is meant for the user. Source: "OpenAI harmony response format" (2025).
"""

from __future__ import annotations

import re

from .call_syntax import Tools, json_calls
from .pieces import Content, Piece, Thinking, ToolCall
from .suffix import held_back

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_STARTS = ("<|start|>", "<|channel|>", "<|message|>", "to=")
_MAX_HEADER = 400  # characters; a longer one is no header


class HarmonyParser:
    """See the module. Without tools on offer a call is shown as content."""

    def __init__(self, tools: Tools, rendered: str = "") -> None:
        self._tools = tools
        # All the mutable state.
        self._buffer = ""
        self._in_header = not rendered.endswith(_MESSAGE)
        self._channel = "final" if self._in_header else _channel_of(rendered)
        self._recipient = ""
        self._header = ""  # as it was written, for a call that is none
        self._call = ""  # the body of the call so far

    @property
    def is_thinking(self) -> bool:
        """The answer proper has not begun: what comes next may still be thinking."""
        return self._in_header or self._channel == "analysis"

    def push(self, text: str) -> list[Piece]:
        """What the text so far makes certain, and was not given before."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and (self._read_header if self._in_header else self._read)(pieces):
            pass
        return _merged(pieces)

    def finish(self) -> list[Piece]:
        """The rest. Once, at the end."""
        pieces: list[Piece] = []
        text, self._buffer = self._buffer, ""
        if self._in_header:
            is_markup = text.lstrip().startswith(_HEADER_STARTS)
            return [Content(text)] if text.strip() and not is_markup else []
        self._give(pieces, text)
        self._close(pieces)
        return _merged(pieces)

    def _read_header(self, pieces: list[Piece]) -> bool:
        text = self._buffer.lstrip()
        start = next((start for start in _HEADER_STARTS if text.startswith(start)), None)
        if start is None and any(start.startswith(text) for start in _HEADER_STARTS):
            return False
        at = text.find(_MESSAGE, 0, _MAX_HEADER) if start else -1
        if start and at < 0 and len(text) < _MAX_HEADER:
            return False
        self._in_header = False
        self._recipient = ""
        if at < 0:  # not the format: content as it stands, be it a mark or not
            self._channel = "final"
            mark = self._buffer[: len(self._buffer) - len(text)] + (start or "")
            pieces.append(Content(mark))
            self._buffer = self._buffer[len(mark) :]
            return True
        self._header, self._buffer = text[: at + len(_MESSAGE)], text[at + len(_MESSAGE) :]
        self._channel = _channel_of(self._header)
        recipient = _RECIPIENT.search(self._header)
        self._recipient = recipient[1] if recipient else ""
        return True

    def _read(self, pieces: list[Piece]) -> bool:
        found = [(self._buffer.find(end), end) for end in _ENDS]
        at, end = min(((at, e) for at, e in found if at >= 0), default=(-1, ""))
        if at < 0:
            certain = len(self._buffer) - held_back(self._buffer, _ENDS)
            self._give(pieces, self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        self._give(pieces, self._buffer[:at])
        self._close(pieces)
        opens_header = end in ("<|start|>", "<|channel|>")
        self._buffer = self._buffer[at if opens_header else at + len(end) :]
        self._in_header = True
        return True

    def _give(self, pieces: list[Piece], text: str) -> None:
        if self._recipient and self._tools:
            self._call += text
        elif self._channel == "analysis":
            pieces.append(Thinking(text))
        elif text:
            pieces.append(Content(text))

    def _close(self, pieces: list[Piece]) -> None:
        """The message is complete; if it is a call, it is sent."""
        if self._recipient and self._tools:
            pieces.append(self._parsed_call())
        self._recipient = self._call = ""

    def _parsed_call(self) -> Piece:
        wrapped = f'{{"name": "call", "arguments": {self._call.strip() or "{}"}}}'
        calls = json_calls(wrapped, self._tools)
        if calls is None:
            return Content(self._header + self._call)
        return ToolCall(self._recipient, calls[0].arguments)


def _channel_of(header: str) -> str:
    channels = _CHANNEL.findall(header)
    return str(channels[-1]) if channels else "final"


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Empty pieces left out."""
    return [piece for piece in pieces if isinstance(piece, ToolCall) or piece.text]
