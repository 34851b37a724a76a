"""The request bodies of the OpenAI routes, and their messages in the worker's form.

Fields beyond OpenAI's are extras that users ask for or benchmarks send: `options` and `keep_alive`
as in the native API; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`stop_token_ids`, `chat_template_kwargs` as other engines name them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import BadRequest
from .bodies import Body
from .turn import image_data

# reasoning_effort, as `think` has it.
_EFFORTS: dict[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "max",
    "xhigh": "max",
    "ultra": "max",
}


class CalledFunction(Body, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(Body, frozen=True):
    function: CalledFunction
    id: str | None = None


class OpenAIMessage(Body, frozen=True):
    """One message; content is text or a list of parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(Body, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Reasoning(Body, frozen=True):
    effort: str | None = None


class SamplingBody(Body, frozen=True):
    """The fields that chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class ChatCompletionBody(SamplingBody, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[OpenAIMessage] | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    debug_render_only: bool | None = msgspec.field(default=None, name="_debug_render_only")


class CompletionBody(SamplingBody, frozen=True):
    """POST /v1/completions."""

    prompt: Any = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None


class OpenAIEmbeddingsBody(Body, frozen=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Any = None
    dimensions: int | None = None
    encoding_format: str | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


def sampling_options(body: SamplingBody, max_tokens: int | None) -> dict[str, Any]:
    """In native names. Absent temperature and top_p are 1, as these clients expect."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": body.seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repeat_penalty": body.repetition_penalty,
        "num_predict": max_tokens,
    }
    named = {key: value for key, value in given.items() if value is not None}
    return {"temperature": 1.0, "top_p": 1.0, **(body.options or {}), **named}


def logit_bias_of(body: SamplingBody) -> dict[int, float]:
    """By token id. Raises BadRequest."""
    try:
        return {int(key): float(value) for key, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise BadRequest("logit_bias maps token ids to numbers from -100 to 100") from error


def think_of_effort(effort: str | None) -> bool | str | None:
    """Raises BadRequest."""
    if effort is None:
        return None
    if effort not in _EFFORTS:
        known = ", ".join(_EFFORTS)
        raise BadRequest(f"invalid reasoning value: '{effort}' (must be one of {known})")
    return _EFFORTS[effort]


def worker_messages(messages: Sequence[OpenAIMessage]) -> list[dict[str, Any]]:
    """As the templates know them. Raises BadRequest."""
    name_of_call = {
        called.id: called.function.name
        for message in messages
        for called in message.tool_calls or ()
        if called.id
    }
    return [_worker_message(message, name_of_call) for message in messages]


def _worker_message(message: OpenAIMessage, name_of_call: dict[str, str]) -> dict[str, Any]:
    role = message.role.lower()
    if message.content is None and not message.tool_calls and role != "assistant":
        raise BadRequest("invalid message content: it is null")
    text, images = _content(message.content)
    fields: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if images:
        fields["images"] = images
    if thinking := message.reasoning or message.reasoning_content:
        fields["thinking"] = fields["reasoning_content"] = thinking
    if message.tool_calls:
        fields["tool_calls"] = [_worker_call(called) for called in message.tool_calls]
    if role == "tool":
        name = message.name or name_of_call.get(message.tool_call_id or "", "")
        fields["tool_name"] = fields["name"] = name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _content(content: str | list[dict[str, Any]] | None) -> tuple[str, list[str]]:
    """Text and images; several texts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or "", []
    texts, images = [], []
    for part in content:
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url":
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, dict) else url
            if not isinstance(url, str):
                raise BadRequest("invalid image input")
            images.append(image_data(url))
        elif kind == "input_audio":
            raise BadRequest("audio input is not supported")
        elif kind != "refusal":
            raise BadRequest("invalid message format")
    return "\n".join(texts), images


def _worker_call(called: CalledTool) -> dict[str, Any]:
    return {
        **({"id": called.id} if called.id else {}),
        "type": "function",
        "function": {
            "name": called.function.name,
            "arguments": parsed_arguments(called.function.arguments),
        },
    }


def parsed_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Raises BadRequest."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise BadRequest("invalid tool call arguments") from error
    if not isinstance(value, dict):
        raise BadRequest("invalid tool call arguments")
    return value
