"""Numbers and times in structured output that come to an end.

JSON sets no limit to the digits of a number, and RFC 3339 none to the fraction of a second; a model
that draws "0.3333" at a high temperature may go on for the rest of its window. A float holds 17
digits, so nothing is lost by an end after some more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tokenizer import Tokenizer

MAX_NUMBER_BYTES = 24  # sign, 17 digits, point and exponent
_DIGITS = b"0123456789"
_IN_NUMBER = frozenset(b"0123456789+-.eE")
_QUOTE, _BACKSLASH = 0x22, 0x5C

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERN_OF_FORMAT = {"time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_VALUES = ("enum", "const", "default", "examples")  # their content is no schema


def with_short_times(schema: Any) -> Any:
    """The schema, its times and date-times as patterns with at most nine decimals."""
    if isinstance(schema, list):
        return [with_short_times(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {
        key: part if key in _VALUES else with_short_times(part) for key, part in schema.items()
    }
    pattern = _PATTERN_OF_FORMAT.get(str(schema.get("format")))
    if pattern is not None and schema.get("type") == "string" and "pattern" not in schema:
        del result["format"]
        result["pattern"] = pattern
    return result


def digit_words(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """A mask, as grammar.Matcher has it, of the tokens that begin with a digit."""
    words = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.uint32)
    for token_id in range(tokenizer.vocab_size):
        if tokenizer.token_bytes(token_id)[:1] in _BEGINNINGS:
            words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32)


_BEGINNINGS = frozenset(bytes([digit]) for digit in _DIGITS)


class _Spot(NamedTuple):
    """Where in a JSON text: inside a string, after a backslash, how far into a number."""

    in_string: bool = False
    is_escaped: bool = False
    num_number_bytes: int = 0


class NumberBound:
    """Ends the numbers of one sequence's JSON text. Owner: its Matcher."""

    def __init__(self, tokenizer: Tokenizer, digits: NDArray[np.int32]) -> None:
        self._tokenizer = tokenizer
        self._digits = digits
        self._spots = [_Spot()]  # after each token, so that tokens can be taken back

    def limit(self, row: NDArray[np.int32]) -> None:
        """Where a number is long enough, take the digits out of the mask, if anything is left."""
        spot = self._spots[-1]
        if spot.in_string or spot.num_number_bytes < MAX_NUMBER_BYTES:
            return
        size = min(len(row), len(self._digits))
        rest = row[:size] & ~self._digits[:size]
        if rest.any():
            row[:size] = rest

    def accept(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._spots.append(_after(self._spots[-1], self._tokenizer.token_bytes(token_id)))

    def rollback(self, num_tokens: int) -> None:
        del self._spots[len(self._spots) - num_tokens :]

    def copy(self) -> NumberBound:
        twin = NumberBound(self._tokenizer, self._digits)
        twin._spots = list(self._spots)
        return twin


def _after(spot: _Spot, text: bytes) -> _Spot:
    in_string, is_escaped, size = spot
    for byte in text:
        if in_string:
            in_string = is_escaped or byte != _QUOTE
            is_escaped = not is_escaped and byte == _BACKSLASH
        else:
            in_string = byte == _QUOTE
            size = size + 1 if byte in _IN_NUMBER else 0
    return _Spot(in_string, is_escaped, 0 if in_string else size)
