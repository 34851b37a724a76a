"""Conversations to prompts, by the Jinja template that a model brings.

Templates are programs by strangers, written against the environment that Hugging Face renders them
in; so the environment here is that one: sandboxed and immutable, blocks trimmed, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, loop controls, the `generation` tag.

    messages ──clean──▶ plain JSON, arguments as objects, text parts joined
             ──mark───▶ control tokens that users wrote become literal spans (see tokenizer.py)
             ──render─▶ text. Refused? Again with the system messages moved, roles merged

What a template can and cannot do is found out by trying it, not by reading it: `supports_tools` and
`supports_thinking` render a probe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from . import messages as cleaning
from .tokenizer import LITERAL_CLOSE, LITERAL_OPEN, ModelFile

Message = Mapping[str, Any]

# A rendered prompt is a small multiple of its messages. Beyond this it is a runaway loop.
MAX_OUTPUT_CHARS = 64_000_000
MAX_ROUNDS = 2_000_000  # of all loops together: seconds, where real templates take thousands
_MAX_REPEATED = 1_000_000  # what `*` may make of a string or list
_ROUNDS = "rounds_of_all_loops"  # a variable that each rendering brings
_CONTINUE_MARK = "\ufdd2"  # a code point that Unicode keeps from ever being a character

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}},
            "required": ["word"],
        },
    },
}
_PROBE_QUESTION: Message = {"role": "user", "content": "probe question"}
_PROBE_ROUND_TRIP: Sequence[Message] = (
    _PROBE_QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": {"word": "probe argument"}},
            }
        ],
    },
    {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "probe result"},
)
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_THINKING_TAGS = ("<think>", "[THINK]", "<|channel>thought", "<|channel|>analysis", "<seed:think>")


class TemplateError(Exception):
    """The template cannot render this conversation, or is none. The text says why."""


class _Runaway(TemplateError):
    """It was stopped. Another form of the conversation would not help."""


class ChatTemplate:
    """One template, compiled. Stateless after construction; may be used from any thread.

    `special_tokens` are visible to the template (bos_token, ...). `control_tokens` are spellings
    that users must not be able to write, see `Tokenizer.control_tokens`. `tools_source` is a second
    template that some models bring for conversations with tools.

    Raises TemplateError if a source does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
        tools_source: str | None = None,
    ) -> None:
        self.source = source
        self.tools_source = tools_source
        self._special_tokens = dict(special_tokens or {})
        self._control_tokens = tuple(control_tokens)
        environment = _environment()
        self._template = _compiled(environment, source)
        self._tools_template = _compiled(environment, tools_source) if tools_source else None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as text. `continue_final_message`: it ends in the last message's words.

        Raises TemplateError with the template's own words if it refuses the conversation.
        """
        cleaned = cleaning.clean(messages, self.source)
        marked = [self._with_literals(message) for message in cleaned]
        if continue_final_message and marked:
            marked[-1] = _with_end_mark(marked[-1])
        variables = {
            **self._special_tokens,
            **kwargs,
            "tools": cleaning.clean_tools(tools) or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._first_accepted(marked, variables)
        return text.partition(_CONTINUE_MARK)[0] if continue_final_message else text

    @property
    def all_sources(self) -> str:
        """Both templates: what the response parser is chosen by."""
        return self.source + (self.tools_source or "")

    @cached_property
    def supports_tools(self) -> bool:
        """It shows tools to the model, and can tell a call and its result."""
        try:
            shown = self.render([_PROBE_QUESTION], [_PROBE_TOOL])
            told = self.render(_PROBE_ROUND_TRIP, [_PROBE_TOOL])
        except TemplateError:
            return False
        told_all = all(word in told for word in ("probe argument", "probe result"))
        return "probe_tool" in shown and told_all

    @cached_property
    def supports_thinking(self) -> bool:
        """It knows tags for thinking, or a switch for it."""
        return self.thinking_switch is not None or any(tag in self.source for tag in _THINKING_TAGS)

    @cached_property
    def thinking_switch(self) -> str | None:
        """The variable that turns thinking on and off, if one does."""
        for name in _THINKING_SWITCHES:
            try:
                on, off = (self._render_switched(name, value) for value in (True, False))
            except TemplateError:
                continue
            if on != off:
                return name
        return None

    def _render_switched(self, switch: str, value: bool) -> str:
        kwargs: dict[str, Any] = {switch: value}
        return self.render([_PROBE_QUESTION], None, True, False, **kwargs)

    @cached_property
    def _wants_parts(self) -> bool:
        """Text must come as a list of parts: as a string it would be lost."""
        asked = [dict(_PROBE_QUESTION)]
        variables = {**self._special_tokens, "tools": None, "add_generation_prompt": True}
        try:
            if str(_PROBE_QUESTION["content"]) in self._rendered(asked, variables):
                return False
        except _Runaway:
            raise
        except TemplateError:
            pass  # it wants something else than a string; parts may be it
        try:
            in_parts = [cleaning.with_text_parts(message) for message in asked]
            return str(_PROBE_QUESTION["content"]) in self._rendered(in_parts, variables)
        except TemplateError:
            return False

    def _first_accepted(
        self, messages: Sequence[cleaning.Cleaned], variables: Mapping[str, Any]
    ) -> str:
        """As it is, or else in the first of the milder forms that the template takes."""
        refusal: TemplateError | None = None
        for form in cleaning.forms(messages):
            spelt = [cleaning.with_text_parts(m) for m in form] if self._wants_parts else form
            # Templates made for tools alone loop over them, and cannot loop over none.
            for tools in [variables["tools"]] if variables["tools"] else [None, []]:
                try:
                    return self._rendered(spelt, {**variables, "tools": tools})
                except _Runaway:
                    raise
                except TemplateError as error:
                    refusal = refusal or error
        assert refusal is not None, "there is always a first form"
        raise refusal

    def _rendered(self, messages: Sequence[cleaning.Cleaned], variables: Mapping[str, Any]) -> str:
        has_tools = bool(variables["tools"])
        template = (self._tools_template if has_tools else None) or self._template
        pieces: list[str] = []
        size = 0
        try:
            counted = {_ROUNDS: _Rounds()}
            for piece in template.generate(messages=list(messages), **variables, **counted):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _Runaway(f"its output exceeds {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # it is a stranger's program and can raise anything
            raise TemplateError(str(error) or type(error).__name__) from error
        return "".join(pieces)

    def _with_literals(self, message: cleaning.Cleaned) -> cleaning.Cleaned:
        """Users and tools may write what they like, but no control tokens."""
        content = message.get("content")
        if message["role"] not in ("user", "tool"):
            return message
        if isinstance(content, str):
            return {**message, "content": self._literal(content)}
        if isinstance(content, list):
            return {**message, "content": [self._literal_part(part) for part in content]}
        return message

    def _literal_part(self, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._literal(part["text"])}
        return part

    def _literal(self, text: str) -> str:
        if LITERAL_OPEN in text or LITERAL_CLOSE in text:
            text = text.replace(LITERAL_OPEN, "").replace(LITERAL_CLOSE, "")
        spelt = [token for token in self._control_tokens if token and token in text]
        if not spelt:
            return text
        longest_first = sorted(spelt, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        return re.sub(pattern, lambda found: f"{LITERAL_OPEN}{found[0]}{LITERAL_CLOSE}", text)


def load_chat_template(
    files: Sequence[ModelFile],
    metadata: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    control_tokens: Iterable[str] = (),
) -> ChatTemplate | None:
    """The model's own template; None if it brings none. Raises TemplateError if it is broken."""
    sources = find_templates(files, metadata)
    default = sources.get("default") or next(iter(sources.values()), None)
    if default is None:
        return None
    return ChatTemplate(default, special_tokens, control_tokens, sources.get("tool_use"))


def find_template(files: Sequence[ModelFile], metadata: Mapping[str, Any]) -> str | None:
    """The source of the template that is used by default."""
    sources = find_templates(files, metadata)
    return sources.get("default") or next(iter(sources.values()), None)


def find_templates(files: Sequence[ModelFile], metadata: Mapping[str, Any]) -> dict[str, str]:
    """All templates by name ("default", "tool_use", ...), from the first place that has any.

    In order: chat_template.jinja, tokenizer_config.json, chat_template.json, GGUF metadata.
    Raises TemplateError if one of the files cannot be read.
    """
    by_name = {PurePosixPath(file.name).name: Path(file.path) for file in files}
    if "chat_template.jinja" in by_name:
        return {"default": by_name["chat_template.jinja"].read_text(encoding="utf-8")}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if name in by_name:
            found = _named(_json_of(by_name[name]).get("chat_template"))
            if found:
                return found
    prefix = "tokenizer.chat_template"
    found = _named(metadata.get(prefix))
    for key, value in metadata.items():
        if key.startswith(prefix + ".") and isinstance(value, str):
            found[key.removeprefix(prefix + ".")] = value
    return found


def _named(value: Any) -> dict[str, str]:
    """A template alone, or a list of objects with name and template."""
    if isinstance(value, str):
        return {"default": value} if value else {}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
    }


def _json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateError(f"{path.name} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _with_end_mark(message: cleaning.Cleaned) -> cleaning.Cleaned:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": _CONTINUE_MARK}]}
    return {**message, "content": f"{content or ''}{_CONTINUE_MARK}"}


# --------------------------------------------------------------------------- the environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No mutation, no private attributes, and no one-line memory bombs."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        counts = [side for side in (left, right) if isinstance(side, int)]
        too_much = sizes and counts and sizes[0] * counts[0] > _MAX_REPEATED
        if too_much or (operator == "**" and any(abs(count) > 1024 for count in counts)):
            raise jinja2.exceptions.SecurityError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """The template, in which every loop counts its rounds."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            rounds = jinja2.nodes.Name(_ROUNDS, "load")
            # A sum, not a call: the sandbox checks every call, which costs more than most rounds.
            count = jinja2.nodes.Add(rounds, jinja2.nodes.Const(1))
            loop.body.insert(0, jinja2.nodes.ExprStmt(count).set_lineno(loop.lineno))
        return tree


class _Rounds:
    """How often the loops of one rendering went round."""

    def __init__(self) -> None:
        self._num_rounds = 0

    def __add__(self, more: int) -> None:
        self._num_rounds += more
        if self._num_rounds > MAX_ROUNDS:
            raise _Runaway(f"its loops go round more than {MAX_ROUNDS} times")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here its body passes."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["from_json"] = json.loads
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from error
    except Exception as error:  # constant folding runs a stranger's code
        raise TemplateError(str(error)) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
