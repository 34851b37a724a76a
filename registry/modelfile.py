"""Modelfile text to settings.

    FROM llama3.2:3b          one instruction in a line: NAME value; letter case of NAME is free
    PARAMETER stop "</s>"     values are bare to the end of the line, or "...", or triple-quoted
    SYSTEM  triple quotes     and quoted values may span lines; there are no escapes
    # a comment

`parse` is pure: it reads no file and looks up no model. Raises BadRequest with the line's number.

Source: the grammar as written down in issue 4, which is that of Ollama's Modelfile.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import BadRequest

COMMANDS = (
    *("from", "license", "template", "system", "adapter", "draft", "renderer", "parser"),
    *("parameter", "message", "requires"),
)
ROLES = ("system", "user", "assistant")
DEPRECATED = frozenset(
    {
        *("mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline", "low_vram", "f16_kv"),
        *("logits_all", "vocab_only", "use_mlock", "tfs_z", "numa"),
    }
)
_INTS = (
    *("num_ctx", "repeat_last_n", "seed", "num_predict", "top_k", "num_keep", "num_batch"),
    *("num_gpu", "main_gpu", "num_thread", "draft_num_predict"),
)
_FLOATS = (
    *("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty"),
    "frequency_penalty",
)
_BOOLS = ("use_mmap",)
_SEMVER = re.compile(r"v?\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.-]+)*\Z")
_LINE = re.compile(r"\s*(\S+)[ \t]*")


@dataclass(frozen=True, slots=True)
class Modelfile:
    """What a Modelfile says, in values."""

    bases: tuple[str, ...]  # FROM: a model's name or a path; a second one is a projector
    params: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    adapters: tuple[str, ...] = ()
    licenses: tuple[str, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    draft: str | None = None
    renderer: str | None = None
    parser: str | None = None
    requires: str | None = None
    warnings: tuple[str, ...] = ()


def parse(content: bytes | str) -> Modelfile:
    """Raises BadRequest, which names the line."""
    text = content if isinstance(content, str) else _decoded(content)
    bases: list[str] = []
    adapters: list[str] = []
    licenses: list[str] = []
    messages: list[Mapping[str, str]] = []
    params: dict[str, Any] = {}
    single: dict[str, str] = {}
    warnings: list[str] = []
    for line, command, value in _instructions(text):
        match command:
            case "from":
                bases.append(value)
            case "adapter":
                adapters.append(value)
            case "license":
                licenses.append(value)
            case "message":
                messages.append(_message(line, value))
            case "parameter":
                warnings += _add_parameter(params, line, value)
            case _:
                single[command] = value
    if not bases:
        raise BadRequest("no FROM line")
    requires = single.get("requires")
    if requires is not None and not _SEMVER.match(requires):
        raise BadRequest("requires must be a valid semver (e.g. 0.14.0)")
    return Modelfile(
        bases=tuple(bases),
        params=params,
        adapters=tuple(adapters),
        licenses=tuple(licenses),
        messages=tuple(messages),
        warnings=tuple(warnings),
        **{key: single.get(key) for key in ("template", "system", "draft", "renderer", "parser")},
        requires=requires,
    )


def checked_parameter(name: str, value: Any) -> Any:
    """The value in the parameter's own type. Raises BadRequest if it has none, or is unknown.

    Takes text, as a Modelfile has it, and the numbers and lists of the API.
    """
    key = name.lower()
    if key == "stop":
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise BadRequest("parameter stop must be text or a list of texts")
        return values
    convert = _converter(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        return convert(value)
    except (ValueError, TypeError):
        raise BadRequest(f"parameter {key} has the wrong value {str(value)[:100]!r}") from None


def _converter(key: str) -> Callable[[Any], Any]:
    if key in _INTS:
        return _to_int
    if key in _FLOATS:
        return float
    if key in _BOOLS:
        return _to_bool
    if key in DEPRECATED:
        return lambda value: value
    raise BadRequest(f"unknown parameter '{key}'")


def _to_int(value: Any) -> int:
    number = float(value)
    if isinstance(value, bool) or number != int(number):
        raise ValueError
    return int(value) if isinstance(value, (int, str)) and "." not in str(value) else int(number)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]


def _add_parameter(params: dict[str, Any], line: int, value: str) -> list[str]:
    """Put one PARAMETER among the others; returns warnings."""
    name, _, rest = value.partition(" ")
    name, rest = name.lower(), _unquoted(rest.strip())
    if not rest:
        raise BadRequest(f"(line {line}): parameter {name} has no value")
    try:
        checked = checked_parameter(name, rest)
    except (BadRequest, KeyError) as error:
        raise BadRequest(f"(line {line}): {error}") from None
    if name in DEPRECATED:
        return [f"warning: parameter {name} is deprecated"]
    if name == "stop":
        params["stop"] = [*params.get("stop", []), *checked]
    else:
        params[name] = checked
    return []


def _message(line: int, value: str) -> Mapping[str, str]:
    role, _, content = value.partition(" ")
    if role.lower() not in ROLES:
        raise BadRequest(
            f'(line {line}): message role must be one of "system", "user", or "assistant"'
        )
    return {"role": role.lower(), "content": _unquoted(content.strip())}


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, command in lower case, value)."""
    position, line = 0, 1
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        first = text[position:end].strip()
        if not first or first.startswith("#"):
            position, line = end + 1, line + 1
            continue
        match = _LINE.match(text, position)
        assert match is not None, "the line is not blank"
        command = match[1].lower()
        if command not in COMMANDS:
            listed = ", ".join(f'"{name}"' for name in COMMANDS[:-1])
            raise BadRequest(f'(line {line}): command must be one of {listed}, or "requires"')
        value, next_position = _value(text, match.end(), line, command)
        yield line, command, value
        line += text.count("\n", position, next_position)
        position = next_position


def _value(text: str, start: int, line: int, command: str) -> tuple[str, int]:
    """The value from `start`, and where the next line begins."""
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    prefix = ""
    if command in ("message", "parameter"):  # a word comes before the value that may be quoted
        word = re.compile(r"[ \t]*(\S+)[ \t]*").match(text, start, end)
        if word is not None and not word[1].startswith('"'):
            prefix, start = word[1] + " ", word.end()
    for quote in ('"""', '"'):
        if text.startswith(quote, start):
            close = text.find(quote, start + len(quote))
            if close < 0:
                raise BadRequest(f"(line {line}): unexpected end: a quote is not closed")
            after = text.find("\n", close)
            value = text[start + len(quote) : close]
            return prefix + value, len(text) if after < 0 else after + 1
    value = prefix + text[start:end].strip()
    if not value.strip():
        raise BadRequest(f"(line {line}): {command} has no value")
    return value, end + 1


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _decoded(content: bytes) -> str:
    encoding = "utf-8-sig"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        raise BadRequest("the Modelfile is neither UTF-8 nor UTF-16") from None
