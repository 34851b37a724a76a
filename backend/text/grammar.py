"""Output that must have a form: which tokens may come next, as one bit per token.

    "json"               one JSON object
    a JSON schema        a value that fits it, keys in the schema's order
    {"regex": ...}       a text that the expression matches as a whole
    {"grammar": ...}     a Lark grammar, `%json {...}` inside it included

The masks are llguidance's (github.com/guidance-ai/llguidance), over the bytes of our own tokens.
White space between the parts of a JSON value is bounded, and so are the digits of its numbers (see
json_bounds.py), since a model may otherwise go on for ever. There is nothing after the value: when
it is complete only an end token is left.

A keyword that cannot be enforced is refused by name rather than ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from .json_bounds import NumberBound, digit_words, with_short_times
from .tokenizer import Tokenizer

# A line break and an indentation, or a space: what pretty printers write, and not for ever.
_WHITESPACE = r"\n?[ ]{0,24}"
JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE}
_MAX_KNOWN = 64  # compiled formats kept; agents send the same schema again and again
_UNIMPLEMENTED = re.compile(r"Unimplemented keys?: (\[.*\])")

Format = str | Mapping[str, Any]


class GrammarError(Exception):
    """The format cannot be enforced. The text names what is wrong, for the user."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A checked format for one tokenizer. Each sequence takes a matcher of its own."""

    text: str
    tokenizer: LLTokenizer
    bound: NumberBound | None = None  # at its beginning; where the text is JSON

    def matcher(self) -> Matcher:
        """At the beginning of the output."""
        matcher = LLMatcher(self.tokenizer, self.text, log_level=0)
        return Matcher(matcher, self.bound.copy() if self.bound else None)


class GrammarCompiler:
    """Formats to grammars, for one tokenizer.

    Making one takes a second or so, for a large vocabulary; do it beside the engine's thread.
    `compile` takes milliseconds. May be used from any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bound = NumberBound(tokenizer, digit_words(tokenizer))
        self._tokenizer = _tokens_of(tokenizer)
        self._checked = lru_cache(maxsize=_MAX_KNOWN)(self._check)

    def compile(self, form: Format, holds_json: bool = False) -> Grammar:
        """`holds_json`: a grammar of ours around JSON values, whose numbers are to end.

        Raises GrammarError, also if `form` is none of the four kinds.
        """
        return self._checked(_grammar_text(form), holds_json or not _is_text_form(form))

    def _check(self, text: str, is_json: bool) -> Grammar:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)
        if is_error:
            raise GrammarError(_explained(messages[0]))
        return Grammar(text, self._tokenizer, self._bound if is_json else None)


class _Spelt:
    """A tokenizer as LLTokenizer takes one that is no JSON: each token's bytes, and a call."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_tokens.values())
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._encode = tokenizer.twin()  # called in the midst of a step

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _tokens_of(tokenizer: Tokenizer) -> LLTokenizer:
    """Of our own bytes, in half the time that the library takes to find them in a JSON.

    Not where a text's first token brings a space: there the library knows how to encode what goes
    on in the middle of one.
    """
    ends = sorted(tokenizer.eos_ids)
    is_plain = ends and not tokenizer.strips_leading_space
    source: Any = _Spelt(tokenizer) if is_plain else tokenizer.to_json()
    return LLTokenizer(source, n_vocab=tokenizer.vocab_size, eos_token=ends)


class Matcher:
    """Where one sequence stands in its grammar. Owner: whoever masks its logits."""

    def __init__(self, matcher: LLMatcher, bound: NumberBound | None = None) -> None:
        self._matcher = matcher
        self._bound = bound

    @property
    def is_done(self) -> bool:
        """Nothing can follow: only an end token is left."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """What was accepted so far is complete, though more could follow."""
        return bool(self._matcher.is_accepting())

    def mask(self, row: NDArray[np.int32]) -> None:
        """Set bit i of `row` where token i may come next, counted from the lowest bit of word 0.

        row  [ceil(vocab_size / 32)] int32, contiguous; tokens beyond the vocabulary are not in it.

        Raises GrammarError if the grammar has become too complex to follow.
        """
        assert row.dtype == np.int32 and row.flags["C_CONTIGUOUS"], "int32 words in a row"
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._raise_if_broken()
        if self._bound is not None:
            self._bound.limit(row)

    def mask_bytes(self) -> bytes:
        """The same as bytes: token i is bit i % 8 of byte i // 8."""
        mask = bytes(self._matcher.compute_bitmask())
        self._raise_if_broken()
        return mask

    def accept(self, token_ids: Iterable[int]) -> None:
        """Go on by these tokens. Raises GrammarError if one of them was not in the mask."""
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                raise GrammarError(f"token {token_id} does not fit the format")
            if self._bound is not None:
                self._bound.accept([token_id])

    def num_acceptable(self, token_ids: list[int]) -> int:
        """How many of these could be accepted one after the other; nothing is changed."""
        return int(self._matcher.validate_tokens(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last."""
        assert self._matcher.rollback(num_tokens), f"{num_tokens} tokens cannot be taken back"
        if self._bound is not None:
            self._bound.rollback(num_tokens)

    def copy(self) -> Matcher:
        """Another matcher at the same place."""
        return Matcher(self._matcher.deep_copy(), self._bound.copy() if self._bound else None)

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_explained(self._matcher.get_error()))


def allowed_ids(mask: bytes, vocab_size: int) -> NDArray[np.int64]:
    """The token ids whose bits are set, in order."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size])


def _is_text_form(form: Format) -> bool:
    """A regular expression or a grammar: what it describes need not be JSON."""
    return isinstance(form, Mapping) and len(form) == 1 and next(iter(form)) in ("regex", "grammar")


def _grammar_text(form: Format) -> str:
    if form == "json":
        return _json_grammar({"type": "object"})
    if isinstance(form, Mapping):
        kind, text = next(iter(form.items())) if len(form) == 1 else ("", None)
        if kind == "regex" and isinstance(text, str):
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "grammar" and isinstance(text, str):
            return str(LLMatcher.grammar_from_lark(text))
        return _json_grammar(form)
    shown = json.dumps(form, default=str)[:100]
    raise GrammarError(f'invalid format: {shown}; expected "json" or a valid JSON Schema object')


def _json_grammar(schema: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(with_short_times(closed(json.loads(json.dumps(schema)))))
        return str(LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS))
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"invalid JSON schema: {error}") from error


_COMBINING = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")


def closed(schema: Any) -> Any:
    """The schema, in which objects that list their properties have no others, unless it says so.

    A schema that does not say allows any; but who lists properties wants those, and a model that
    may invent keys does. Not where several schemas hold for one object: each would exclude the
    other's properties.
    """
    return schema if "allOf" in _keywords(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            result[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in ("items", "prefixItems", "additionalProperties"):
        if key in schema:
            result[key] = _closed(schema[key])
    if isinstance(schema.get("properties"), dict):
        if not any(key in schema for key in (*_COMBINING, *_ALTERNATIVES)):
            result["additionalProperties"] = False
    else:
        for key in ("anyOf", "oneOf"):
            if key in schema:
                result[key] = _closed(schema[key])
    return result


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {word for item in schema for word in _keywords(item)}
    if not isinstance(schema, dict):
        return set()
    return set(schema) | {word for item in schema.values() for word in _keywords(item)}


def _explained(message: str) -> str:
    """The library's message in a sentence; an unsupported keyword is named."""
    first = message.strip().partition("\n<state>")[0]
    found = _UNIMPLEMENTED.search(first)
    if found is None:
        return f"the format cannot be used: {first}"
    names = ", ".join(json.loads(found[1]))
    return f"JSON schema keyword not supported: {names}"
