"""Answers of every family, whole and in pieces; and answers of no family at all."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.backend.text.call_syntax import coerced
from llmd.backend.text.response_families import FAMILIES, choose_family
from llmd.backend.text.response_parser import (
    Content,
    Piece,
    ResponseParser,
    Thinking,
    ToolCall,
    choose_parser,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
KOELN = {"city": 'Köln "am" {Rhein}', "days": 2, "exact": True, "tags": ["a", "b"]}
JSON = json.dumps(KOELN, ensure_ascii=False)
CALL = ToolCall("weather", KOELN)
NOW = ToolCall("now", {})
THINK = "</think>"  # what a template with thinking contains


@dataclass(frozen=True)
class Sample:
    """`source` stands for the template: it holds what a parser is chosen by."""

    name: str
    source: str
    text: str
    expected: list[Piece]
    rendered: str = ""
    architecture: str = ""


def bare(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def dsml(text: str) -> str:
    """With DeepSeek's own bars, which are wide and make long lines."""
    return text.replace("DSML:", "｜DSML｜")


SAMPLES = [
    Sample(
        "qwen3",
        "<tool_call> " + THINK,
        f"<think>\nHm, {{x}} <b>.\n</think>\n\nI look.\n<tool_call>\n{bare('weather', JSON)}\n"
        f"</tool_call>\n<tool_call>\n{bare('now', '{}')}\n</tool_call>",
        [Thinking("Hm, {x} <b>."), Content("I look."), CALL, NOW],
    ),
    Sample(
        "the prompt opened thinking",
        "<tool_call> " + THINK,
        "Well.\n\nSo </thin </think>\n\n Yes.",
        [Thinking("Well.\n\nSo </thin"), Content("Yes.")],
        rendered="<|im_start|>assistant\n<think>\n",
    ),
    Sample(
        "the prompt closed thinking",
        "<tool_call> " + THINK,
        "Yes, <think> is a tag.",
        [Content("Yes, <think> is a tag.")],
        rendered="<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    Sample("thinking cut off", THINK, "<think>Hm, and", [Thinking("Hm, and")]),
    Sample(
        "the closing mark is missing",
        "<tool_call>",
        f"<tool_call>{bare('weather', JSON)}",
        [CALL],
    ),
    Sample(
        "a closing mark inside a string",
        "<tool_call>",
        f"<tool_call>{bare('weather', json.dumps({'city': '</tool_call>'}))}</tool_call>",
        [ToolCall("weather", {"city": "</tool_call>"})],
    ),
    Sample(
        "repairs: trailing commas, arguments as text, one list around one call",
        "<tool_call>",
        '<tool_call>[{"name": "weather", "arguments": "{\\"days\\": 1,}",}]</tool_call>',
        [ToolCall("weather", {"days": 1})],
    ),
    Sample(
        "no call: the text is content",
        "<tool_call>",
        "Look: <tool_call>{weather in Köln</tool_call> or so",
        [Content("Look: <tool_call>{weather in Köln</tool_call> or so")],
    ),
    Sample(
        "a call cut off is content",
        "<tool_call>",
        'Look:\n<tool_call>{"name": "weather", "arg',
        [Content('Look:\n<tool_call>{"name": "weather", "arg')],
    ),
    Sample(
        "qwen3-coder",
        "<tool_call> <function= " + THINK,
        'Now.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln "am" {Rhein}\n</parameter>'
        "\n<parameter=days>\n2\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        [Content("Now."), CALL],
    ),
    Sample(
        "qwen3-coder without the outer tag",
        "<tool_call> <function=",
        "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("weather", {"days": 2})],
    ),
    Sample(
        "qwen3-coder, cut off",
        "<tool_call> <function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKö",
        [Content("<tool_call>\n<function=weather>\n<parameter=city>\nKö")],
    ),
    Sample(
        "glm",
        "<tool_call> <arg_key> " + THINK,
        '<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln "am" '
        "{Rhein}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>exact"
        '</arg_key><arg_value>true</arg_value><arg_key>tags</arg_key><arg_value>["a", "b"]'
        "</arg_value>\n</tool_call>",
        [Thinking("Hm."), CALL],
    ),
    Sample("llama 3 json", "<|python_tag|>", bare("weather", JSON, "parameters"), [CALL]),
    Sample(
        "llama 3 json, two",
        "<|python_tag|>",
        f"<|python_tag|>{bare('weather', JSON, 'parameters')}; {bare('now', '{}', 'parameters')}",
        [CALL, NOW],
    ),
    Sample(
        "llama 3 pythonic",
        "ipython",
        "[weather(city='Köln \"am\" {Rhein}', days=2, exact=True, tags=['a', 'b']), now()]",
        [CALL, NOW],
    ),
    Sample(
        "a json answer is no call",
        "ipython",
        ' {"answer": [1, 2], "name": "weather"}',
        [Content(' {"answer": [1, 2], "name": "weather"}')],
    ),
    Sample(
        "a list that is no call",
        "ipython",
        "[weather](https://example.org) is\n",
        [Content("[weather](https://example.org) is\n")],
    ),
    Sample(
        "a tool that is not on offer",
        "ipython",
        bare("rm", "{}") + " ok",
        [Content(bare("rm", "{}") + " ok")],
    ),
    Sample(
        "mistral, list",
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}, "id": "abcdefghi"}}]',
        [CALL],
    ),
    Sample(
        "mistral, names",
        "[TOOL_CALLS] [/THINK]",
        f"[THINK]Hm.[/THINK]Now.[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{JSON}"
        "[TOOL_CALLS]now[ARGS]{}",
        [Thinking("Hm."), Content("Now."), CALL, NOW],
    ),
    Sample(
        "harmony",
        "",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{JSON}<|call|>",
        [Thinking("Hm."), Content("I look."), CALL],
        architecture="gpt-oss",
    ),
    Sample(
        "harmony, recipient first, its end cut by the stop token",
        "<|channel|>analysis",
        f" to=functions.weather<|channel|>commentary json<|message|>{JSON}",
        [CALL],
    ),
    Sample(
        "harmony, final",
        "<|channel|>analysis",
        "<|channel|>final<|message|>Yes < 5 <|x|>.",
        [Content("Yes < 5 <|x|>.")],
    ),
    Sample("harmony, no header", "<|channel|>analysis", "Yes.", [Content("Yes.")]),
    Sample(
        "harmony, arguments that are no JSON",
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.now<|message|>{x<|call|>",
        [Content("<|channel|>commentary to=functions.now<|message|>{x")],
    ),
    Sample(
        "deepseek v3.1",
        "<｜tool▁call▁begin｜> " + THINK,
        "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + JSON
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        [Content("Now."), CALL, NOW],
    ),
    Sample(
        "deepseek r1",
        "<｜tool▁call▁begin｜> " + THINK,
        "<think>\nHm.\n</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather"
        f"\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Thinking("Hm."), CALL],
    ),
    Sample(
        "deepseek v3.2",
        "｜DSML｜ " + THINK,
        dsml(
            'Now.\n\n<DSML:function_calls>\n<DSML:invoke name="weather">\n'
            '<DSML:parameter name="city" string="true">Köln "am" {Rhein}</DSML:parameter>\n'
            '<DSML:parameter name="days" string="false">2</DSML:parameter>\n'
            '<DSML:parameter name="exact" string="false">true</DSML:parameter>'
            '<DSML:parameter name="tags" string="false">["a", "b"]</DSML:parameter>\n'
            "</DSML:invoke>\n</DSML:function_calls>"
        ),
        [Content("Now.\n\n"), CALL],
    ),
    Sample(
        "kimi",
        "<|tool_call_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
        [CALL],
    ),
    Sample(
        "minimax",
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln "am" {Rhein}'
        '</parameter>\n<parameter name="days">2</parameter><parameter name="exact">true</parameter>'
        '<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n</minimax:tool_call>',
        [CALL],
    ),
    Sample(
        "gemma 4",
        "<|tool_call>call: <channel|>",
        '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Köln "am" {Rhein}'
        '<|"|>,days:2,exact:true,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
        [Thinking("Hm."), CALL],
    ),
    Sample(
        "functiongemma",
        "<start_function_call>",
        '<start_function_call>call:weather{city:<escape>Köln "am" {Rhein}<escape>,days:2,'
        "exact:true,tags:[<escape>a<escape>,<escape>b<escape>]}<end_function_call>",
        [CALL],
    ),
    Sample(
        "lfm2",
        "<|tool_call_start|>",
        "<|tool_call_start|>[weather(city='Köln \"am\" {Rhein}', days=2, exact=True, "
        'tags=["a", "b"]), now()]<|tool_call_end|>Done.',
        [CALL, NOW, Content("Done.")],
    ),
    Sample(
        "phi 4, granite 3",
        "<|tool_call|>",
        f"<|tool_call|>[{bare('weather', JSON)}]<|/tool_call|>",
        [CALL],
    ),
    Sample(
        "olmo 3",
        "<function_calls>",
        "<function_calls>weather(city='Köln \"am\" {Rhein}', days=2, exact=true, tags=['a', 'b'])\n"
        "now()</function_calls>",
        [CALL, NOW],
    ),
    Sample(
        "command r7b",
        "<|START_ACTION|> <|END_THINKING|>",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n  {"tool_call_id": "0", '
        f'"tool_name": "weather", "parameters": {JSON}}}\n]<|END_ACTION|>',
        [Thinking("Hm."), CALL],
    ),
    Sample("plain json", "", f"\n{bare('weather', JSON)}\n", [CALL]),
    Sample("plain text", "", "a < b\n\n and <tool c\n", [Content("a < b\n\n and <tool c\n")]),
]


def parser_for(sample: Sample, tools: list[dict[str, Any]] = TOOLS) -> ResponseParser:
    return choose_parser(sample.source, sample.architecture, rendered=sample.rendered, tools=tools)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of one kind as one: how they were cut says nothing."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Thinking) and isinstance(last, Thinking):
            result[-1] = Thinking(last.text + piece.text)
        else:
            result.append(piece)
    return result


def parsed(parser: ResponseParser, chunks: list[str]) -> list[Piece]:
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return joined(pieces + parser.finish())


def in_chunks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_an_answer_is_understood_in_every_chunking(sample: Sample, size: int) -> None:
    assert parsed(parser_for(sample), in_chunks(sample.text, size)) == sample.expected


def test_every_family_has_a_sample() -> None:
    shown = {choose_family(sample.source, sample.architecture).name for sample in SAMPLES}
    without = {"glimmer", "seed", "nemotron-2", "apertus", "gigachat", "apriel", "minicpm"}
    assert {family.name for family in FAMILIES} - shown == without


def test_no_mark_of_a_family_begins_another() -> None:
    for family in FAMILIES:
        marks = [form.open for form in family.calls if form.open] + list(family.dropped)
        for mark in marks:
            longer = [other for other in marks if other != mark and other.startswith(mark)]
            assert longer == [], family.name


def test_content_is_sent_while_it_streams() -> None:
    parser = choose_parser("<tool_call>", tools=TOOLS)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" world <") == [Content(" world")]
    assert parser.push("b>") == [Content(" <b>")]


def test_a_call_is_sent_when_it_is_complete() -> None:
    parser = choose_parser("<tool_call>", tools=TOOLS)
    assert parser.push('<tool_call>{"name": "now", "arguments": {}') == []
    assert parser.push("}") == [NOW]
    assert parser.push("</tool_call>") == []
    assert parser.finish() == []


def test_without_tools_the_text_stays_as_it_is() -> None:
    text = f"<tool_call>{bare('weather', JSON)}</tool_call>"
    assert parsed(choose_parser("<tool_call>"), [text]) == [Content(text)]
    assert parsed(choose_parser("", tools=[]), ["[now()]"]) == [Content("[now()]")]


def test_it_is_known_whether_the_answer_has_begun() -> None:
    parser = choose_parser(THINK, rendered="<think>\n")
    assert parser.is_thinking
    parser.push("Hm.</think>\n\n")
    parser.push("{")
    assert not parser.is_thinking


def test_a_value_without_a_type_takes_that_of_its_schema() -> None:
    assert coerced("2", {"type": "integer"}) == 2
    assert coerced("2.0", {"type": "integer"}) == 2
    assert coerced("2", {"type": "string"}) == "2"
    assert coerced("True", {"type": "boolean"}) is True
    assert coerced("null", {"type": ["string", "null"]}) is None
    assert coerced("{'a': 1}", {"type": "object"}) == {"a": 1}
    assert coerced("[1]", {"anyOf": [{"type": "array"}, {"type": "null"}]}) == [1]
    assert coerced("two", {"type": "integer"}) == "two"
    assert coerced("2", {}) == "2"


MARKUP = sorted(
    {form.open for family in FAMILIES for form in family.calls}
    | {form.close for family in FAMILIES for form in family.calls}
    | {mark for family in FAMILIES for mark in family.dropped}
    | {"<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", " to=functions.now"}
    | {"<function=now>", "</function>", "<parameter=a>", "<arg_key>", "</arg_key>", "<arg_value>"}
    | {
        "weather",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ":",
        ",",
        "\\",
        "\\ud800",
        "1e999",
        "call:",
    }
    | {"\n", " ", "é", "now", '{"name": "now", "arguments": ', "9" * 400, "[ARGS]", 'name="now">'}
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    words=st.lists(st.sampled_from(MARKUP) | st.text(max_size=3), max_size=30),
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 1000),
)
def test_nothing_that_a_model_writes_raises_or_depends_on_chunks(
    words: list[str], family: Any, seed: int
) -> None:
    source = " ".join(family.template_marks) + THINK
    text = "".join(words)
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(10)))
    ends = [*cuts, len(text)]
    chunks = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    whole = parsed(choose_parser(source, tools=TOOLS), [text])
    assert parsed(choose_parser(source, tools=TOOLS), chunks) == whole
    assert parsed(choose_parser(source, tools=TOOLS), list(text)) == whole
    json.dumps([p.arguments for p in whole if isinstance(p, ToolCall)], allow_nan=False).encode()


def test_a_long_call_is_read_in_linear_time() -> None:
    parser = choose_parser("<tool_call>", tools=TOOLS)
    arguments = json.dumps({"city": "x" * 200_000})
    text = f"<tool_call>{bare('weather', arguments)}</tool_call>"
    pieces = parsed(parser, in_chunks(text, 40))
    assert pieces == [ToolCall("weather", {"city": "x" * 200_000})]
