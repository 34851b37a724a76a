"""Forced calls: whatever the logits, the answer is one call that the parser reads back."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from llmd.backend.text.forced_calls import forced_call
from llmd.backend.text.grammar import GrammarCompiler, GrammarError
from llmd.backend.text.response_parser import ToolCall, parser_of

from .test_grammar import RandomModel
from .vocabularies import byte_level

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER)
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city"],
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.mark.parametrize(
    "source",
    [
        "<tool_call>",
        "<tool_call> <function=",
        "",
        "<tool_calls>",
        "<TOOLCALL>",
        "<|tool_call|>",
        "<|python_tag|>",
        "[TOOL_CALLS] [ARGS]",
        "[TOOL_CALLS]",
        "<|channel|>analysis",
        "<｜tool▁call▁begin｜>",
        "<|tool_call_begin|>",
        "<|tool_call>",  # gemma, whose spelling no grammar here describes: the plain one
    ],
)
def test_a_forced_answer_is_one_call_that_fits_its_tool(source: str) -> None:
    forced = forced_call(TOKENIZER, TOOLS, source)
    grammar = COMPILER.compile(forced.format)
    for seed in range(5):
        text, has_ended = RandomModel(TOKENIZER, seed).write(grammar.matcher())
        assert has_ended, text
        parser = parser_of(forced.family, source, "", TOOLS)
        (call,) = parser.push(text) + parser.finish()
        assert isinstance(call, ToolCall), text
        jsonschema.validate(call.arguments, SCHEMAS[call.name])


def test_a_mark_that_is_a_control_token_is_forced_as_one() -> None:
    matcher = COMPILER.compile(forced_call(TOKENIZER, TOOLS, "<tool_call>").format).matcher()
    matcher.accept([TOKENIZER.control_tokens["<tool_call>"]])
    matcher.accept(TOKENIZER.encode('\n{"name": "now", "arguments": {}}\n</tool_call>'))
    assert matcher.is_done


def test_what_cannot_be_forced_is_said() -> None:
    with pytest.raises(GrammarError, match="no tools"):
        forced_call(TOKENIZER, [], "<tool_call>")
