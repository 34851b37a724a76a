"""Formats that hold for every token: no model needed, random logits try everything."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from llmd.backend.text.grammar import Format, GrammarCompiler, GrammarError, Matcher, allowed_ids
from llmd.backend.text.tokenizer import Tokenizer

from .vocabularies import byte_level, sentence_piece

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER)
NUM_SCHEMAS = 200
CLOSING = re.compile(rb'[\s"}\],0-9]*["}\]]')


class RandomModel:
    """Draws tokens by random logits, and the longer the text, the rather those that close it."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        spelt = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._closes = np.array([bool(CLOSING.fullmatch(text)) for text in spelt])
        self._closes[list(tokenizer.eos_ids)] = True

    def write(self, matcher: Matcher, max_tokens: int = 4000) -> tuple[str, bool]:
        """The text, and whether an end token was drawn within the limit."""
        ids: list[int] = []
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
        for count in range(max_tokens):
            matcher.mask(words)
            allowed = allowed_ids(words.tobytes(), self._tokenizer.vocab_size)
            logits = self._random.normal(size=len(allowed), scale=3.0)
            logits += self._closes[allowed] * (count / 8)
            token_id = int(allowed[int(np.argmax(logits))])
            matcher.accept([token_id])
            if token_id in self._tokenizer.eos_ids:
                return self._tokenizer.decode(ids), True
            ids.append(token_id)
        return self._tokenizer.decode(ids), False


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """One of the subset that the contract names."""
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randrange(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}-\\d$"},
        {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid"])},
        {"enum": rng.sample(["red", "grün", 7, None, True, "a b"], 3)},
        {"const": rng.choice(["fixed text", 3, None, ["x", 1]])},
        {"type": "integer", "minimum": -5, "maximum": rng.randrange(100)},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": rng.choice(["boolean", "null"])},
        {"type": ["integer", "null"]},
    ]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(simple)
    kind = rng.randrange(4)
    inner = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind == 0:
        return {"type": "array", "items": inner[0], "minItems": 1, "maxItems": rng.randrange(1, 4)}
    if kind == 1:
        return {"anyOf": inner}
    names = rng.sample(["name", "größe", "a b", "list", "x"], len(inner))
    required = rng.sample(names, rng.randrange(len(names) + 1))
    return {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": required,
    }


@pytest.mark.parametrize("part", range(4))
def test_random_logits_write_what_fits_the_schema_and_nothing_after_it(part: int) -> None:
    rng = random.Random(part)
    for number in range(NUM_SCHEMAS // 4):
        schema = random_schema(rng)
        matcher = COMPILER.compile(schema).matcher()
        text, has_ended = RandomModel(TOKENIZER, 1000 * part + number).write(matcher)
        assert has_ended, (schema, text)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
        assert text == text.strip(), schema


def test_a_vocabulary_with_byte_tokens_writes_what_fits_too() -> None:
    tokenizer = sentence_piece()
    compiler, rng = GrammarCompiler(tokenizer), random.Random(11)
    for seed in range(20):
        schema = random_schema(rng)
        text, has_ended = RandomModel(tokenizer, seed).write(compiler.compile(schema).matcher())
        assert has_ended, (schema, text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_the_library_knows_the_bytes_of_each_token_and_which_are_no_text() -> None:
    """Its own reading of the vocabulary is the oracle."""
    ends = sorted(TOKENIZER.eos_ids)
    wanted = LLTokenizer(TOKENIZER.to_json(), n_vocab=TOKENIZER.vocab_size, eos_token=ends)
    found = COMPILER.compile("json").tokenizer
    assert found.eos_tokens == wanted.eos_tokens and found.is_canonical == wanted.is_canonical
    for token_id in range(TOKENIZER.vocab_size):
        assert found.decode_bytes([token_id]) == wanted.decode_bytes([token_id])
        assert found.is_special_token(token_id) == wanted.is_special_token(token_id)
    for text in ("the tin", " the", '{"the": 1}', "naïve 👩\n\n"):
        assert found.tokenize_str(text) == wanted.tokenize_str(text) == TOKENIZER.encode(text)


def test_a_text_that_the_form_prescribes_is_written_in_the_models_own_tokens() -> None:
    text = "o the hello<|im_end|> tin"
    matcher = COMPILER.compile({"regex": re.escape(text)}).matcher()
    for token_id in TOKENIZER.encode(text):
        assert allowed_ids(matcher.mask_bytes(), TOKENIZER.vocab_size).tolist() == [token_id]
        matcher.accept([token_id])
    assert matcher.may_end


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", '{"a": [1, null],\n  "b": {}}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1}'),
        ({"type": "array", "items": {"type": "string"}}, '["x", "é\\n"]'),
        (
            {
                "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
                "$ref": "#/$defs/n",
            },
            '{"n": {"n": {}}}',
        ),
        ({"regex": "[a-c]{2}|x+"}, "xxx"),
        ({"grammar": 'start: "v=" %json {"type": "integer"}'}, "v=12"),
    ],
)
def test_a_text_of_the_format_is_accepted_token_by_token(form: Format, text: str) -> None:
    matcher = COMPILER.compile(form).matcher()
    for token_id in TOKENIZER.encode(text):
        assert token_id in allowed_ids(matcher.mask_bytes(), TOKENIZER.vocab_size)
        matcher.accept([token_id])
    assert matcher.may_end
    ends = allowed_ids(matcher.mask_bytes(), TOKENIZER.vocab_size)
    assert TOKENIZER.eos_ids <= set(ends.tolist())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", "[1]"),
        ("json", ' {"a": 1}'),
        ("json", '{"a":' + " " * 60 + "1}"),
        ({"type": "object", "properties": {"a": {}}}, '{"b": 1}'),
        ({"regex": "[a-c]{2}"}, "abc"),
    ],
)
def test_other_texts_are_not(form: Format, text: str) -> None:
    matcher = COMPILER.compile(form).matcher()
    with pytest.raises(GrammarError, match="does not fit"):
        matcher.accept(TOKENIZER.encode(text))


def test_nothing_may_follow_the_value() -> None:
    matcher = COMPILER.compile("json").matcher()
    matcher.accept(TOKENIZER.encode('{"a": 1'))
    assert not matcher.is_done
    matcher.accept(TOKENIZER.encode("}"))
    assert matcher.is_done
    allowed = allowed_ids(matcher.mask_bytes(), TOKENIZER.vocab_size)
    assert set(allowed.tolist()) == TOKENIZER.eos_ids


def test_properties_come_in_the_schemas_order_and_no_others() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "null"}, "a": {"type": "null"}},
        "required": ["b", "a"],
    }
    matcher = COMPILER.compile(schema).matcher()
    assert matcher.num_acceptable(TOKENIZER.encode('{"a"')) < len(TOKENIZER.encode('{"a"'))
    matcher.accept(TOKENIZER.encode('{"b": null, "a": null}'))
    assert matcher.is_done


def test_schemas_that_hold_together_may_add_properties_to_each_other() -> None:
    schema = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    }
    matcher = COMPILER.compile(schema).matcher()
    matcher.accept(TOKENIZER.encode('{"a": null, "b": null}'))
    assert matcher.may_end


def test_tokens_can_be_taken_back() -> None:
    matcher = COMPILER.compile({"regex": "abc"}).matcher()
    other = matcher.copy()
    matcher.accept(TOKENIZER.encode("ab"))
    matcher.rollback(1)
    matcher.accept(TOKENIZER.encode("bc"))
    assert matcher.is_done
    assert not other.may_end


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "keyword not supported: uniqueItems"),
        ({"if": {}, "then": {}}, "keyword not supported: if, then"),
        ({"not": {"type": "string"}}, "keyword not supported: not"),
        ({"type": "strng"}, "strng"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"type": "string", "pattern": "(a"}, "unclosed group|regex"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ("yaml", "invalid format"),
        ([], "invalid format"),
        (7, "invalid format"),
        ({"type": "string", "pattern": b"x"}, "invalid JSON schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(form: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        COMPILER.compile(form)


def test_the_same_format_is_compiled_once() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert COMPILER.compile(schema) is COMPILER.compile(dict(schema))


class Counter(RandomModel):
    """A model that never tires of digits."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer, seed)
        spelt = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._closes = np.array([100.0 * text.isdigit() for text in spelt])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer"},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3},
        {"type": "string", "format": "time"},
        {"type": "string", "format": "date-time"},
    ],
)
def test_a_number_comes_to_an_end(schema: dict[str, Any]) -> None:
    for seed in range(5):
        text, has_ended = Counter(TOKENIZER, seed).write(COMPILER.compile(schema).matcher(), 400)
        assert has_ended, text
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def test_digits_in_a_string_are_not_counted() -> None:
    schema = {"type": "string", "pattern": "^[0-9]{60}$"}
    text, has_ended = Counter(TOKENIZER, 1).write(COMPILER.compile(schema).matcher(), 400)
    assert has_ended and len(json.loads(text)) == 60
