"""Splits a model's answer into content, thinking and tool calls, while it streams.

              ┌──────────── opening tag, first in the answer ────────────▶ THINKING
    CONTENT ◀─┴───────────────────── closing tag ───────────────────────────┘
       │ ▲
       │ └── its end: a call was sent, or the text was none and is content after all
       ▼
      CALL       from a mark of the family, or a bracket that opens the answer

The pieces, joined, do not depend on how the text was cut. It never raises and loses nothing but
markup and the blanks around it: what cannot be understood is content, a call left open by the end
of the answer is tried once more and then given as raw text.

Tool calls are looked for only where tools are on offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from .call_syntax import Brackets, Tools, may_be_bare_call
from .harmony import HarmonyParser
from .pieces import Content, Piece, Thinking, ToolCall
from .response_families import CallForm, Family, choose_family, thinking_tags
from .suffix import held_back

__all__ = ["Content", "Piece", "ResponseParser", "Thinking", "ToolCall", "choose_parser"]


class ResponseParser(Protocol):
    """Owner: one Stream, on the engine thread."""

    @property
    def is_thinking(self) -> bool:
        """The answer proper has not begun: what comes next may still be thinking."""
        ...

    def push(self, text: str) -> list[Piece]:
        """What the text so far makes certain, and was not given before."""
        ...

    def finish(self) -> list[Piece]:
        """The rest. Once, at the end."""
        ...


def choose_parser(
    template_source: str,
    architecture: str = "",
    *,
    rendered: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> ResponseParser:
    """The parser for what a model writes under this template.

    `rendered` is the prompt: it may end inside thinking already.
    """
    family = choose_family(template_source, architecture)
    return parser_of(family, template_source, rendered, tools)


def parser_of(
    family: Family, template_source: str, rendered: str, tools: Sequence[Mapping[str, Any]]
) -> ResponseParser:
    """The parser of this family. See choose_parser."""
    if family.is_harmony:
        return HarmonyParser(_tools_by_name(tools), rendered)
    tags = thinking_tags(template_source)
    opened = tags is not None and rendered.rstrip().endswith(tags[0])
    return TaggedParser(family, opened, tools, tags)


class _Mode(Enum):
    CONTENT = auto()
    THINKING = auto()
    CALL = auto()


class TaggedParser:
    """Every family but harmony. See the module."""

    def __init__(
        self,
        family: Family,
        thinking_open: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: tuple[str, str] | None = ("<think>", "</think>"),
    ) -> None:
        self._tools = _tools_by_name(tools)
        self._thinking = thinking
        forms = family.calls if self._tools else ()
        self._forms = {form.open: form for form in forms if form.open}
        self._bare = next((form for form in forms if not form.open), None)
        self._dropped = family.dropped if self._tools else ()
        self._marks = (*self._forms, *self._dropped)
        self._mark_starts = {mark[0] for mark in self._marks}
        # All the mutable state.
        self._mode = _Mode.THINKING if thinking_open else _Mode.CONTENT
        self._buffer = ""  # text not decided on yet
        self._is_fresh = True  # nothing but blanks since the start or the last region
        self._may_be_bare = self._bare is not None  # no content yet: a bracket may be a call
        self._skips_space = thinking_open  # blanks that come next belong to markup
        self._late_close = ""  # closing mark of a call that was sent already; skipped if it comes
        self._form: CallForm | None = None  # of the call in the buffer
        self._blanks = ""  # that stood before the call: part of the text if it is none
        self._brackets: Brackets | None = None
        self._num_scanned = 0  # characters of the buffer known not to end the call

    @property
    def is_thinking(self) -> bool:
        """The answer proper has not begun: what comes next may still be thinking."""
        return self._mode is _Mode.THINKING or (
            self._mode is _Mode.CONTENT and self._is_fresh and self._thinking is not None
        )

    def push(self, text: str) -> list[Piece]:
        """What the text so far makes certain, and was not given before."""
        if self._is_plain(text):
            return [Content(text)]
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._read(pieces):
            pass
        return merged(pieces)

    def finish(self) -> list[Piece]:
        """The rest. Once, at the end."""
        pieces: list[Piece] = []
        text, self._buffer = self._buffer, ""
        if self._mode is _Mode.THINKING:
            pieces.append(Thinking(text.rstrip()))
        elif self._mode is _Mode.CALL:
            assert self._form is not None
            calls = self._form.parse(text, self._tools) if _is_complete(self._form, text) else None
            pieces.extend(calls or [Content(self._blanks + self._form.open + text)])
        elif not (text and self._late_close.startswith(text)):
            pieces.append(Content(text.lstrip() if self._skips_space else text))
        return merged(pieces)

    def _is_plain(self, text: str) -> bool:
        """Content without a question, as most of an answer is: the short way through `push`."""
        return (
            self._mode is _Mode.CONTENT
            and not (self._is_fresh or self._skips_space or self._buffer or not text)
            and self._mark_starts.isdisjoint(text)
            and not (self._marks and text[-1].isspace())
        )

    # Each reads from the front of the buffer and says whether the next step has something to do.

    def _read(self, pieces: list[Piece]) -> bool:
        if self._mode is _Mode.CONTENT:
            return self._read_content(pieces)
        if self._mode is _Mode.THINKING:
            return self._read_thinking(pieces)
        return self._read_call(pieces)

    def _read_content(self, pieces: list[Piece]) -> bool:
        if self._skips_space and not self._skip_space():
            return False
        if self._is_fresh:
            region = self._opened_region()
            if region is None:
                return False
            if region:
                return True
        mark, at = self._first_mark()
        if mark is None:
            self._give_content(pieces, self._num_certain())
            return False
        is_call = mark in self._forms
        before = self._buffer[:at].rstrip() if is_call else self._buffer[:at]
        self._give_content(pieces, len(before))
        blanks = self._buffer[: at - len(before)]
        self._buffer = self._buffer[len(blanks) + len(mark) :]
        if is_call:
            self._begin_call(self._forms[mark], blanks)
        else:
            self._skips_space = True
        return True

    def _opened_region(self) -> bool | None:
        """Whether thinking or a bare call opens here; None while that cannot be said."""
        text = self._buffer.lstrip()
        if not text:
            return None
        if self._thinking is not None:
            opening, closing = self._thinking
            for tag in (opening, closing):  # a closing tag alone ends thinking that was cut off
                if text.startswith(tag):
                    self._buffer = text[len(tag) :]
                    self._mode = _Mode.THINKING if tag == opening else _Mode.CONTENT
                    self._skips_space = True
                    return True
                if tag.startswith(text):
                    return None
        if self._may_be_bare and self._bare is not None and text[0] in "{[":
            if may_be_bare_call(text, self._tools):
                self._begin_call(self._bare, "")
                return True
            self._may_be_bare = False
        return False

    def _read_thinking(self, pieces: list[Piece]) -> bool:
        if self._skips_space and not self._skip_space():
            return False
        assert self._thinking is not None
        closing = self._thinking[1]
        at = self._buffer.find(closing)
        if at < 0:
            certain = len(self._buffer) - held_back(self._buffer, (closing,))
            shown = self._buffer[:certain].rstrip()
            self._buffer = self._buffer[len(shown) :]
            pieces.append(Thinking(shown))
            return False
        pieces.append(Thinking(self._buffer[:at].rstrip()))
        self._buffer = self._buffer[at + len(closing) :]
        self._mode = _Mode.CONTENT
        self._skips_space = self._is_fresh = True
        return True

    def _read_call(self, pieces: list[Piece]) -> bool:
        form = self._form
        assert form is not None
        if form.open == "" and not may_be_bare_call(self._buffer, self._tools):
            self._form = self._brackets = None
            self._mode = _Mode.CONTENT
            self._is_fresh = self._may_be_bare = False
            return True
        if self._brackets is None and not self._has_begun_brackets(form):
            return self._find_close(form, pieces)
        return self._find_bracket(form, pieces)

    def _has_begun_brackets(self, form: CallForm) -> bool:
        """Start counting brackets where the body has its first one, if it is of that kind."""
        if form.is_literal or self._num_scanned:
            return False
        start: int | None = len(self._buffer) - len(self._buffer.lstrip())
        if form.start is not None:
            start = form.start(self._buffer)
        if start is None or start >= len(self._buffer) or self._buffer[start] not in "{[":
            return False
        self._brackets = Brackets()
        self._num_scanned = start
        return True

    def _find_bracket(self, form: CallForm, pieces: list[Piece]) -> bool:
        assert self._brackets is not None
        end = self._bracket_end(form.close)
        if end is None:
            return False
        calls = form.parse(self._buffer[:end], self._tools)
        if calls is not None:
            self._end_call(pieces, calls, end)
            self._late_close = form.close or ";"
            return True
        if not form.close:
            self._end_call(pieces, None, end)
            return True
        self._brackets = None  # it may be more than one value; the closing mark decides
        self._num_scanned = end
        return self._find_close(form, pieces)

    def _bracket_end(self, close: str) -> int | None:
        """Where the brackets are balanced, or where the closing mark stands outside a string."""
        assert self._brackets is not None
        while True:
            mark = self._buffer.find(close, max(0, self._num_scanned - len(close) + 1))
            stop = len(self._buffer) if mark < 0 or not close else mark
            end = self._brackets.feed(self._buffer[self._num_scanned : stop])
            if end is not None:
                return self._num_scanned + end
            self._num_scanned = max(self._num_scanned, stop)
            if mark < 0 or not close:
                return None
            if not self._brackets.in_string:
                return mark
            self._num_scanned = max(self._num_scanned, mark + len(close))

    def _find_close(self, form: CallForm, pieces: list[Piece]) -> bool:
        if not form.close:
            return False
        at = self._buffer.find(form.close, max(self._num_scanned - len(form.close) + 1, 0))
        if at < 0:
            if form.is_literal or self._buffer.strip():
                # A body of blanks alone may still turn out to begin with a bracket.
                self._num_scanned = max(self._num_scanned, len(self._buffer.rstrip()))
            return False
        calls = form.parse(self._buffer[:at], self._tools)
        self._end_call(pieces, calls, at + len(form.close))
        return True

    def _begin_call(self, form: CallForm, blanks: str) -> None:
        self._form = form
        self._blanks = blanks
        self._brackets = None
        self._num_scanned = 0
        self._mode = _Mode.CALL
        self._late_close = ""

    def _end_call(self, pieces: list[Piece], calls: list[ToolCall] | None, size: int) -> None:
        assert self._form is not None
        raw = self._blanks + self._form.open + self._buffer[:size]
        self._buffer = self._buffer[size:]
        self._late_close = self._form.trailer
        self._form = self._brackets = None
        self._mode = _Mode.CONTENT
        if calls is None:
            pieces.append(Content(raw))
            self._is_fresh = self._may_be_bare = False
        else:
            pieces.extend(calls)
            self._is_fresh = self._skips_space = True

    def _skip_space(self) -> bool:
        """Leave out blanks, and the late closing mark of a call. False if only such was there."""
        text = self._buffer.lstrip()
        if self._late_close and text:
            if text.startswith(self._late_close):
                text = text[len(self._late_close) :].lstrip()
                self._late_close = ""
            elif self._late_close.startswith(text):
                return False
            else:
                self._late_close = ""
        self._buffer = text
        if not text:
            return False
        self._skips_space = False
        return True

    def _first_mark(self) -> tuple[str | None, int]:
        found = [(self._buffer.find(mark), mark) for mark in self._marks]
        at, mark = min(((at, m) for at, m in found if at >= 0), default=(-1, None))
        return mark, at

    def _num_certain(self) -> int:
        """Characters that are content whatever comes; blanks wait for what they stand before."""
        certain = self._buffer[: len(self._buffer) - held_back(self._buffer, self._marks)]
        return len(certain.rstrip()) if self._marks else len(certain)

    def _give_content(self, pieces: list[Piece], size: int) -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if text.strip():
            self._is_fresh = self._may_be_bare = False
        pieces.append(Content(text))


def _is_complete(form: CallForm, body: str) -> bool:
    """Whether a call whose closing mark never came can be taken as it is."""
    if not form.can_end_early:
        return False
    if "<function=" in body or "<arg_key>" in body:
        return body.rstrip().endswith("</function>")
    return body.rstrip().endswith(("}", "]", ")"))


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one, empty ones left out."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, ToolCall):
            result.append(piece)
        elif not piece.text:
            continue
        elif isinstance(last, Content) and isinstance(piece, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(last, Thinking) and isinstance(piece, Thinking):
            result[-1] = Thinking(last.text + piece.text)
        else:
            result.append(piece)
    return result


def _tools_by_name(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Name to the JSON schema of the arguments; what is no tool is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return found
