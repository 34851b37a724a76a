"""/v1/chat/completions: OpenAI's chat, streamed or whole, with `n` choices side by side.

All choices of a request run as sequences of one lease, at once; their prompt is computed once and
shared. In a stream their chunks come as they are made, told apart by `index`. A stream ends with
`data: [DONE]`, or with one error event.

Source: OpenAI's API reference; where servers differ, issue 2's and issue 6's notes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from ...backend.protocol import Delta, Finished, TokenLogprob, ToolCall
from ..errors import BadRequest
from .bodies import check_top_logprobs, num_logprobs
from .call import Call, Route
from .durations import parse_keep_alive_s
from .generation import Generation, Held, PlainPieces, holding, native_logprobs
from .lookup import find_model
from .native import parse_options
from .openai_bodies import (
    ChatCompletionBody,
    StreamOptions,
    logit_bias_of,
    sampling_options,
    think_of_effort,
    worker_messages,
)
from .replies import OPEN, Family, event_of, frame_of
from .turn import (
    Turn,
    check,
    checked_tools,
    choose_tools,
    collected,
    deltas_of,
    request_of,
    start,
)

MAX_CHOICES = 128
FINGERPRINT = "fp_ollama"  # some clients look for a value they know


async def chat_completions(call: Call) -> None:
    """POST /v1/chat/completions."""
    body = call.decode(ChatCompletionBody)
    if not body.messages:
        raise BadRequest("[] is too short - 'messages'")
    turn = turn_of(body)
    num_choices = checked_choices(body.n)
    model = find_model(call.services, body.model, empty="model is required")
    check(turn, model)
    options = parse_options(call, model, dict(turn.options))
    async with holding(call, model, turn.keep_alive_s) as held:
        if body.debug_render_only:
            await _send_rendered(call, held, turn)
            return
        generations = [start(held, turn, options, index) for index in range(num_choices)]
        reply = ChatReply(call, held, turn, f"chatcmpl-{secrets.token_hex(12)}", body)
        if body.stream:
            await reply.stream(generations)
        else:
            await reply.send(generations)


def turn_of(body: ChatCompletionBody) -> Turn:
    """Raises BadRequest."""
    check_top_logprobs(body.top_logprobs)
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    choice, name = _tool_choice(body.tool_choice)
    tools, must_call = choose_tools(checked_tools(body.tools), choice, name)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    return Turn(
        messages=worker_messages(body.messages or ()),
        tools=tools,
        must_call=must_call,
        one_call=body.parallel_tool_calls is False,
        think=think_of_effort(effort),
        format=format_of(body.response_format),
        options=sampling_options(body, max_tokens),
        num_logprobs=num_logprobs(body.logprobs, body.top_logprobs),
        logit_bias=logit_bias_of(body),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or (),
        template_kwargs=body.chat_template_kwargs or {},
        keep_alive_s=parse_keep_alive_s(body.keep_alive),
    )


def checked_choices(n: int | None) -> int:
    """Raises BadRequest."""
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}")
    return n or 1


def format_of(response_format: dict[str, Any] | None) -> Any:
    """`response_format` as the native `format`. Raises BadRequest."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise BadRequest("response_format.json_schema.schema must be a JSON schema object")
        return schema
    raise BadRequest(f"invalid response_format type {kind!r}; use text, json_object or json_schema")


def _tool_choice(choice: Any) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str):
            return "named", name
    raise BadRequest("tool_choice must be auto, none, required or a named function")


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Writes the answer of one request."""

    call: Call
    held: Held
    turn: Turn
    id: str
    body: ChatCompletionBody

    async def send(self, generations: Sequence[Generation]) -> None:
        """All choices in one object."""
        choices = await at_once([self._choice(g, i) for i, g in enumerate(generations)])
        answer = {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage_of([generation.end for generation in generations]),
        }
        if notes := truncation_notes(generations):
            answer["llmd"] = notes
        await self.call.send_json(answer)

    async def _choice(self, generation: Generation, index: int) -> dict[str, Any]:
        answer = await collected(generation, self.turn)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.thinking:
            message["reasoning"] = answer.thinking
        if answer.tool_calls:
            message["tool_calls"] = openai_calls(answer.tool_calls, 0)
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": finish_reason(generation.end, bool(answer.tool_calls)),
        }
        if self.turn.num_logprobs >= 0:
            choice["logprobs"] = {"content": openai_logprobs(answer.logprobs)}
        return choice

    async def stream(self, generations: Sequence[Generation]) -> None:
        """Chunks as they come, of all choices."""
        await at_once([self._stream_choice(g, i) for i, g in enumerate(generations)])
        options = self.body.stream_options or StreamOptions()
        if options.include_usage:
            usage = usage_of([generation.end for generation in generations])
            await self.call.send_event(
                {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}
            )
        await self.call.send_done_mark()
        await self.call.end_stream()

    async def _stream_choice(self, generation: Generation, index: int) -> None:
        head = self._head("chat.completion.chunk")
        options = self.body.stream_options or StreamOptions()
        num_calls = 0
        role = {"role": "assistant"}
        pieces = PlainPieces(self.call)
        plain = {"index": index, "delta": {"content": OPEN}, "finish_reason": None}
        frame = frame_of(event_of({**head, "choices": [plain]}))
        async with aclosing(deltas_of(generation, self.turn, pieces)) as deltas:
            async for delta in deltas:
                parts = _parts(delta, num_calls)
                num_calls += len(delta.tool_calls)
                for position, part in enumerate(parts):
                    choice: dict[str, Any] = {
                        "index": index,
                        "delta": {**role, **part},
                        "finish_reason": None,
                    }
                    role = {}
                    if delta.logprobs and position == 0:
                        choice["logprobs"] = {"content": openai_logprobs(delta.logprobs)}
                    chunk = {**head, "choices": [choice]}
                    if options.continuous_usage_stats:
                        chunk["usage"] = running_usage(generation, len(pieces.token_ids))
                    await self.call.send_event(chunk)
                if parts and not options.continuous_usage_stats:
                    pieces.open(frame)
        if role:  # an empty answer still has a speaker
            opening = {"index": index, "delta": {**role, "content": ""}, "finish_reason": None}
            await self.call.send_event({**head, "choices": [opening]})
        reason = finish_reason(generation.end, num_calls > 0)
        last = {**head, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
        if options.continuous_usage_stats:
            last["usage"] = usage_of([generation.end])
        if notes := truncation_notes([generation]):
            last["llmd"] = notes
        await self.call.send_event(last)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time() - (time.monotonic() - self.call.arrived)),
            "model": self.held.model.asked,
            "system_fingerprint": FINGERPRINT,
        }


def _parts(delta: Delta, num_calls: int) -> list[dict[str, Any]]:
    """One delta of ours is up to three of theirs: reasoning, text, calls."""
    parts: list[dict[str, Any]] = []
    if delta.thinking:
        parts.append({"content": "", "reasoning": delta.thinking})
    if delta.text or (delta.logprobs and not delta.thinking):
        parts.append({"content": delta.text})
    if delta.tool_calls:
        parts.append({"content": "", "tool_calls": openai_calls(delta.tool_calls, num_calls)})
    return parts


def openai_calls(tool_calls: Sequence[ToolCall], first_index: int) -> list[dict[str, Any]]:
    return [
        {
            "id": tool_call.id,
            "index": index,
            "type": "function",
            "function": {
                "name": tool_call.name,
                "arguments": json.dumps(tool_call.arguments, ensure_ascii=False),
            },
        }
        for index, tool_call in enumerate(tool_calls, first_index)
    ]


def openai_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"top_logprobs": [], **entry} for entry in native_logprobs(logprobs)]


def finish_reason(end: Finished, has_calls: bool) -> str:
    return "tool_calls" if has_calls and end.reason == "stop" else end.reason


def usage_of(ends: Sequence[Finished]) -> dict[str, Any]:
    """The prompt is counted once, however many choices share it."""
    prompt, cached = ends[0].num_prompt_tokens, ends[0].num_cached_tokens
    completion = sum(end.num_output_tokens for end in ends)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def running_usage(generation: Generation, num_tokens: int) -> dict[str, Any]:
    prompt = len(generation.started.prompt_ids) if generation.started else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_tokens,
        "total_tokens": prompt + num_tokens,
    }


def truncation_notes(generations: Sequence[Generation]) -> dict[str, Any]:
    """What was cut off the prompt, if anything; usage tells the rest."""
    notes = generations[0].notes()
    notes.pop("cached_tokens", None)
    return notes


async def at_once(jobs: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all; the first failure ends the others and is raised."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_rendered(call: Call, held: Held, turn: Turn) -> None:
    options = parse_options(call, held.model, dict(turn.options))
    request = msgspec.structs.replace(request_of(held, turn, options), render_only=True)
    started = await held.generation(request).started_only()
    await call.send_json({"_debug_info": {"rendered_template": started.rendered}})


# -------------------------------------------------------------------------- models


async def list_models(call: Call) -> None:
    """GET /v1/models."""
    entries = [
        _model_entry(manifest.name.display, manifest) for manifest in call.services.store.list()
    ]
    await call.send_json({"object": "list", "data": entries})


async def get_model(call: Call) -> None:
    """GET /v1/models/{model}; the name may have slashes."""
    asked = call.params["model"]
    model = find_model(call.services, asked, empty="model is required")
    await call.send_json(_model_entry(asked, model.manifest))


async def transcriptions(call: Call) -> None:
    """POST /v1/audio/transcriptions: no model here hears."""
    raise BadRequest("no model here supports audio")


def _model_entry(id: str, manifest: Any) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": int(manifest.modified.timestamp()),
        "owned_by": manifest.name.namespace,
    }


ROUTES = (
    Route(
        ("POST",),
        "/v1/chat/completions",
        chat_completions,
        Family.OPENAI,
        ChatCompletionBody,
        "Answer a conversation",
    ),
    Route(
        ("POST",),
        "/v1/audio/transcriptions",
        transcriptions,
        Family.OPENAI,
        None,
        "Refused: no model here supports audio",
    ),
    Route(("GET", "HEAD"), "/v1/models", list_models, Family.OPENAI, None, "Installed models"),
    Route(("GET", "HEAD"), "/v1/models/{model:path}", get_model, Family.OPENAI, None, "One model"),
)
