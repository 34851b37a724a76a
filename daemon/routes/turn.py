"""A conversation's next turn, as the OpenAI and Anthropic routes ask for it.

    chat/completions ─┐
    responses         ├─▶ Turn ──start──▶ Generation ──deltas_of──▶ Delta, Delta, …
    messages          ┘

These APIs name things differently but want the same. Each translates its body into a Turn, in the
words of the native API, and the deltas back.

A call that the client insists on (`tool_choice` required, or a named tool) is forced by the worker,
which knows how the model spells one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...backend.protocol import Delta, Generate, SamplingParams
from ..errors import BadRequest
from ..listener import Listener
from .generation import Answer, Generation, Held, new_id
from .lookup import Model
from .native import conversation, resolve_think
from .options import Options


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked for. `options` have the native names and go before the model's own."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()  # as the native API has them
    must_call: bool = False  # one of the tools has to be called
    one_call: bool = False  # and no second one may be
    think: bool | str | None = None
    format: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    num_logprobs: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_alive_s: float | None = None
    truncate: bool = True


def check(turn: Turn, model: Model) -> None:
    """What the model cannot do is refused before it is loaded. Raises BadRequest."""
    model.require_verb("chat")
    if turn.tools:
        model.require("tools")
    for message in turn.messages:
        model.check_images(message.get("images"))
    resolve_think(model, turn.think)


def start(held: Held, turn: Turn, options: Options, index: int = 0) -> Generation:
    """The turn as a sequence; of several for one request, `index` tells them apart."""
    return held.generation(request_of(held, turn, options, index))


def request_of(held: Held, turn: Turn, options: Options, index: int = 0) -> Generate:
    model = held.model
    trained = held.lease.ready.context_length
    return Generate(
        id=new_id(),
        messages=conversation(model, turn.messages),
        tools=list(turn.tools),
        must_call=turn.must_call,
        think=resolve_think(model, turn.think),
        format=None if turn.must_call else turn.format,
        template_kwargs=dict(turn.template_kwargs),
        sampling=_sampling(turn, options, index),
        max_tokens=options.max_tokens(min(options.num_ctx or trained, trained), may_shift=False),
        num_ctx=options.num_ctx,
        num_keep=options.num_keep,
        stop=options.stop,
        stop_token_ids=list(turn.stop_token_ids),
        truncate=turn.truncate,
        shift=False,  # in these APIs the end of the window ends the answer
        client=held.call.fair_key,
        priority=options.priority,
        adapter=options.adapter,
        cache_salt=held.call.client_key,
    )


def _sampling(turn: Turn, options: Options, index: int) -> SamplingParams:
    sampling = options.sampling(turn.num_logprobs)
    seed = None if sampling.seed is None else sampling.seed + index
    return msgspec.structs.replace(
        sampling,
        seed=seed,
        logit_bias=dict(turn.logit_bias),
        min_tokens=max(0, turn.min_tokens),
        ignore_eos=turn.ignore_eos,
    )


async def deltas_of(
    generation: Generation, turn: Turn, listener: Listener
) -> AsyncGenerator[Delta, None]:
    """The deltas; calls beyond the first are left out where only one is wanted.

    `listener` must leave calls alone.
    """
    has_called = False
    async with aclosing(generation.deltas(listener)) as deltas:
        async for delta in deltas:
            if delta.tool_calls and turn.one_call:
                calls = () if has_called else delta.tool_calls[:1]
                has_called = True
                delta = msgspec.structs.replace(delta, tool_calls=calls)
            yield delta


async def collected(generation: Generation, turn: Turn) -> Answer:
    """All of them as one."""
    answer = Answer()
    async with aclosing(deltas_of(generation, turn, Listener())) as deltas:
        async for delta in deltas:
            answer.add(delta)
    return answer


def choose_tools(
    tools: Sequence[dict[str, Any]], choice: str, name: str | None
) -> tuple[list[dict[str, Any]], bool]:
    """The tools to offer and whether one must be called.

    choice is auto, none, required or named. Raises BadRequest.
    """
    if choice == "none":
        return [], False
    if choice == "auto":
        return list(tools), False
    if not tools:
        raise BadRequest("tool_choice wants a call, and there are no tools")
    if choice == "required":
        return list(tools), True
    found = [tool for tool in tools if tool["function"].get("name") == name]
    if not found:
        raise BadRequest(f"tool_choice names the tool {name!r}, which is not among the tools")
    return found[:1], True


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools in the native form {"type": "function", "function": {"name", ...}}."""
    found = []
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{index}] has no function with a name")
        found.append({"type": "function", "function": function})
    return found


def image_data(url: str) -> str:
    """The base64 of a data URI. Raises BadRequest."""
    if url.startswith(("http://", "https://")):
        raise BadRequest(
            "image URLs are not currently supported, please use base64 encoded data instead"
        )
    head, comma, data = url.partition(",")
    kinds = [f"data:image/{kind};base64" for kind in ("jpeg", "jpg", "png", "webp")]
    if not comma or head not in (*kinds, "data:;base64"):
        raise BadRequest("invalid image input")
    return data
