"""/v1/completions: a prompt, or several, continued as they stand; and /tokenize, /detokenize.

A prompt is a text, a list of token ids, or a list of either; each gives `n` choices, so that choice
i belongs to prompt i // n. The prompt is not put through the chat template: whoever calls this
route today has a model or a prompt that is made for it.

With `best_of` more are drawn than returned; the best are those of the highest mean log-probability.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from ...backend.protocol import Generate, Tokenize, TokenLogprob
from ..errors import BadRequest
from .bodies import Body, Message
from .call import Call, Route
from .durations import parse_keep_alive_s
from .generation import Answer, Generation, Held, PlainPieces, holding, new_id
from .lookup import find_model
from .native import conversation, parse_options, worker_message
from .openai import (
    FINGERPRINT,
    MAX_CHOICES,
    at_once,
    checked_choices,
    running_usage,
    truncation_notes,
    usage_of,
)
from .openai_bodies import CompletionBody, StreamOptions, logit_bias_of, sampling_options
from .options import Options
from .replies import OPEN, Family, event_of, frame_of

MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
Prompt = str | list[int]


async def completions(call: Call) -> None:
    """POST /v1/completions."""
    body = call.decode(CompletionBody)
    prompts = _prompts(body.prompt)
    num_choices = checked_choices(body.n)
    best_of = body.best_of or num_choices
    _check(body, num_choices, best_of)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    model = find_model(call.services, body.model, empty="model is required")
    model.require_verb("completions")
    if body.suffix:
        model.require("insert")
    options = parse_options(call, model, sampling_options(body, body.max_tokens))
    async with holding(call, model, keep_alive_s) as held:
        reply = _Reply(call, held, body, f"cmpl-{secrets.token_hex(12)}")
        generations = [
            held.generation(_request(held, body, prompt, options, index))
            for prompt in prompts
            for index in range(best_of)
        ]
        echoes = [await _text_of(held, prompt) if body.echo else "" for prompt in prompts]
        if body.stream:
            await reply.stream(generations, echoes)
        else:
            await reply.send(generations, echoes, num_choices, best_of)


def _check(body: CompletionBody, num_choices: int, best_of: int) -> None:
    """Raises BadRequest."""
    if not num_choices <= best_of <= MAX_CHOICES:
        raise BadRequest(f"best_of must be at least n, and at most {MAX_CHOICES}")
    if body.stream and best_of > num_choices:
        raise BadRequest("best_of cannot be streamed: the best is known at the end")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise BadRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}")


def _prompts(value: Any) -> list[Prompt]:
    """Raises BadRequest."""
    if value is None:
        value = ""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) or _are_ids(one) for one in value):
        if len(value) > MAX_PROMPTS:
            raise BadRequest(f"at most {MAX_PROMPTS} prompts can be sent at once")
        if value:
            return value
    raise BadRequest("prompt must be a text, a list of token ids, or a list of either")


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


def _request(
    held: Held, body: CompletionBody, prompt: Prompt, options: Options, index: int
) -> Generate:
    window = held.lease.ready.context_length
    num_logprobs = -1 if body.logprobs is None else body.logprobs
    if (body.best_of or 0) > (body.n or 1):
        num_logprobs = max(num_logprobs, 0)  # the best is chosen by them
    sampling = options.sampling(num_logprobs)
    return Generate(
        id=new_id(),
        prompt=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        suffix=body.suffix or None,
        sampling=msgspec.structs.replace(
            sampling,
            seed=None if sampling.seed is None else sampling.seed + index,
            logit_bias=logit_bias_of(body),
            min_tokens=max(0, body.min_tokens or 0),
            ignore_eos=bool(body.ignore_eos),
        ),
        max_tokens=options.max_tokens(window, may_shift=False),
        num_ctx=options.num_ctx,
        stop=options.stop,
        stop_token_ids=body.stop_token_ids or [],
        shift=False,
        parse=False,
        client=held.call.fair_key,
        priority=options.priority,
        adapter=options.adapter,
        cache_salt=held.call.client_key,
    )


async def _text_of(held: Held, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return (await held.lease.tokenize(Tokenize(new_id(), token_ids=prompt))).text


@dataclass(frozen=True, slots=True)
class _Reply:
    """Writes the answer of one request."""

    call: Call
    held: Held
    body: CompletionBody
    id: str

    async def send(
        self,
        generations: Sequence[Generation],
        echoes: Sequence[str],
        num_choices: int,
        best_of: int,
    ) -> None:
        answers: list[Answer] = await at_once([one.collect() for one in generations])
        choices: list[dict[str, Any]] = []
        for number, echo in enumerate(echoes):
            drawn = list(range(number * best_of, (number + 1) * best_of))
            if best_of > num_choices:
                drawn.sort(key=lambda index: _mean_logprob(answers[index]), reverse=True)
            choices += [
                self._choice(
                    echo + answers[index].text,
                    number * num_choices + position,
                    generations[index].end.reason,
                    answers[index].logprobs,
                    len(echo),
                )
                for position, index in enumerate(drawn[:num_choices])
            ]
        answer = {
            **self._head(),
            "choices": choices,
            "usage": self._usage(generations, len(echoes)),
        }
        if notes := truncation_notes(generations):
            answer["llmd"] = notes
        await self.call.send_json(answer)

    async def stream(self, generations: Sequence[Generation], echoes: Sequence[str]) -> None:
        per_prompt = len(generations) // len(echoes)
        await at_once(
            [
                self._stream_choice(one, index, echoes[index // per_prompt])
                for index, one in enumerate(generations)
            ]
        )
        if (self.body.stream_options or StreamOptions()).include_usage:
            usage = self._usage(generations, len(echoes))
            await self.call.send_event({**self._head(), "choices": [], "usage": usage})
        await self.call.send_done_mark()
        await self.call.end_stream()

    async def _stream_choice(self, generation: Generation, index: int, echo: str) -> None:
        head = self._head()
        text_offset = 0
        pieces = PlainPieces(self.call)
        plain = self._choice(OPEN, index, None, (), 0)
        frame = frame_of(event_of({**head, "choices": [plain]}))
        async with aclosing(generation.deltas(pieces)) as deltas:
            async for delta in deltas:
                text, echo = echo + delta.text, ""
                if not text and not delta.logprobs:
                    continue
                choice = self._choice(text, index, None, delta.logprobs, text_offset)
                text_offset += len(text)
                usage = self._continuous(running_usage(generation, len(pieces.token_ids)))
                await self.call.send_event({**head, "choices": [choice], **usage})
                if self.body.logprobs is None and not usage:
                    pieces.open(frame)
        last = self._choice("", index, generation.end.reason, (), text_offset)
        usage = self._continuous(usage_of([generation.end]))
        await self.call.send_event({**head, "choices": [last], **usage})

    def _continuous(self, usage: dict[str, Any]) -> dict[str, Any]:
        options = self.body.stream_options or StreamOptions()
        return {"usage": usage} if options.continuous_usage_stats else {}

    def _choice(
        self,
        text: Any,
        index: int,
        reason: str | None,
        logprobs: Sequence[TokenLogprob],
        text_offset: int,
    ) -> dict[str, Any]:
        shown = None if self.body.logprobs is None else _logprobs(logprobs, text_offset)
        return {"text": text, "index": index, "logprobs": shown, "finish_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time() - (time.monotonic() - self.call.arrived)),
            "model": self.held.model.asked,
            "system_fingerprint": FINGERPRINT,
        }

    @staticmethod
    def _usage(generations: Sequence[Generation], num_prompts: int) -> dict[str, Any]:
        per_prompt = len(generations) // num_prompts
        usage = usage_of([one.end for one in generations])
        prompt = sum(one.end.num_prompt_tokens for one in generations[::per_prompt])
        usage["prompt_tokens"] = prompt
        usage["total_tokens"] = prompt + usage["completion_tokens"]
        return usage


def _mean_logprob(answer: Answer) -> float:
    if not answer.logprobs:
        return float("-inf")
    return sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)


def _logprobs(entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """The four parallel lists of this older route."""
    offsets = []
    for entry in entries:
        offsets.append(text_offset)
        text_offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{one.token: one.logprob for one in entry.top} for entry in entries],
        "text_offset": offsets,
    }


# --------------------------------------------------------------------------- tokens


class TokenizeBody(Body, frozen=True):
    """POST /tokenize: a text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    keep_alive: Any = None


class DetokenizeBody(Body, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None
    keep_alive: Any = None


async def tokenize(call: Call) -> None:
    """POST /tokenize."""
    body = call.decode(TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("either prompt or messages is required")
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    model = find_model(call.services, body.model, empty="model is required")
    messages = None
    if body.messages is not None:
        messages = conversation(model, [worker_message(message) for message in body.messages])
    async with holding(call, model, keep_alive_s) as held:
        found = await held.lease.tokenize(
            Tokenize(
                new_id(),
                text=body.prompt,
                messages=messages,
                tools=body.tools or [],
                add_bos=body.add_special_tokens is not False,
            )
        )
        await call.send_json(
            {
                "count": len(found.token_ids),
                "max_model_len": held.lease.ready.context_length,
                "tokens": found.token_ids,
            }
        )


async def detokenize(call: Call) -> None:
    """POST /detokenize."""
    body = call.decode(DetokenizeBody)
    keep_alive_s = parse_keep_alive_s(body.keep_alive)
    model = find_model(call.services, body.model, empty="model is required")
    async with holding(call, model, keep_alive_s) as held:
        found = await held.lease.tokenize(Tokenize(new_id(), token_ids=body.tokens or []))
        await call.send_json({"prompt": found.text})


ROUTES = (
    Route(
        ("POST",),
        "/v1/completions",
        completions,
        Family.OPENAI,
        CompletionBody,
        "Continue prompts as they stand",
    ),
    Route(("POST",), "/tokenize", tokenize, Family.OPENAI, TokenizeBody, "Text to token ids"),
    Route(("POST",), "/detokenize", detokenize, Family.OPENAI, DetokenizeBody, "Ids to text"),
)
