"""From a Generate message to the token ids that the engine runs.

Everything here depends on the vocabulary or the template, takes milliseconds to seconds for a long
prompt, and touches no tensor: it runs on the worker's reader thread, so that the streams which
decode meanwhile are not stalled.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .answer_plan import AnswerPlan, AnswerPlanner
from .protocol import Generate
from .text.chat_template import ChatTemplate, TemplateError
from .text.context import fit_messages, fit_tokens
from .text.grammar import GrammarError
from .text.infill import infill_marks
from .text.tokenizer import Tokenizer, without_marks

TOO_LONG = (
    "the prompt is longer than the context length currently available to the model; shorten the "
    "prompt, adjust the context length in settings, or use a model with a longer context length"
)


# For models without a template, as base models are: the words, one message below the other.
BARE = (
    "{% for message in messages %}{{ '' if loop.first else '\n' }}{{ message.content }}{% endfor %}"
)


class RequestRefused(Exception):
    """This request cannot be served; the worker goes on. `code` is one of protocol.Failed's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the engine will see it."""

    request: Generate
    prompt_ids: tuple[int, ...]
    rendered: str
    num_ctx: int
    max_tokens: int
    seed: int
    answer: AnswerPlan
    truncated_tokens: int = 0
    truncated_messages: int = 0


class PromptBuilder:
    """What a model needs to turn requests into Prompts.

    `template` None: the model brings none, and messages are refused.
    `context_length` is the most tokens that one sequence may hold, prompt and output together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        architecture: str,
        context_length: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.context_length = context_length
        self._bare = ChatTemplate(BARE, tokenizer.special_tokens, tokenizer.control_tokens)
        self._infill = infill_marks(tokenizer)
        self._planner = AnswerPlanner(tokenizer, architecture)

    def build(self, request: Generate) -> Prompt:
        """Raises RequestRefused with a sentence for the user."""
        window = min(max(request.num_ctx or self.context_length, 4), self.context_length)
        limit = window - _answer_reserve(request, window)
        template = self._template_of(request)
        dropped = 0
        if request.messages is not None:
            rendered, dropped = self._render(request, template, limit, window)
            ids = self.encode(rendered, request.add_bos)
        elif request.token_ids is not None:
            rendered, ids = "", self.checked(request.token_ids)
        else:
            rendered = self._with_suffix(request)
            ids = self.encode(rendered, request.add_bos)
        ids = [*self.checked(request.context_ids), *ids]
        self.checked(list(request.sampling.logit_bias))
        fitted = self._fit(request, ids, limit, window)
        if not fitted:
            raise RequestRefused(
                "bad_request", "the prompt is empty: there is nothing to go on from"
            )
        room = window - len(fitted)
        return Prompt(
            request=request,
            prompt_ids=tuple(fitted),
            rendered=without_marks(rendered),
            num_ctx=window,
            max_tokens=room if request.max_tokens is None else max(request.max_tokens, 0),
            seed=_seed_of(request),
            answer=self._answer(request, template, rendered),
            truncated_tokens=len(ids) - len(fitted),
            truncated_messages=dropped,
        )

    def encode(self, text: str, add_bos: bool) -> list[int]:
        """Special tokens in the text are recognised; a BOS is never doubled."""
        bos = self.tokenizer.special_tokens.get("bos_token")
        has_bos = bool(bos) and text.startswith(str(bos))
        return self.tokenizer.encode(text, add_special=add_bos and not has_bos, parse_special=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template: ChatTemplate | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The conversation as text, ready for the model's turn.

        Without a template, as base models are: the words alone, to be gone on with.
        """
        if template is None:
            if tools:
                raise RequestRefused(
                    "unsupported", "this model has no chat template, and so no place for tools"
                )
            template = self._bare
        # A conversation that ends in the assistant's words is to be continued, not answered.
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        try:
            return template.render(
                messages,
                tools or None,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **kwargs,
            )
        except TemplateError as error:
            raise RequestRefused("bad_request", f"chat template: {error}") from error

    def _template_of(self, request: Generate) -> ChatTemplate | None:
        if request.template is None:
            return self.template
        try:
            return ChatTemplate(
                request.template, self.tokenizer.special_tokens, self.tokenizer.control_tokens
            )
        except TemplateError as error:
            raise RequestRefused("bad_request", f"template error: {error}") from error

    def _render(
        self, request: Generate, template: ChatTemplate | None, limit: int, window: int
    ) -> tuple[str, int]:
        kwargs = {**request.template_kwargs, **_think_kwargs(request)}
        messages = request.messages or []

        def text_of(kept: Sequence[Mapping[str, Any]]) -> str:
            return self.render(kept, request.tools, template, kwargs)

        if not request.truncate:
            return text_of(messages), 0

        def size_of(kept: Sequence[Mapping[str, Any]]) -> int:
            return len(self.encode(text_of(kept), request.add_bos))

        if size_of(messages) < window:
            return text_of(messages), 0
        fitted = fit_messages(messages, size_of, limit)
        return text_of(fitted.messages), fitted.num_dropped

    def _with_suffix(self, request: Generate) -> str:
        if not request.suffix:
            return request.prompt or ""
        if self._infill is None:
            raise RequestRefused("unsupported", "this model does not support insert")
        return self._infill.text(request.prompt or "", request.suffix)

    def _fit(self, request: Generate, ids: list[int], limit: int, window: int) -> list[int]:
        if len(ids) < window:
            return ids
        if not request.truncate:
            raise RequestRefused(
                "too_long", f"{TOO_LONG} ({len(ids)} tokens, and the window holds {window})"
            )
        return fit_tokens(ids, limit, request.num_keep)

    def checked(self, ids: Sequence[int]) -> list[int]:
        """The ids, all inside the vocabulary; else RequestRefused names the first that isn't."""
        size = self.tokenizer.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestRefused(
                    "bad_request", f"token id {token_id} is outside the vocabulary of {size}"
                )
        return list(ids)

    def _answer(
        self, request: Generate, template: ChatTemplate | None, rendered: str
    ) -> AnswerPlan:
        try:
            return self._planner.plan(request, template, rendered)
        except GrammarError as error:
            raise RequestRefused("bad_request", str(error)) from error


def _answer_reserve(request: Generate, window: int) -> int:
    """Tokens of the window kept for the answer when a prompt has to be cut; a quarter at most."""
    quarter = window // 4
    wanted = quarter if request.max_tokens is None else request.max_tokens
    return max(1, min(wanted, quarter))


def _seed_of(request: Generate) -> int:
    seed = request.sampling.seed
    return secrets.randbits(31) if seed is None or seed < 0 else seed


def _think_kwargs(request: Generate) -> dict[str, Any]:
    """The switch goes by several names; a template reads the one it knows."""
    if request.think is None:
        return {}
    kwargs: dict[str, Any] = {
        "enable_thinking": bool(request.think),
        "thinking": bool(request.think),
    }
    if isinstance(request.think, str):
        kwargs["reasoning_effort"] = request.think
    return kwargs
