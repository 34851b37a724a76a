"""One row per way in which models mark thinking and tool calls, and how a row is chosen.

The template tells: it has to show the model its own earlier calls, so it contains their marks. The
first row with a mark that the template contains is taken; specific rows stand before general ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import call_syntax as syntax
from .call_syntax import Calls, Tools


@dataclass(frozen=True, slots=True)
class CallForm:
    """One spelling of a call.

    `open` "" means that a bracket at the start of the answer is enough. `close` may be missing in
    what a model writes if the body ends in a bracket. `is_literal`: only `close` ends the body.
    `can_end_early`: at the end of the answer the body shows by itself whether it is complete.
    """

    open: str
    close: str
    parse: Callable[[str, Tools], Calls]
    is_literal: bool = False
    can_end_early: bool = True
    trailer: str = ""  # a mark that may follow the closed call and says nothing
    start: Callable[[str], int | None] | None = None  # of the bracketed part; None: no words before


@dataclass(frozen=True, slots=True)
class Family:
    """`dropped` are marks around calls and answers that say nothing of their own."""

    name: str
    template_marks: tuple[str, ...]
    calls: tuple[CallForm, ...] = ()
    dropped: tuple[str, ...] = ()
    is_harmony: bool = False


def _tagged(open_tag: str, close_tag: str) -> CallForm:
    return CallForm(open_tag, close_tag, syntax.tagged_calls)


_BARE = CallForm("", "", syntax.bare_calls)
_HERMES = _tagged("<tool_call>", "</tool_call>")

FAMILIES = (
    Family("harmony", ("<|channel|>analysis", "<|start|>assistant<|channel|>"), is_harmony=True),
    Family(
        "deepseek-dsml",
        ("｜DSML｜",),
        (CallForm("<｜DSML｜invoke", "</｜DSML｜invoke>", syntax.invoke_calls, True, False),),
        (
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
        ),
    ),
    Family(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        (
            CallForm(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                syntax.deepseek_calls,
                is_literal=True,
            ),
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Family(
        "kimi",
        ("<|tool_call_begin|>",),
        (CallForm("<|tool_call_begin|>", "<|tool_call_end|>", syntax.kimi_calls, is_literal=True),),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Family(
        "functiongemma",
        ("<start_function_call>",),
        (
            CallForm(
                "<start_function_call>",
                "<end_function_call>",
                syntax.gemma_calls,
                is_literal=True,
            ),
        ),
    ),
    Family(
        "gemma",
        ("<|tool_call>",),
        (CallForm("<|tool_call>", "<tool_call|>", syntax.gemma_calls, is_literal=True),),
    ),
    Family(
        "lfm2",
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: "),
        (
            CallForm(
                "<|tool_call_start|>",
                "<|tool_call_end|>",
                syntax.pythonic_calls,
                is_literal=True,
            ),
        ),
    ),
    Family(
        "minimax",
        ("<minimax:tool_call>",),
        (CallForm("<invoke", "</invoke>", syntax.invoke_calls, True, False),),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        "glimmer",
        ("<atem:invoke",),
        (CallForm("<atem:invoke", "</atem:invoke>", syntax.invoke_calls, True, False),),
        ("<atem:function_calls>", "</atem:function_calls>"),
    ),
    Family(
        "minicpm",
        ("<function name=",),
        (CallForm("<function ", "</function>", syntax.invoke_calls, True, False),),
    ),
    Family(
        "apertus",
        ("<|tools_prefix|>",),
        (CallForm("<|tools_prefix|>", "<|tools_suffix|>", syntax.keyed_calls),),
    ),
    Family("gigachat", ("<|function_call|>",), (_tagged("<|function_call|>", ""),)),
    Family("apriel", ("<tool_calls>",), (_tagged("<tool_calls>", "</tool_calls>"),)),
    Family("seed", ("<seed:tool_call>",), (_tagged("<seed:tool_call>", "</seed:tool_call>"),)),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        (CallForm("[TOOL_CALLS]", "", syntax.mistral_calls, start=syntax.mistral_start),),
    ),
    Family("granite-3, phi-4", ("<|tool_call|>",), (_tagged("<|tool_call|>", "<|/tool_call|>"),)),
    Family(
        "olmo",
        ("<function_calls>",),
        (
            CallForm(
                "<function_calls>", "</function_calls>", syntax.pythonic_calls, is_literal=True
            ),
        ),
    ),
    Family("nemotron-2", ("<TOOLCALL>",), (_tagged("<TOOLCALL>", "</TOOLCALL>"),)),
    Family(
        "command-r",
        ("<|START_ACTION|>",),
        (_tagged("<|START_ACTION|>", "<|END_ACTION|>"),),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Family(
        "qwen3-coder",
        ("<function=",),
        (
            _HERMES,
            CallForm(
                "<function=",
                "</function>",
                syntax.function_body_calls,
                is_literal=True,
                can_end_early=False,
                trailer="</tool_call>",
            ),
        ),
    ),
    # JSON, <function=...> and <arg_key> between the same tags: Qwen, Hermes, GLM.
    Family("hermes", ("<tool_call>",), (_HERMES,)),
    Family("llama-3", ("<|python_tag|>", "ipython"), (_BARE,), ("<|python_tag|>",)),
    Family("plain", (), (_HERMES, _BARE)),
)

# Opening and closing tags of thinking. The closing one is what a template is searched for, since
# some templates only write the opening one, and some only cut at the closing one.
THINKING_TAGS = (
    ("<|channel>thought", "<channel|>"),
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<thought>", "</thought>"),
)

_FAMILY_OF_ARCHITECTURE = {"gpt-oss": "harmony", "gpt_oss": "harmony", "openai_moe": "harmony"}


def choose_family(template_source: str, architecture: str = "") -> Family:
    """The row for this template; an architecture that speaks one form only decides first."""
    by_name = {family.name: family for family in FAMILIES}
    if architecture in _FAMILY_OF_ARCHITECTURE:
        return by_name[_FAMILY_OF_ARCHITECTURE[architecture]]
    for family in FAMILIES:
        if any(mark in template_source for mark in family.template_marks):
            return family
    return by_name["plain"]


def thinking_tags(template_source: str) -> tuple[str, str] | None:
    """The tags that the template knows."""
    return next((pair for pair in THINKING_TAGS if pair[1] in template_source), None)
