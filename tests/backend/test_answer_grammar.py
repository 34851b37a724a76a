"""A form that waits for the end of thinking: random logits try everything, no model needed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from llmd.backend.answer_plan import AnswerPlan, AnswerPlanner
from llmd.backend.protocol import Generate
from llmd.backend.text.answer_grammar import AnswerMatcher
from llmd.backend.text.chat_template import ChatTemplate
from llmd.backend.text.grammar import Matcher, allowed_ids
from llmd.backend.text.response_parser import Content, Piece, Thinking, ToolCall

from .vocabularies import HARMONY_TOKENS, byte_level

TOKENIZER = byte_level(HARMONY_TOKENS)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
THINKS = "{{ messages }}<tool_call></think>"  # a template that knows both
HARMONY = "{{ messages }}<|channel|>analysis"


def plan(source: str, rendered: str, **request: Any) -> AnswerPlan:
    template = ChatTemplate(source, TOKENIZER.special_tokens, TOKENIZER.control_tokens)
    planner = AnswerPlanner(TOKENIZER, "llama")
    return planner.plan(Generate("1", messages=[], **request), template, rendered)


class Wanderer:
    """Draws tokens by random logits; what it is told to write, it writes where it may."""

    def __init__(self, seed: int, thought: str) -> None:
        self._random = np.random.default_rng(seed)
        self._thought = list(TOKENIZER.encode(thought, parse_special=True))

    def write(self, matcher: Matcher | AnswerMatcher, max_tokens: int = 400) -> list[int]:
        """The tokens, without the end token. The thought is written first, then whatever comes."""
        ids: list[int] = []
        words = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.int32)
        for _ in range(max_tokens):
            matcher.mask(words)
            allowed = allowed_ids(words.tobytes(), TOKENIZER.vocab_size)
            if self._thought and self._thought[0] in allowed:
                token_id = self._thought.pop(0)
            else:
                assert not self._thought, f"{TOKENIZER.decode(self._thought)!r} was not allowed"
                token_id = int(self._random.choice(allowed))
            matcher.accept([token_id])
            if token_id in TOKENIZER.eos_ids:
                return ids
            ids.append(token_id)
        raise AssertionError(f"no end after {max_tokens} tokens: {TOKENIZER.decode(ids)!r}")


def pieces(answer: AnswerPlan, seed: int, thought: str) -> list[Piece]:
    assert answer.parser is not None and answer.grammar is not None
    text = TOKENIZER.decode(Wanderer(seed, thought).write(answer.grammar.matcher()))
    return [*answer.parser.push(text), *answer.parser.finish()]


def content(parts: list[Piece]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def thinking(parts: list[Piece]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thinking))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("rendered", "thought"),
    [
        ("user: hi <think>\n", "Is {this} it?</think>"),  # the prompt opened it
        ("user: hi", "<think>Hm.\n</think>\n\n"),  # the model opens it
        ("user: hi", "{"),  # it may do without
        ("user: hi <think>\n\n</think>\n\n", ""),  # the template closed it
    ],
)
def test_the_form_begins_when_thinking_ends(rendered: str, thought: str, seed: int) -> None:
    parts = pieces(plan(THINKS, rendered, format=SCHEMA), seed, thought)
    text = content(parts)
    assert 0 <= json.loads(text)["n"] <= 99
    assert text == text.strip()
    shown = thought.removeprefix("<think>").rpartition("</think>")[0].strip()
    assert thinking(parts) == shown


@pytest.mark.parametrize("seed", range(8))
def test_harmony_writes_the_value_in_its_final_channel(seed: int) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for first in ("<|channel|>final", thought):
        answer = plan(HARMONY, "<|start|>assistant", format=SCHEMA)
        parts = pieces(answer, seed, first)
        assert 0 <= json.loads(content(parts))["n"] <= 99
        assert thinking(parts) == ("Hm." if first == thought else "")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("source", "rendered", "thought"),
    [
        (THINKS, "<think>", "A call, then.</think>"),
        (THINKS, "", "<tool_call>"),
        (
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        ),
    ],
)
def test_a_forced_call_may_be_thought_about_first(
    source: str, rendered: str, thought: str, seed: int
) -> None:
    parts = pieces(plan(source, rendered, tools=[TOOL], must_call=True), seed, thought)
    assert not content(parts)
    (call,) = [part for part in parts if isinstance(part, ToolCall)]
    assert (call.name, list(call.arguments)) == ("add", ["n"])


def test_a_thinker_cannot_end_without_an_answer() -> None:
    answer = plan(THINKS, "<think>", format=SCHEMA)
    assert answer.grammar is not None
    words = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.int32)
    answer.grammar.matcher().mask(words)
    allowed = allowed_ids(words.tobytes(), TOKENIZER.vocab_size)
    assert len(allowed) == TOKENIZER.vocab_size - len(TOKENIZER.eos_ids)


def test_who_is_told_not_to_think_does_not() -> None:
    answer = plan(THINKS, "user: hi", format=SCHEMA, think=False)
    assert answer.grammar is not None
    assert isinstance(answer.grammar.matcher(), Matcher)


def test_the_value_is_content_even_if_it_looks_like_a_call() -> None:
    form = {"const": {"name": "add", "arguments": {"n": 1}}}
    parts = pieces(plan(THINKS, "</think>", format=form, tools=[TOOL]), 1, "")
    assert json.loads(content(parts)) == form["const"]


def test_a_schema_that_no_grammar_can_say_still_forces_the_call() -> None:
    parameters = {"type": "object", "properties": {"n": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    answer = plan(THINKS, "</think>", tools=[tool], must_call=True)
    assert answer.grammar is not None
    matcher = answer.grammar.matcher()
    text = '<tool_call>\n{"name": "odd", "arguments": {}}\n</tool_call>'
    matcher.accept(TOKENIZER.encode(text, parse_special=True))
    assert matcher.is_done


def test_the_end_of_a_message_is_not_the_end_of_a_harmony_turn() -> None:
    spelt = {TOKENIZER.decode([token_id]) for token_id in TOKENIZER.eos_ids}
    assert spelt == {"<|im_end|>", "<|return|>", "<|call|>"}
