"""/v1/responses: OpenAI's Responses API, stateless.

Nothing is kept: `previous_response_id` finds no earlier response and is refused, so that no client
believes in a memory that isn't there. An answer cut by its length has the status `incomplete`.

    response.created  response.in_progress
      reasoning:  output_item.added  reasoning_summary_text.delta* .done  output_item.done
      message:    output_item.added  content_part.added  output_text.delta* .done
                  content_part.done  output_item.done
      each call:  output_item.added  function_call_arguments.delta .done  output_item.done
    response.completed | response.incomplete | response.failed

Every event has a `sequence_number`; a stream always ends with one of the last three.

Source: OpenAI's API reference; issue 2's and 6's notes.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...backend.protocol import Delta, Finished, ToolCall
from ..errors import BadRequest, NotFound, status_of
from ..moment import Moment
from .bodies import Body
from .call import Call, Route
from .durations import parse_keep_alive_s
from .generation import Generation, PlainPieces, holding
from .lookup import find_model
from .native import parse_options
from .openai_bodies import Reasoning, parsed_arguments, think_of_effort
from .replies import OPEN, Family, error_text, event_of, frame_of
from .turn import Turn, check, choose_tools, deltas_of, image_data, start

log = logging.getLogger("llmd.routes")

TEXT_DELTA = "response.output_text.delta"


class ResponseText(Body, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body, frozen=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: Reasoning | None = None
    text: ResponseText | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


async def responses(call: Call) -> None:
    """POST /v1/responses."""
    body = call.decode(ResponsesBody)
    if body.previous_response_id:
        raise NotFound(
            f"previous response {body.previous_response_id!r} not found: responses are not "
            "stored; send the whole conversation as input"
        )
    turn = turn_of(body)
    model = find_model(call.services, body.model, empty="model is required")
    check(turn, model)
    options = parse_options(call, model, dict(turn.options))
    async with holding(call, model, turn.keep_alive_s) as held:
        reply = _Reply(call, turn, body, model.asked)
        generation = start(held, turn, options)
        await reply.run(generation)


# ------------------------------------------------------------------- the request


def turn_of(body: ResponsesBody) -> Turn:
    """Raises BadRequest."""
    given = {
        "top_p": body.top_p,
        "temperature": body.temperature,
        "num_predict": body.max_output_tokens,
    }
    named = {key: value for key, value in given.items() if value is not None}
    choice, name = _tool_choice(body.tool_choice)
    tools, must_call = choose_tools(_tools(body.tools), choice, name)
    return Turn(
        messages=_worker_messages(body),
        tools=tools,
        must_call=must_call,
        one_call=body.parallel_tool_calls is False,
        think=think_of_effort(body.reasoning.effort if body.reasoning else None),
        format=_format(body.text.format if body.text else None),
        options={"temperature": 1.0, **(body.options or {}), **named},
        keep_alive_s=parse_keep_alive_s(body.keep_alive),
    )


def _format(format: dict[str, Any] | None) -> Any:
    kind = (format or {}).get("type", "text")
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema" and isinstance(format.get("schema"), dict):
        return format["schema"]
    raise BadRequest("text.format must be text, json_object, or json_schema with a schema")


def _tool_choice(choice: Any) -> tuple[str, str | None]:
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "named", str(choice.get("name"))
    raise BadRequest("tool_choice must be auto, none, required or a named function")


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """In the native form. A namespace's members are called ns.member; what OpenAI's own servers
    would run (web search and the like) is left out."""
    found: list[dict[str, Any]] = []
    for tool in tools or ():
        kind = tool.get("type")
        if kind == "function":
            found.append(_function(tool, str(tool.get("name", ""))))
        elif kind == "namespace":
            prefix = str(tool.get("name", ""))
            found += [
                _function(member, f"{prefix}.{member.get('name', '')}")
                for member in tool.get("tools") or ()
                if isinstance(member, dict)
            ]
    return found


def _function(tool: dict[str, Any], name: str) -> dict[str, Any]:
    if not name.rpartition(".")[2]:
        raise BadRequest("a function tool needs a name")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.get("description") or "",
            "parameters": tool.get("parameters") or {"type": "object"},
        },
    }


def _worker_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    reader = _Items(found)
    for index, item in enumerate(body.input or ()):
        reader.take(item, index)
    if not body.input:
        raise BadRequest("input is required")
    return found


@dataclass(slots=True)
class _Items:
    """Input items to messages: calls and reasoning join the assistant's turn they belong to."""

    messages: list[dict[str, Any]]
    thinking: str = ""
    name_of_call: dict[str, str] = field(default_factory=dict)

    def take(self, item: dict[str, Any], index: int) -> None:
        """Raises BadRequest."""
        kind = item.get("type") or ("message" if "role" in item else "")
        if kind == "message":
            self._message(item)
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            self._output(item)
        elif kind == "reasoning":
            self.thinking = self._reasoning(item)
        elif kind != "web_search_call":
            raise BadRequest(f'input[{index}]: unknown input item type: "{kind}"')

    def _message(self, item: dict[str, Any]) -> None:
        role = str(item.get("role", "user")).lower()
        text, images = _content(item.get("content"))
        message: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": text,
        }
        if images:
            message["images"] = images
        if role == "assistant":
            self._give_thinking(message)
        self.messages.append(message)

    def _call(self, item: dict[str, Any]) -> None:
        id, name = str(item.get("call_id", "")), str(item.get("name", ""))
        self.name_of_call[id] = name
        arguments = parsed_arguments(item.get("arguments"))
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        self._give_thinking(message)
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": function}
        )

    def _output(self, item: dict[str, Any]) -> None:
        id = str(item.get("call_id", ""))
        name = self.name_of_call.get(id, "")
        text, _ = _content(item.get("output"))
        self.messages.append(
            {
                "role": "tool",
                "content": text,
                "tool_name": name,
                "name": name,
                "tool_call_id": id,
            }
        )

    @staticmethod
    def _reasoning(item: dict[str, Any]) -> str:
        if isinstance(item.get("encrypted_content"), str):
            return str(item["encrypted_content"])
        return "".join(str(part.get("text", "")) for part in item.get("summary") or ())

    def _give_thinking(self, message: dict[str, Any]) -> None:
        if self.thinking:
            message["thinking"] = message["reasoning_content"] = self.thinking
            self.thinking = ""


def _content(content: Any) -> tuple[str, list[str]]:
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise BadRequest("invalid message content")
    texts, images = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            texts.append(str(part.get("text", "")))
        elif kind == "input_image":
            images.append(image_data(str(part.get("image_url", ""))))
        elif kind == "input_file":
            raise BadRequest("file inputs are not currently supported")
    return "\n".join(texts), images


# -------------------------------------------------------------------- the answer


@dataclass(slots=True)
class _Reply:
    """Collects the output items and, when streaming, tells each step of it."""

    call: Call
    turn: Turn
    body: ResponsesBody
    model: str
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    output: list[dict[str, Any]] = field(default_factory=list)
    open_item: dict[str, Any] | None = None
    texts: list[str] = field(default_factory=list)  # of that
    num_events: int = 0
    pieces: PlainPieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = _TextDeltas(self)

    async def run(self, generation: Generation) -> None:
        """Errors before the first event are ordinary answers; later, `response.failed`."""
        try:
            await self._play(generation)
        except Exception as error:
            if self.num_events == 0:
                raise
            if status_of(error) >= 500:
                log.warning("/v1/responses failed: %s", error)
            failure = {"code": "server_error", "message": error_text(error)}
            failed = self._response("failed", None, error=failure)
            await self._tell("response.failed", response=failed)
            await self.call.end_stream()

    async def _play(self, generation: Generation) -> None:
        async with aclosing(deltas_of(generation, self.turn, self.pieces)) as deltas:
            async for delta in deltas:
                if self.body.stream and self.num_events == 0:
                    await self._begin()
                if delta.thinking:
                    await self._add_thinking(delta.thinking)
                if delta.text:
                    await self._add_text(delta.text)
                for tool_call in delta.tool_calls:
                    await self._add_call(tool_call)
        end = generation.end
        status = "incomplete" if end.reason == "length" else "completed"
        await self._close(status)
        response = self._response(status, end)
        if not self.body.stream:
            await self.call.send_json(response)
            return
        await self._tell(f"response.{status}", response=response)
        await self.call.end_stream()

    async def _begin(self) -> None:
        response = self._response("in_progress", None)
        await self._tell("response.created", response=response)
        await self._tell("response.in_progress", response=response)

    async def _tell(self, kind: str, **fields: Any) -> None:
        if self.body.stream:
            event = {"type": kind, "sequence_number": self.num_events, **fields}
            self.num_events += 1
            await self.call.send_event(event, kind)

    def _text_delta(self, text: Any) -> dict[str, Any]:
        return {**self._place, "content_index": 0, "delta": text, "logprobs": []}

    @property
    def _place(self) -> dict[str, Any]:
        """Which item an event is about."""
        assert self.open_item is not None
        return {"item_id": self.open_item["id"], "output_index": len(self.output)}

    async def _open(self, item: dict[str, Any]) -> None:
        await self._close("completed")
        self.open_item = item
        self.texts = []
        await self._tell("response.output_item.added", output_index=len(self.output), item=item)

    async def _add_thinking(self, text: str) -> None:
        if self.open_item is None or self.open_item["type"] != "reasoning":
            await self._open({"id": _id("rs"), "type": "reasoning", "summary": []})
            assert self.open_item is not None
            self.open_item["summary"] = [{"type": "summary_text", "text": ""}]
        self.texts.append(text)
        await self._tell(
            "response.reasoning_summary_text.delta", **self._place, summary_index=0, delta=text
        )

    async def _add_text(self, text: str) -> None:
        if self.open_item is None or self.open_item["type"] != "message":
            await self._open(
                {
                    "id": _id("msg"),
                    "type": "message",
                    "status": "in_progress",
                    "role": "assistant",
                    "content": [],
                }
            )
            assert self.open_item is not None
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            await self._tell(
                "response.content_part.added", **self._place, content_index=0, part=part
            )
            self.open_item["content"] = [part]
            fields = self._text_delta(OPEN)
            plain = {"type": TEXT_DELTA, "sequence_number": OPEN, **fields}
            self.pieces.open(frame_of(event_of(plain, TEXT_DELTA)))
        self.texts.append(text)
        await self._tell(TEXT_DELTA, **self._text_delta(text))

    async def _add_call(self, tool_call: ToolCall) -> None:
        arguments = json.dumps(tool_call.arguments, ensure_ascii=False)
        await self._open(
            {
                "id": _id("fc"),
                "type": "function_call",
                "call_id": tool_call.id,
                "name": tool_call.name,
                "arguments": "",
                "status": "in_progress",
            }
        )
        assert self.open_item is not None
        await self._tell("response.function_call_arguments.delta", **self._place, delta=arguments)
        self.open_item["arguments"] = arguments
        await self._close("completed")

    async def _close(self, status: str) -> None:
        """End the open item, with the events of its kind."""
        item = self.open_item
        if item is None:
            return
        self.pieces.close()
        place = self._place
        if item["type"] == "reasoning":
            text = item["summary"][0]["text"] = "".join(self.texts)
            item["encrypted_content"] = text
            await self._tell(
                "response.reasoning_summary_text.done", **place, summary_index=0, text=text
            )
        elif item["type"] == "message":
            part = item["content"][0]
            part["text"] = "".join(self.texts)
            await self._tell(
                "response.output_text.done",
                **place,
                content_index=0,
                text=part["text"],
                logprobs=[],
            )
            await self._tell("response.content_part.done", **place, content_index=0, part=part)
            item["status"] = status
        else:
            await self._tell(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
            item["status"] = status
        await self._tell("response.output_item.done", output_index=place["output_index"], item=item)
        self.output.append(item)
        self.open_item = None

    def _response(
        self, status: str, end: Finished | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = self.body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": cut,
            "model": self.model,
            "previous_response_id": None,
            "instructions": body.instructions,
            "output": list(self.output),
            "error": error,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "truncation": body.truncation or "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_logprobs": 0,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "usage": None if end is None else _usage(end),
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
        }


class _TextDeltas(PlainPieces):
    """Every event has its number, and the text is told once more at the end."""

    __slots__ = ("_reply",)

    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply.call)
        self._reply = reply

    def write(self, delta: Delta, came: Moment) -> bool:
        if not super().write(delta, came):
            return False
        self._reply.num_events += 1
        self._reply.texts.append(delta.text)
        return True

    def piece(self, text: bytes, came: Moment) -> bytes:
        return self._frame % (b"%d" % self._reply.num_events, text)


def _usage(end: Finished) -> dict[str, Any]:
    return {
        "input_tokens": end.num_prompt_tokens,
        "output_tokens": end.num_output_tokens,
        "total_tokens": end.num_prompt_tokens + end.num_output_tokens,
        "input_tokens_details": {"cached_tokens": end.num_cached_tokens},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


ROUTES = (
    Route(
        ("POST",),
        "/v1/responses",
        responses,
        Family.OPENAI,
        ResponsesBody,
        "Answer an input, statelessly",
    ),
)
