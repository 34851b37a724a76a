"""A grammar under which nothing but tool calls can be written, for `tool_choice`.

The call is framed as the family spells it, so that the response parser reads it back, and so that
the model writes what it was trained to write. Marks that are control tokens are forced as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .grammar import JSON_OPTIONS, GrammarError, closed
from .json_bounds import with_short_times
from .response_families import FAMILIES, Family, choose_family
from .tokenizer import Tokenizer

_NAME = "NAME"  # in a frame: the tool's name


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands before and after the JSON of a call.

    `arguments_key`: the JSON is {"name": ..., key: {...}}; empty: it is the arguments alone.
    """

    before: str
    after: str
    arguments_key: str = ""


_TAGS = _Frame("<tool_call>\n", "\n</tool_call>", "arguments")
_FRAMES = {
    "hermes": _TAGS,
    "qwen3-coder": _TAGS,  # it reads JSON between the tags as well
    "plain": _TAGS,
    "apriel": _Frame("<tool_calls>[", "]</tool_calls>", "arguments"),
    "nemotron-2": _Frame("<TOOLCALL>[", "]</TOOLCALL>", "arguments"),
    "granite-3, phi-4": _Frame("<|tool_call|>[", "]", "arguments"),
    "gigachat": _Frame("<|function_call|>", "", "arguments"),
    "llama-3": _Frame("", "", "parameters"),
    "mistral": _Frame("[TOOL_CALLS]NAME[ARGS]", ""),
    "mistral, lists": _Frame("[TOOL_CALLS][", "]", "arguments"),
    "harmony": _Frame("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
    "deepseek": _Frame(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": _Frame(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
}


_PLAIN = next(family for family in FAMILIES if family.name == "plain")


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A format (see grammar.py), and the family whose parser reads what it admits."""

    format: dict[str, str]
    family: Family


def forced_call(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    template_source: str,
    architecture: str = "",
) -> ForcedCall:
    """The format under which one of these tools is called, once.

    Families without a frame here write the plain one. Raises GrammarError if there is no tool.
    """
    family = choose_family(template_source, architecture)
    name = family.name
    if name == "mistral" and "[ARGS]" not in template_source:
        name = "mistral, lists"
    if name not in _FRAMES:
        family, name = _PLAIN, _PLAIN.name
    frame = _FRAMES[name]
    functions = [tool.get("function", tool) for tool in tools]
    if not functions:
        raise GrammarError("a tool call is required, but there are no tools")
    rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        rules.append(f"call_{index}: {_call_rule(tokenizer, frame, function)}")
    return ForcedCall({"grammar": "\n".join(rules)}, family)


def _call_rule(tokenizer: Tokenizer, frame: _Frame, function: Mapping[str, Any]) -> str:
    name = str(function.get("name", ""))
    stated = json.loads(json.dumps(function.get("parameters") or {"type": "object"}))
    schema: Any = with_short_times(closed(stated))
    definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    if frame.arguments_key:
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, frame.arguments_key: schema},
            "required": ["name", frame.arguments_key],
            "additionalProperties": False,
        }
    # References count from the root, which may be one level further up now.
    value = json.dumps({**schema, **definitions, "x-guidance": JSON_OPTIONS})
    before = _literals(tokenizer, frame.before.replace(_NAME, name))
    return " ".join([*before, f"%json {value}", *_literals(tokenizer, frame.after)])


def _literals(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text in Lark: quoted, and control tokens by their ids."""
    spelt = [token for token in tokenizer.control_tokens if token in text]
    if not spelt:
        return [_quoted(text)] if text else []
    pattern = "|".join(map(re.escape, sorted(spelt, key=len, reverse=True)))
    found = []
    for part in re.split(f"({pattern})", text):
        if part in tokenizer.control_tokens:
            found.append(f"<[{tokenizer.control_tokens[part]}]>")
        elif part:
            found.append(_quoted(part))
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
