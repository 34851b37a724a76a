"""Token ids to text while they arrive, for one sequence.

    ids ──bytes──▶ UTF-8 decoder ──characters──▶ stop strings ──▶ released
                     │ half a character            │ the longest suffix that may still become
                     ▼ waits                       ▼ a stop string waits

Two promises. Whatever the chunks in which ids come, the same text goes out in the end; and it is
the text of all ids at once, cut at the stop string that was completed first. An id is released as
soon as a part of its text is, so the text of the ids so far always starts with the text so far.

Each stop string keeps one number: how many of its characters the text now ends in (Knuth, Morris,
Pratt, "Fast pattern matching in strings", 1977). So an id costs its own characters, no more.

Owner: one Stream, on the engine thread.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

# A character has four bytes at most, so the last four ids of a prompt hold all of a half one.
_PRIMING_IDS = 4


class HasTokenBytes(Protocol):
    """What a Detokenizer needs of a Tokenizer."""

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Released(NamedTuple):
    """What may be shown now. `num_ids` counts ids from the oldest one held back."""

    text: str
    num_ids: int
    stop: str | None = None  # the stop string that ended the text, if one did


class _StopString:
    """How far the text matches one stop string."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # on a mismatch after i + 1 characters, go on from here
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def is_completed_by(self, character: str) -> bool:
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class Detokenizer:
    """Feed it ids with `push`, and `flush` it when the sequence has ended without a stop string.

    `prompt_ids` are what the output continues: a leading space then counts, and a character whose
    first bytes ended the prompt is completed.
    """

    def __init__(
        self,
        tokenizer: HasTokenBytes,
        prompt_ids: Sequence[int] = (),
        stop_strings: Iterable[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        # All the mutable state. Positions count characters since the start of the output.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(text) for text in dict.fromkeys(stop_strings) if text]
        self._stop_starts = {stop.text[0] for stop in self._stops}
        self._strips_next = tokenizer.strips_leading_space and not prompt_ids
        self._held = ""  # decoded, not released
        self._num_decoded = 0
        self._num_released = 0
        self._starts: deque[tuple[int, bool]] = deque()  # of ids held: position, has no bytes
        self._stopped = False
        for token_id in prompt_ids[-_PRIMING_IDS:]:
            self._decoder.decode(tokenizer.token_bytes(token_id))

    def push(self, token_ids: Iterable[int]) -> Released:
        """The text that these ids make certain. After a stop string all further ids are ignored."""
        if self._stopped:
            return Released("", 0)
        pieces = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            self._starts.append((self._num_decoded, not data))
            text = self._decoder.decode(data)
            if text and self._strips_next:
                text = text.removeprefix(" ")
                self._strips_next = False
            self._num_decoded += len(text)
            pieces.append(text)
        return self._release("".join(pieces))

    def flush(self) -> Released:
        """All that is held back; bytes that never became a character are shown as U+FFFD."""
        if self._stopped:
            return Released("", 0)
        tail = self._decoder.decode(b"", final=True)
        text = self._held + tail
        self._held = ""
        self._num_decoded += len(tail)
        self._num_released = self._num_decoded
        num_ids = len(self._starts)
        self._starts.clear()
        return Released(text, num_ids)

    def _release(self, new: str) -> Released:
        if not self._held and self._stop_starts.isdisjoint(new):  # most tokens, by far
            return self._released(new, None)
        found = self._first_stop(new)
        text = self._held + new
        if found is None:
            keep = max(stop.matched for stop in self._stops)
            self._held = text[len(text) - keep :]
            return self._released(text[: len(text) - keep], None)
        stop, num_new = found
        self._stopped = True
        end = len(self._held) + num_new
        self._held = ""
        return self._released(text[: end if self._include_stop else end - len(stop)], stop)

    def _first_stop(self, new: str) -> tuple[str, int] | None:
        """The stop string that `new` completes first, and after how many of its characters.

        If one character completes several, the longest: it leaves the least text behind.
        """
        for index, character in enumerate(new, start=1):
            completed = [stop.text for stop in self._stops if stop.is_completed_by(character)]
            if completed:
                return max(completed, key=len), index
        return None

    def _released(self, text: str, stop: str | None) -> Released:
        self._num_released += len(text)
        num_ids = 0
        while self._starts:
            start, is_empty = self._starts[0]
            if start > self._num_released or (start == self._num_released and not is_empty):
                break
            self._starts.popleft()
            num_ids += 1
        return Released(text, num_ids, stop)
