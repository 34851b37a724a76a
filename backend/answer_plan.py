"""How an answer will be read, and which form it must have: decided before it begins.

    request, template, rendered prompt ──▶ AnswerPlan(parser, grammar)

A request may ask for a form (`format`) or for a tool call (`must_call`); both are grammars that
mask tokens, and both wait until the model has thought. A call is forced in the spelling that the
model's family uses; families whose spelling no grammar here describes are made to write the plain
one.

Owner: the worker's reader thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .protocol import Generate
from .text.answer_grammar import AnswerGrammar, Course, course_of
from .text.chat_template import ChatTemplate
from .text.forced_calls import forced_call
from .text.grammar import Format, GrammarCompiler, GrammarError
from .text.response_families import Family, choose_family
from .text.response_parser import ResponseParser, parser_of
from .text.tokenizer import Tokenizer

log = logging.getLogger("llmd.worker")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`parser` None: the text is passed on as it is. `grammar` None: any token may come."""

    parser: ResponseParser | None = None
    grammar: AnswerGrammar | None = None


class AnswerPlanner:
    """Plans the answers of one model."""

    def __init__(self, tokenizer: Tokenizer, architecture: str) -> None:
        self._tokenizer = tokenizer
        self._architecture = architecture
        # Made when a form is first asked for: it takes a second for a large vocabulary.
        self._compiler: GrammarCompiler | None = None

    def plan(self, request: Generate, template: ChatTemplate | None, rendered: str) -> AnswerPlan:
        """Raises GrammarError if the form cannot be enforced."""
        if not request.parse or request.messages is None or template is None:
            return AnswerPlan(None, self._grammar(request.format, Course()))
        source = template.all_sources
        family = choose_family(source, self._architecture)
        if request.must_call:
            return self._forced(request, source, rendered)
        # Where the answer has a form, nothing in it is a call.
        tools = request.tools if request.format is None else ()
        parser = parser_of(family, source, rendered, tools)
        course = self._course(request, family, source, rendered, with_header=True)
        return AnswerPlan(parser, self._grammar(request.format, course))

    def _forced(self, request: Generate, source: str, rendered: str) -> AnswerPlan:
        forced = forced_call(self._tokenizer, request.tools, source, self._architecture)
        parser = parser_of(forced.family, source, rendered, request.tools)
        course = self._course(request, forced.family, source, rendered, with_header=False)
        try:
            return AnswerPlan(parser, self._grammar(forced.format, course, True))
        except GrammarError as error:
            # Tools come from far away, and their schemas say what no grammar can; a call that is
            # not forced would not obey them either.
            log.info("arguments are not held to their schema: %s", error)
        tools = [_without_schema(tool) for tool in request.tools]
        forced = forced_call(self._tokenizer, tools, source, self._architecture)
        return AnswerPlan(parser, self._grammar(forced.format, course, True))

    def _course(
        self, request: Generate, family: Family, source: str, rendered: str, with_header: bool
    ) -> Course:
        course = course_of(self._tokenizer, family, source, rendered, with_header)
        may_think = request.think is not False or course.is_thinking or family.is_harmony
        return course if may_think else Course()

    def _grammar(
        self, form: Format | None, course: Course, holds_json: bool = False
    ) -> AnswerGrammar | None:
        if form is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer)
        if course.closing:
            self._tokenizer.ids_with(course.closing)  # looked for here, not between two steps
        return AnswerGrammar(self._compiler.compile(form, holds_json), self._tokenizer, course)


def _without_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {"function": {"name": function.get("name", ""), "parameters": {"type": "object"}}}
