"""The request bodies of the native API.

msgspec checks the types while it decodes. Unknown fields are ignored and null is "absent": clients
send both. What has rules of its own (options, keep_alive, think, format) is taken as it comes and
checked by a function here or in options.py and durations.py, whose errors clients know by text.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import BadRequest

THINK_LEVELS = ("high", "medium", "low", "max")
_THINK_CHOICES = '"high", "medium", "low", "max", true, or false'
MAX_TOP_LOGPROBS = 20


class Body(msgspec.Struct, frozen=True):
    """Base of all request bodies."""


class ToolFunctionCall(Body, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None


class MessageToolCall(Body, frozen=True):
    function: ToolFunctionCall
    id: str | None = None


class Message(Body, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GenerateBody(Body, frozen=True):
    """POST /api/generate."""

    model: str | None = None
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    stream: bool | None = None
    raw: bool | None = None
    format: Any = None
    keep_alive: Any = None
    images: list[str] | None = None
    options: dict[str, Any] | None = None
    think: Any = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    debug_render_only: bool | None = msgspec.field(default=None, name="_debug_render_only")


class ChatBody(Body, frozen=True):
    """POST /api/chat."""

    model: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    format: Any = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None
    think: Any = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    debug_render_only: bool | None = msgspec.field(default=None, name="_debug_render_only")


class EmbedBody(Body, frozen=True):
    """POST /api/embed."""

    model: str | None = None
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class EmbeddingsBody(Body, frozen=True):
    """POST /api/embeddings, the older form."""

    model: str | None = None
    prompt: str | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class NameBody(Body, frozen=True):
    """A model's name under either of its two keys; `model` goes first."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str:
        return self.model or self.name or ""


class ShowBody(NameBody, frozen=True):
    """POST /api/show."""

    verbose: bool | None = None
    system: str | None = None
    options: dict[str, Any] | None = None


class PullBody(NameBody, frozen=True):
    """POST /api/pull and push."""

    insecure: bool | None = None
    stream: bool | None = None
    as_: str | None = msgspec.field(default=None, name="as")  # pull: the name to give it here
    accept_terms: bool | None = None  # False: end with the terms, if there are any, unfetched


class CopyBody(Body, frozen=True):
    """POST /api/copy."""

    source: str | None = None
    destination: str | None = None


def check_top_logprobs(top_logprobs: int | None) -> None:
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")


def num_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int:
    """As SamplingParams wants it: -1 none, 0 the chosen token's, k the k likeliest besides."""
    return (top_logprobs or 0) if logprobs else -1


def checked_think(value: object) -> bool | str | None:
    """Raises BadRequest."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise BadRequest(f"think must be a boolean or string ({_THINK_CHOICES})")
    if value not in THINK_LEVELS:
        quoted = json.dumps(value, ensure_ascii=False)
        raise BadRequest(f"invalid think value: {quoted} (must be {_THINK_CHOICES})")
    return value


def checked_format(value: object) -> Any:
    """None, "json" or a schema. Raises BadRequest.

    {"regex": ...} and {"grammar": ...} pass too: extras of ours, which the worker knows.
    """
    if value is None or value == "":
        return None
    if value == "json" or isinstance(value, dict):
        return value
    # The client's JSON text in quotes of its own, as the clients of this API know it.
    shown = json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)
    if not isinstance(value, str):
        shown = json.dumps(value, ensure_ascii=False)
    raise BadRequest(f'invalid format: {shown}; expected "json" or a valid JSON Schema object')
