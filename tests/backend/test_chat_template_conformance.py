"""71 real chat templates: rendered as transformers renders them, and their own calls read back."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from llmd.backend.text.chat_template import ChatTemplate, TemplateError
from llmd.backend.text.response_parser import Piece, ToolCall, choose_parser

from .. import conformance_files as files

pytestmark = pytest.mark.slow

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
                "more": {"type": "object", "description": "More."},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": 'Köln, "am" Rhein {x}', "days": 2, "more": {"x": [1, 2.5]}}
QUESTION = {"role": "user", "content": "Hällo <b>you</b> & 'me'"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Hi there."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
    ],
}
RESULT = {
    "role": "tool",
    "name": "get_weather",
    "tool_name": "get_weather",
    "tool_call_id": "abcdefghi",
    "content": "sunny",
}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, bool]] = {
    "question": ([QUESTION], None, True),
    "system": ([SYSTEM, QUESTION, ANSWER, QUESTION], None, True),
    "ended": ([QUESTION, ANSWER], None, False),
    "tools": ([SYSTEM, QUESTION], [TOOL], True),
    "round trip": ([QUESTION, CALL, RESULT], [TOOL], True),
}
# Forms of calls that no row of the table reads yet: four by their tags, one that is prose.
NOT_READ = {
    "Kimi-K3",
    "MiniMax-M3",
    "tencent-Hy3",
    "upstage-Solar-Open-100B",
    "GigaChat3-10B-A1.8B",
}


def reference(source: str, conversation: str) -> str | None:
    """What transformers renders; None if the template raises there."""
    messages, tools, add_prompt = CONVERSATIONS[conversation]
    try:
        text: str = _compile_jinja_template(source).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_prompt,
            **SPECIAL,
        )
    except Exception:  # a template may raise anything
        return None
    return text


def test_all_templates_render_as_in_transformers() -> None:
    compared, different, failed = 0, [], []
    for name, source in files.templates().items():
        template = ChatTemplate(source, SPECIAL)
        for conversation, (messages, tools, add_prompt) in CONVERSATIONS.items():
            expected = reference(source, conversation)
            if expected is None:
                continue
            compared += 1
            try:
                if template.render(messages, tools, add_prompt) != expected:
                    different.append((name, conversation))
            except TemplateError as error:
                failed.append((name, conversation, str(error)))
    assert (different, failed) == ([], [])
    assert compared >= 330


def test_more_conversations_render_than_in_transformers() -> None:
    ours = theirs = 0
    for source in files.templates().values():
        template = ChatTemplate(source, SPECIAL)
        for conversation, (messages, tools, add_prompt) in CONVERSATIONS.items():
            theirs += reference(source, conversation) is not None
            try:
                template.render(messages, tools, add_prompt)
                ours += 1
            except TemplateError:
                continue
    assert ours >= theirs + 10


def call_of_template(template: ChatTemplate) -> tuple[str, str] | None:
    """A prompt, and the call that the template writes after it. None: it writes none."""
    try:
        prompt = template.render([QUESTION], [TOOL], True)
        whole = template.render([QUESTION, CALL, RESULT], [TOOL], False)
    except TemplateError:
        return None
    start = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    tag = whole.rfind("<", 0, start)
    if tag >= 0 and ">" not in whole[tag:start]:
        start = tag  # both texts go on with a tag that begins alike
    answer = whole[start : whole.find("sunny")]
    return (whole[:start], answer) if "get_weather" in answer else None


def calls_in(pieces: list[Piece]) -> list[ToolCall]:
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_the_calls_that_templates_write_are_read_back(size: int) -> None:
    not_read, tried = set(), 0
    for name, source in files.templates().items():
        found = call_of_template(ChatTemplate(source, SPECIAL))
        if found is None:
            continue
        tried += 1
        prompt, answer = found
        parser = choose_parser(source, rendered=prompt, tools=[TOOL])
        pieces: list[Piece] = []
        for start in range(0, len(answer), size):
            pieces += parser.push(answer[start : start + size])
        if calls_in(pieces + parser.finish()) != [ToolCall("get_weather", ARGUMENTS)]:
            not_read.add(name)
    assert not_read == NOT_READ
    assert tried >= 55
