"""A form for the answer proper, which begins where a model has thought enough.

              opening mark                closing mark
    BEFORE ────────────────▶ THINKING ───────────────────▶ AFTER
       │                                                     │ blanks are passed over
       └──── header, or the form's first token ──▶ ANSWER ◀──┘

While the model thinks every token may come but those that end a generation: an answer is owed. What
opens thinking is allowed beside the form, not forced: the model decides whether it thinks first.

Marks that open something are followed as tokens, since masks can force these; the closing mark is
looked for in the bytes, since a model may merge its end with the line breaks that follow. A token
that would close thinking and begin the answer at once is masked, so the form misses no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from .grammar import Grammar, GrammarError, Matcher
from .response_families import Family, thinking_tags
from .tokenizer import Tokenizer

Row = NDArray[np.int32]
_MAX_BLANKS = 2  # tokens between the end of thinking and the answer; models write one
_BLANKS = ("\n", "\n\n", " ", "\n\n\n")
# gpt-oss: the prompt ends inside a header, and each message names its channel.
_HARMONY_OPENING, _HARMONY_CLOSING = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
_HARMONY_ANSWER = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Course:
    """How an answer comes about: whether it may think first, and what stands before its text."""

    opening_ids: tuple[int, ...] = ()  # empty: it does not think, or does so already
    closing: bytes = b""
    is_thinking: bool = False  # the prompt has opened it
    header_ids: tuple[int, ...] = ()


def course_of(
    tokenizer: Tokenizer, family: Family, template_source: str, rendered: str, with_header: bool
) -> Course:
    """`rendered` is the prompt. `with_header`: the form does not hold the answer's own header."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, parse_special=True))

    if family.is_harmony:
        header = ids(_HARMONY_ANSWER) if with_header else ()
        return Course(ids(_HARMONY_OPENING), _HARMONY_CLOSING.encode(), False, header)
    tags = thinking_tags(template_source)
    if tags is None:
        return Course()
    opening, closing = tags
    end = rendered.rstrip()
    if end.endswith(opening):
        return Course(closing=closing.encode(), is_thinking=True)
    if end.endswith(closing):  # the template closed it: this time without
        return Course()
    return Course(ids(opening), closing.encode())


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar and the course to where it begins. Each sequence takes a matcher of its own."""

    grammar: Grammar
    tokenizer: Tokenizer
    course: Course

    def matcher(self) -> Matcher | AnswerMatcher:
        """At the beginning of the output."""
        matcher = self.grammar.matcher()
        if self.course == Course():
            return matcher
        return AnswerMatcher(matcher, self.tokenizer, self.course)


class _State(Enum):
    BEFORE = auto()
    THINKING = auto()
    AFTER = auto()
    ANSWER = auto()


class AnswerMatcher:
    """Where one sequence stands. Owner: whoever masks its logits."""

    def __init__(self, answer: Matcher, tokenizer: Tokenizer, course: Course) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._course = course
        self._blank_ids = _single_ids(tokenizer, _BLANKS)
        # All the mutable state.
        self._state = _State.THINKING if course.is_thinking else _State.BEFORE
        self._taken: tuple[int, ...] = ()  # tokens of an opening mark or a header so far
        self._tail = b""  # of what was thought: the start of a closing mark, perhaps
        self._num_blanks = 0

    @property
    def is_done(self) -> bool:
        """Nothing can follow: only an end token is left."""
        return self._state is _State.ANSWER and self._answer.is_done

    def mask(self, row: Row) -> None:
        """Set bit i of `row` where token i may come next; see grammar.Matcher."""
        if self._state is _State.THINKING:
            self._mask_thinking(row)
            return
        marks = self._open_marks()
        if self._state is _State.ANSWER or not (self._taken or self._course.header_ids):
            self._answer.mask(row)
        else:
            row[:] = 0
        for mark in marks:
            _set(row, mark[len(self._taken)])
        for token_id in self._blank_ids if self._may_be_blank else ():
            _set(row, token_id)

    def accept(self, token_ids: Iterable[int]) -> None:
        """Go on by these tokens. Raises GrammarError if one of them was not in the mask."""
        for token_id in token_ids:
            if self._state is _State.THINKING:
                self._think(token_id)
            elif self._state is _State.ANSWER:
                self._answer.accept([token_id])
            else:
                self._begin(token_id)

    def _open_marks(self) -> list[tuple[int, ...]]:
        """Marks that what was taken so far may still become."""
        if self._state is _State.ANSWER:
            return []
        marks = [self._course.header_ids]
        if self._state is _State.BEFORE:
            marks.append(self._course.opening_ids)
        size = len(self._taken)
        return [mark for mark in marks if len(mark) > size and mark[:size] == self._taken]

    def _begin(self, token_id: int) -> None:
        size = len(self._taken)
        fitting = [mark for mark in self._open_marks() if mark[size] == token_id]
        if fitting:
            self._taken = (*self._taken, token_id)
            if self._taken in fitting:
                is_header = self._taken == self._course.header_ids
                self._state = _State.ANSWER if is_header else _State.THINKING
                self._taken = ()
        elif self._taken or self._course.header_ids:
            raise GrammarError(f"token {token_id} does not fit the format")
        elif self._is_blank(token_id):
            self._num_blanks += 1
        else:
            self._answer.accept([token_id])
            self._state = _State.ANSWER

    @property
    def _may_be_blank(self) -> bool:
        is_after = self._state is _State.AFTER and not self._course.header_ids
        return is_after and self._num_blanks < _MAX_BLANKS

    def _is_blank(self, token_id: int) -> bool:
        if not self._may_be_blank or token_id not in self._blank_ids:
            return False
        return not self._answer.num_acceptable([token_id])

    def _think(self, token_id: int) -> None:
        closing = self._course.closing
        text = self._tail + self._tokenizer.token_bytes(token_id)
        at = text.find(closing)
        if at < 0:
            self._tail = text[-(len(closing) - 1) :] if len(closing) > 1 else b""
            return
        self._state = _State.AFTER
        self._tail = b""

    def _mask_thinking(self, row: Row) -> None:
        row[:] = -1
        size = self._tokenizer.vocab_size
        row[-(-size // 32) :] = 0
        if size % 32:
            row[size // 32] = (1 << (size % 32)) - 1
        for token_id in self._tokenizer.eos_ids:
            _clear(row, token_id)
        for token_id in self._overshooting():
            _clear(row, token_id)

    def _overshooting(self) -> Sequence[int]:
        """Tokens that would close thinking and say something of the answer as well."""
        closing = self._course.closing
        starts = [
            size
            for size in range(1, min(len(closing), len(self._tail) + 1))
            if self._tail.endswith(closing[:size])
        ]
        rests = [closing, *(closing[size:] for size in starts)]
        return [
            token_id
            for rest in rests
            for token_id in self._tokenizer.ids_with(rest)
            if self._says_more(self._tokenizer.token_bytes(token_id), rest, rest == closing)
        ]

    @staticmethod
    def _says_more(token: bytes, rest: bytes, is_whole: bool) -> bool:
        at = token.find(rest)
        return (is_whole or at == 0) and bool(token[at + len(rest) :].strip())


def _single_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    encoded = [tokenizer.encode(text) for text in texts]
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)


def _set(row: Row, token_id: int) -> None:
    row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))


def _clear(row: Row, token_id: int) -> None:
    row.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
