"""/api/generate and /api/chat: the native API's inference routes.

The order of the checks decides which error a bad call gets, and clients match on the texts: both
are issue 2's. A stream is lines of JSON; its last line has `done` true, or is an error. An empty
prompt, or no messages, loads the model; with `keep_alive` 0 it unloads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from ...backend.protocol import Delta, Generate, TokenLogprob, ToolCall
from ..errors import BadRequest
from ..moment import Moment, now_text
from . import bodies
from .bodies import ChatBody, GenerateBody, Message, checked_format, checked_think
from .call import Call, Route
from .durations import parse_keep_alive_s
from .generation import (
    Answer,
    Generation,
    Held,
    PlainPieces,
    holding,
    native_logprobs,
    new_id,
)
from .lookup import Model, find_model
from .options import Options
from .replies import OPEN, Family, frame_of, line_of

RAW_EXCLUDES = "raw mode does not support template, system, or context"

Content = Callable[[Any, str, Sequence[ToolCall]], dict[str, Any]]


async def generate(call: Call) -> None:
    """POST /api/generate."""
    body = call.decode(GenerateBody)
    bodies.check_top_logprobs(body.top_logprobs)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    think = checked_think(body.think)
    model = find_model(call.services, body.model)
    if not body.prompt and keep_alive_s == 0:
        await _unload(call, model, {"response": ""})
        return
    if body.raw and (body.template or body.system or body.context):
        raise BadRequest(RAW_EXCLUDES)
    think = resolve_think(model, think)
    model.require_verb("generate")
    if body.suffix:
        model.require("insert")
    model.check_images(body.images)
    options = parse_options(call, model, body.options)
    format = checked_format(body.format)
    async with holding(call, model, keep_alive_s, options.wish) as held:
        if not body.prompt:
            await call.send_json(_only(model, {"response": ""}, "load"))
            return
        request = Generate(
            id=new_id(),
            **_input_of(body, model, think),
            context_ids=body.context or [],
            template=body.template or None,
            format=format,
            **common_fields(call, held, body, options),
        )
        generation = held.generation(request)
        if body.debug_render_only:
            await _send_rendered(call, model, generation, {"response": ""}, body.images)
            return
        await _answer(call, held, generation, _response, body.stream, with_context=not body.raw)


async def chat(call: Call) -> None:
    """POST /api/chat."""
    body = call.decode(ChatBody)
    bodies.check_top_logprobs(body.top_logprobs)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    think = checked_think(body.think)
    model = find_model(call.services, body.model, empty="model is required")
    if not body.messages and keep_alive_s == 0:
        await _unload(call, model, _message("", "", ()))
        return
    think = resolve_think(model, think)
    model.require_verb("chat")
    if body.tools:
        model.require("tools")
    for message in body.messages or ():
        model.check_images(message.images)
    options = parse_options(call, model, body.options)
    format = checked_format(body.format)
    async with holding(call, model, keep_alive_s, options.wish) as held:
        if not body.messages:
            await call.send_json(_only(model, _message("", "", ()), "load"))
            return
        request = Generate(
            id=new_id(),
            messages=conversation(model, [worker_message(message) for message in body.messages]),
            tools=body.tools or [],
            think=think,
            format=format,
            **common_fields(call, held, body, options),
        )
        generation = held.generation(request)
        if body.debug_render_only:
            images = [image for message in body.messages for image in message.images or ()]
            await _send_rendered(call, model, generation, _message("", "", ()), images)
            return
        await _answer(call, held, generation, _message, body.stream)


# ------------------------------------------------------------------- the request


def resolve_think(model: Model, think: bool | str | None) -> bool | str | None:
    """A model that can think does so unless told not to; another cannot be asked to."""
    if model.can("thinking"):
        return True if think is None else think
    if think:
        raise BadRequest(f'"{model.asked}" does not support thinking')
    return None


def parse_options(call: Call, model: Model, given: dict[str, Any] | None) -> Options:
    default = {"num_ctx": call.services.context_length or None}
    return Options.parse(default, model.manifest.params, given)


def common_fields(
    call: Call, held: Held, body: GenerateBody | ChatBody, options: Options
) -> dict[str, Any]:
    """The fields of a Generate that both routes fill alike."""
    may_shift = body.shift is not False
    window = min(
        options.num_ctx or held.lease.ready.context_length, held.lease.ready.context_length
    )
    return {
        "sampling": options.sampling(bodies.num_logprobs(body.logprobs, body.top_logprobs)),
        "max_tokens": options.max_tokens(window, may_shift),
        "num_ctx": options.num_ctx,
        "num_keep": options.num_keep,
        "stop": options.stop,
        "truncate": body.truncate is not False,
        "shift": may_shift,
        "render_only": bool(body.debug_render_only),
        "client": call.fair_key,
        "priority": options.priority,
        "adapter": options.adapter,
        "cache_salt": call.client_key,
    }


def _input_of(body: GenerateBody, model: Model, think: bool | str | None) -> dict[str, Any]:
    """Raw and fill-in-the-middle prompts go as they are, others through the chat template."""
    if body.raw:
        return {"prompt": body.prompt, "parse": False}
    if body.suffix:
        return {"prompt": body.prompt, "suffix": body.suffix, "parse": False}
    user: dict[str, Any] = {"role": "user", "content": body.prompt}
    if body.images:
        user["images"] = body.images
    if body.context:  # an earlier exchange: the model's own messages are in it
        messages = [*_system(body.system or model.manifest.system), user]
    elif body.system:
        messages = [*_system(body.system), *_own_messages(model), user]
    else:
        messages = conversation(model, [user])
    return {"messages": messages, "think": think}


def conversation(model: Model, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model's own system text, unless the request brings one, and messages go first."""
    brings_system = bool(messages) and messages[0].get("role") == "system"
    system = [] if brings_system else _system(model.manifest.system)
    return [*system, *_own_messages(model), *messages]


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _own_messages(model: Model) -> list[dict[str, Any]]:
    return [dict(message) for message in model.manifest.messages]


def worker_message(message: Message) -> dict[str, Any]:
    """As the templates know it, each field under every name that they use for it."""
    fields: dict[str, Any] = {"role": message.role.lower(), "content": message.content or ""}
    if message.thinking:
        fields["thinking"] = fields["reasoning_content"] = message.thinking
    if message.images:
        fields["images"] = message.images
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                **({"id": tool_call.id} if tool_call.id else {}),
                "type": "function",
                "function": {
                    "name": tool_call.function.name,
                    "arguments": tool_call.function.arguments or {},
                },
            }
            for tool_call in message.tool_calls
        ]
    if message.tool_name:
        fields["tool_name"] = fields["name"] = message.tool_name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


# -------------------------------------------------------------------- the answer


def _response(text: Any, thinking: str, tool_calls: Sequence[ToolCall]) -> dict[str, Any]:
    content: dict[str, Any] = {"response": text}
    if thinking:
        content["thinking"] = thinking
    if tool_calls:
        content["tool_calls"] = _tool_calls(tool_calls, 0)
    return content


def _message(
    text: Any, thinking: str, tool_calls: Sequence[ToolCall], first_index: int = 0
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if tool_calls:
        message["tool_calls"] = _tool_calls(tool_calls, first_index)
    return {"message": message}


def _tool_calls(tool_calls: Sequence[ToolCall], first_index: int) -> list[dict[str, Any]]:
    return [
        {
            "id": tool_call.id,
            "function": {
                "index": index,
                "name": tool_call.name,
                "arguments": tool_call.arguments,
            },
        }
        for index, tool_call in enumerate(tool_calls, first_index)
    ]


async def _answer(
    call: Call,
    held: Held,
    generation: Generation,
    content: Content,
    stream: bool | None,
    with_context: bool = False,
) -> None:
    if stream is False:
        answer = await generation.collect()
        full = content(answer.text, answer.thinking, answer.tool_calls)
        await call.send_json(
            _final(held, generation, full, answer.logprobs, with_context, answer.token_ids)
        )
        return
    late_calls: list[ToolCall] = []  # /api/generate tells calls in its last object only
    num_calls = 0
    pieces = _PlainLines(call)
    pieces.open(_frame(held.model, content))
    async with aclosing(generation.deltas(pieces)) as deltas:
        async for delta in deltas:
            if content is _message:
                part = _message(delta.text, delta.thinking, delta.tool_calls, num_calls)
                num_calls += len(delta.tool_calls)
            else:
                part = content(delta.text, delta.thinking, ())
                late_calls.extend(delta.tool_calls)
            if _is_visible(delta, content is _message):
                await call.send_line(_chunk(held.model, part, delta.logprobs))
    last = content("", "", late_calls)
    await call.send_line(_final(held, generation, last, (), with_context, pieces.token_ids))
    await call.end_stream()


class _PlainLines(PlainPieces):
    """Lines also tell when they were made."""

    __slots__ = ()

    def piece(self, text: bytes, came: Moment) -> bytes:
        return self._frame % (came.created_at, text)


def _frame(model: Model, content: Content) -> bytes:
    """What most lines look like: the time and the text are open."""
    return frame_of(line_of({**_chunk(model, content(OPEN, "", ()), ()), "created_at": OPEN}))


def _is_visible(delta: Delta, shows_calls: bool) -> bool:
    return bool(
        delta.text or delta.thinking or delta.logprobs or (shows_calls and delta.tool_calls)
    )


def _chunk(
    model: Model, content: dict[str, Any], logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    chunk = {"model": model.asked, "created_at": now_text(), **content, "done": False}
    if logprobs:
        chunk["logprobs"] = native_logprobs(logprobs)
    return chunk


def _final(
    held: Held,
    generation: Generation,
    content: dict[str, Any],
    logprobs: Sequence[TokenLogprob],
    with_context: bool,
    token_ids: Sequence[int],
) -> dict[str, Any]:
    end = generation.end
    final = _only(held.model, content, "abort" if generation.was_ended else end.reason)
    if logprobs:
        final["logprobs"] = native_logprobs(logprobs)
    if with_context and generation.started is not None:
        final["context"] = [*generation.started.prompt_ids, *token_ids]
    final.update(held.durations(end))
    if notes := generation.notes():
        final["llmd"] = notes
    return final


def _only(model: Model, content: dict[str, Any], reason: str) -> dict[str, Any]:
    """The last, or the only, object of an answer."""
    return {
        "model": model.asked,
        "created_at": now_text(),
        **content,
        "done": True,
        "done_reason": reason,
    }


async def _unload(call: Call, model: Model, content: dict[str, Any]) -> None:
    await call.services.manager.unload(model.name)
    await call.send_json(_only(model, content, "unload"))


async def _send_rendered(
    call: Call,
    model: Model,
    generation: Generation,
    content: dict[str, Any],
    images: Sequence[str] | None,
) -> None:
    started = await generation.started_only()
    await call.send_json(
        {
            "model": model.asked,
            "created_at": now_text(),
            **content,
            "done": False,
            "_debug_info": {
                "rendered_template": started.rendered,
                "image_count": len(images or ()),
            },
        }
    )


ROUTES = (
    Route(("POST",), "/api/generate", generate, Family.NATIVE, GenerateBody, "Complete a prompt"),
    Route(("POST",), "/api/chat", chat, Family.NATIVE, ChatBody, "Answer a conversation"),
)

__all__ = ["ROUTES", "Answer", "conversation", "resolve_think", "worker_message"]
