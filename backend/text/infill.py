"""Fill in the middle: the marks between which code models were taught to write what is missing.

    Prefix P, suffix S    <|fim_prefix|> P <|fim_suffix|> S <|fim_middle|> ──▶ what stands between

A model knows one spelling, and its vocabulary tells which: all three marks are tokens there.
Mistral's code models take the suffix first and need no third mark. Sources: Bavarian et al.,
"Efficient Training of Language Models to Fill in the Middle" (2022); the models' own cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tokenizer import LITERAL_CLOSE, LITERAL_OPEN, Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """`middle` "" where the prefix's end is the place to go on from."""

    prefix: str
    suffix: str
    middle: str

    def text(self, before: str, after: str) -> str:
        """The prompt. What the user wrote is text, even where it spells a control token."""
        head = f"{self.prefix}{_literal(before)}"
        tail = f"{self.suffix}{_literal(after)}"
        return f"{head}{tail}{self.middle}" if self.middle else f"{tail}{head}"


_KNOWN = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coders, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Marks("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


def infill_marks(tokenizer: Tokenizer) -> Marks | None:
    """The spelling that this vocabulary has; None for a model that only goes forward."""
    for marks in _KNOWN:
        spelt = [mark for mark in (marks.prefix, marks.suffix, marks.middle) if mark]
        if all(tokenizer.token_id(mark) is not None for mark in spelt):
            return marks
    return None


def _literal(text: str) -> str:
    return f"{LITERAL_OPEN}{text}{LITERAL_CLOSE}"
