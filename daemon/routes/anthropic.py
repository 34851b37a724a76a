"""/v1/messages and /v1/messages/count_tokens: the Anthropic API, as its coding agents use it.

A streamed answer is a sequence of blocks that never overlap, each with a start, deltas and a stop:

    message_start  (content_block_start  content_block_delta*  content_block_stop)*
    message_delta  message_stop

`ping` events fill the wait for the first token. A thinking budget for a model that cannot think is
dropped, not refused: agents always send one.

Source: the Anthropic API reference; issue 2's and 6's notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ...backend.protocol import Finished, Tokenize, ToolCall
from ..errors import BadRequest
from .bodies import Body
from .call import Call, Route
from .durations import parse_keep_alive_s
from .generation import Generation, Held, PlainPieces, holding, new_id
from .lookup import Model, find_model
from .native import conversation, parse_options
from .openai import truncation_notes
from .replies import OPEN, Family, event_of, frame_of
from .turn import Turn, check, choose_tools, collected, deltas_of, start

PING_PERIOD_S = 10.0  # well inside the idle timeouts of proxies
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "max"}


class AnthropicMessage(Body, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


class Thinking(Body, frozen=True):
    type: str
    budget_tokens: int | None = None


class OutputConfig(Body, frozen=True):
    effort: str | None = None


class CountTokensBody(Body, frozen=True):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    keep_alive: Any = None


class MessagesBody(CountTokensBody, frozen=True):
    """POST /v1/messages."""

    max_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    options: dict[str, Any] | None = None


async def messages(call: Call) -> None:
    """POST /v1/messages."""
    body = call.decode(MessagesBody)
    model = _checked_model(call, body)
    turn = _turn_of(body, model)
    check(turn, model)
    options = parse_options(call, model, dict(turn.options))
    async with (
        _pinging(call, bool(body.stream), model.asked) as begin,
        holding(call, model, turn.keep_alive_s) as held,
    ):
        generation = start(held, turn, options)
        if body.stream:
            await _Blocks(call, held, turn, begin).stream(generation)
        else:
            await _send(call, held, turn, generation)


async def count_tokens(call: Call) -> None:
    """POST /v1/messages/count_tokens."""
    body = call.decode(CountTokensBody)
    model = find_model(call.services, body.model, empty="model is required")
    if not body.messages:
        raise BadRequest("messages is required")
    turn = _turn_of(body, model)
    check(turn, model)
    async with holding(call, model, turn.keep_alive_s) as held:
        found = await held.lease.tokenize(
            Tokenize(new_id(), messages=conversation(model, turn.messages), tools=list(turn.tools))
        )
        await call.send_json({"input_tokens": len(found.token_ids)})


def _checked_model(call: Call, body: MessagesBody) -> Model:
    """The order of these checks is the contract's. Raises BadRequest, NotFound."""
    if not body.model:
        raise BadRequest("model is required")
    if body.max_tokens is None or body.max_tokens <= 0:
        raise BadRequest("max_tokens is required and must be positive")
    if not body.messages:
        raise BadRequest("messages is required")
    return find_model(call.services, body.model)


# ------------------------------------------------------------------- the request


def _turn_of(body: CountTokensBody, model: Model) -> Turn:
    """Raises BadRequest."""
    options: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        given = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "num_predict": body.max_tokens,
        }
        named = {key: value for key, value in given.items() if value is not None}
        options = {**(body.options or {}), **named}
    choice, name = _tool_choice(body.tool_choice)
    tools, must_call = choose_tools(_tools(body.tools), choice, name)
    return Turn(
        messages=_worker_messages(body),
        tools=tools,
        must_call=must_call,
        think=_think(body) if model.can("thinking") else None,
        options=options,
        keep_alive_s=parse_keep_alive_s(body.keep_alive),
    )


def _think(body: CountTokensBody) -> bool | str:
    """Only when it is asked for: unlike the native API, thinking is off by default here."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return False
    if body.output_config is not None and body.output_config.effort is not None:
        return _EFFORTS.get(body.output_config.effort, "high")
    return body.thinking is not None


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str, str | None]:
    kind = (choice or {}).get("type", "auto")
    if kind in ("auto", "none"):
        return kind, None
    if kind == "any":
        return "required", None
    if kind == "tool":
        return "named", str((choice or {}).get("name"))
    raise BadRequest("tool_choice.type must be auto, any, tool or none")


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """In the native form; tools that a vendor's server would run are left out."""
    found = []
    for index, tool in enumerate(tools or ()):
        if str(tool.get("type", "custom")) != "custom":
            continue
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools.{index}.name is required")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool.get("input_schema") or {"type": "object"}
        found.append({"type": "function", "function": function})
    return found


def _worker_messages(body: CountTokensBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    system = body.system
    if isinstance(system, list):
        system = "".join(str(block.get("text", "")) for block in system)
    if system:
        found.append({"role": "system", "content": system})
    name_of_call: dict[str, str] = {}
    for message in body.messages or ():
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        found += _of_blocks(message.role.lower(), blocks, name_of_call)
    return found


def _of_blocks(
    role: str, blocks: Sequence[dict[str, Any]], name_of_call: dict[str, str]
) -> list[dict[str, Any]]:
    """One message of theirs: tool results, each a message, and then the rest as one."""
    results: list[dict[str, Any]] = []
    rest: dict[str, Any] = {"role": role, "content": ""}
    texts = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            rest["thinking"] = rest["reasoning_content"] = str(block.get("thinking", ""))
        elif kind == "image":
            rest.setdefault("images", []).append(_image(block))
        elif kind == "tool_use":
            rest.setdefault("tool_calls", []).append(_tool_use(block, name_of_call))
        elif kind == "tool_result":
            results.append(_tool_result(block, name_of_call))
    rest["content"] = "\n".join(texts)
    has_content = texts or set(rest) - {"role", "content"}
    return [*results, rest] if has_content or not results else results


def _tool_use(block: dict[str, Any], name_of_call: dict[str, str]) -> dict[str, Any]:
    id, name = block.get("id"), block.get("name")
    if not isinstance(id, str) or not id or not isinstance(name, str) or not name:
        raise BadRequest("tool_use blocks need an id and a name")
    arguments = block.get("input")
    name_of_call[id] = name
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}},
    }


def _tool_result(block: dict[str, Any], name_of_call: dict[str, str]) -> dict[str, Any]:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    id = str(block.get("tool_use_id", ""))
    name = name_of_call.get(id, "")
    return {
        "role": "tool",
        "content": str(content),
        "tool_name": name,
        "name": name,
        "tool_call_id": id,
    }


def _image(block: dict[str, Any]) -> str:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise BadRequest("only base64 image sources are supported")
    return str(source.get("data", ""))


# -------------------------------------------------------------------- the answer


def _stop(end: Finished, has_calls: bool) -> dict[str, Any]:
    if has_calls and end.reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if end.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(end: Finished) -> dict[str, int]:
    """The cached part of the prompt is told beside the rest of it, as this API counts."""
    usage = {
        "input_tokens": end.num_prompt_tokens - end.num_cached_tokens,
        "output_tokens": end.num_output_tokens,
    }
    if end.num_cached_tokens:
        usage["cache_read_input_tokens"] = end.num_cached_tokens
    return usage


def _message(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


async def _send(call: Call, held: Held, turn: Turn, generation: Generation) -> None:
    answer = await collected(generation, turn)
    content: list[dict[str, Any]] = []
    if answer.thinking:
        content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments}
        for one in answer.tool_calls
    ]
    message = {
        **_message(held.model.asked),
        "content": content,
        **_stop(generation.end, bool(answer.tool_calls)),
        "usage": _usage(generation.end),
    }
    if notes := truncation_notes([generation]):
        message["llmd"] = notes
    await call.send_json(message)


class _Beginning:
    """Sends message_start once: with the first delta, or with the first ping before it."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._model = model
        self.is_sent = False

    async def send(self, num_prompt_tokens: int = 0) -> None:
        if not self.is_sent:
            self.is_sent = True
            message = _message(self._model)
            message["usage"]["input_tokens"] = num_prompt_tokens
            await self._call.send_event(
                {"type": "message_start", "message": message}, "message_start"
            )

    async def ping(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            await self.send()
            await self._call.send_event({"type": "ping"}, "ping")


@asynccontextmanager
async def _pinging(call: Call, is_stream: bool, model: str) -> AsyncIterator[_Beginning]:
    """Pings while the block runs. The wait for a load is in the block."""
    beginning = _Beginning(call, model)
    if not is_stream:
        yield beginning
        return
    pings = asyncio.create_task(beginning.ping())
    try:
        yield beginning
    finally:
        pings.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pings


@dataclass(slots=True)
class _Blocks:
    """Turns deltas into blocks; one is open at a time."""

    call: Call
    held: Held
    turn: Turn
    begin: _Beginning
    index: int = -1
    open_kind: str = ""
    has_calls: bool = False
    pieces: PlainPieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = PlainPieces(self.call)

    async def stream(self, generation: Generation) -> None:
        async with aclosing(deltas_of(generation, self.turn, self.pieces)) as deltas:
            async for delta in deltas:
                if generation.started is not None:
                    await self.begin.send(len(generation.started.prompt_ids))
                if delta.thinking:
                    await self._tell("thinking", "thinking_delta", delta.thinking)
                if delta.text:
                    await self._tell("text", "text_delta", delta.text)
                for tool_call in delta.tool_calls:
                    await self._tell_call(tool_call)
        await self._close()
        last: dict[str, Any] = {
            "type": "message_delta",
            "delta": _stop(generation.end, self.has_calls),
            "usage": _usage(generation.end),
        }
        if notes := truncation_notes([generation]):
            last["llmd"] = notes
        await self.call.send_event(last, "message_delta")
        await self.call.send_event({"type": "message_stop"}, "message_stop")
        await self.call.end_stream()

    async def _tell(self, kind: str, delta_type: str, text: str) -> None:
        if self.open_kind != kind:
            empty = {"type": kind, kind: ""}
            if kind == "thinking":
                empty["signature"] = ""
            await self._open(kind, empty)
            if kind == "text":
                plain = self._delta({"type": delta_type, kind: OPEN})
                self.pieces.open(frame_of(event_of(*plain)))
        await self.call.send_event(*self._delta({"type": delta_type, kind: text}))

    async def _tell_call(self, tool_call: ToolCall) -> None:
        self.has_calls = True
        block = {"type": "tool_use", "id": tool_call.id, "name": tool_call.name, "input": {}}
        await self._open("tool_use", block)
        arguments = json.dumps(tool_call.arguments, ensure_ascii=False)
        piece = {"type": "input_json_delta", "partial_json": arguments}
        await self.call.send_event(*self._delta(piece))
        await self._close()

    async def _open(self, kind: str, block: dict[str, Any]) -> None:
        await self._close()
        self.index += 1
        self.open_kind = kind
        await self.call.send_event(
            {"type": "content_block_start", "index": self.index, "content_block": block},
            "content_block_start",
        )

    def _delta(self, delta: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The event, and its name."""
        event = {"type": "content_block_delta", "index": self.index, "delta": delta}
        return event, "content_block_delta"

    async def _close(self) -> None:
        self.pieces.close()
        if self.open_kind:
            self.open_kind = ""
            await self.call.send_event(
                {"type": "content_block_stop", "index": self.index}, "content_block_stop"
            )


ROUTES = (
    Route(
        ("POST",),
        "/v1/messages",
        messages,
        Family.ANTHROPIC,
        MessagesBody,
        "Answer a conversation",
    ),
    Route(
        ("POST",),
        "/v1/messages/count_tokens",
        count_tokens,
        Family.ANTHROPIC,
        CountTokensBody,
        "Count a prompt's tokens",
    ),
)
