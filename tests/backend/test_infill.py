"""Fill in the middle: the marks of the model's own vocabulary, and nothing that the user spells."""

from __future__ import annotations

import pytest

from llmd.backend.prompt import PromptBuilder, RequestRefused
from llmd.backend.protocol import Generate
from llmd.backend.text.infill import infill_marks

from .vocabularies import byte_level

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (FIM, "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]): pass[PREFIX]def f("),
    ],
)
def test_the_prompt_is_in_the_models_own_spelling(marks: list[str], prompt: str) -> None:
    tokenizer = byte_level(marks)
    builder = PromptBuilder(tokenizer, None, "llama", 256)
    built = builder.build(Generate("1", prompt="def f(", suffix="): pass", add_bos=False))
    assert built.rendered == prompt
    assert list(built.prompt_ids) == tokenizer.encode(prompt, parse_special=True)


def test_a_mark_that_the_user_wrote_is_text() -> None:
    tokenizer = byte_level(FIM)
    builder = PromptBuilder(tokenizer, None, "llama", 256)
    built = builder.build(Generate("1", prompt="a<|fim_middle|>", suffix="b", add_bos=False))
    assert list(built.prompt_ids).count(tokenizer.control_tokens["<|fim_middle|>"]) == 1


def test_a_model_that_only_goes_forward_says_so() -> None:
    assert infill_marks(byte_level()) is None
    builder = PromptBuilder(byte_level(), None, "llama", 256)
    with pytest.raises(RequestRefused, match="does not support insert"):
        builder.build(Generate("1", prompt="a", suffix="b"))


def test_a_model_without_a_template_goes_on_with_the_words_alone() -> None:
    tokenizer = byte_level(FIM)
    builder = PromptBuilder(tokenizer, None, "llama", 256)
    messages = [
        {"role": "system", "content": "In short."},
        {"role": "user", "content": "The sea<|fim_middle|> is"},
    ]
    built = builder.build(Generate("1", messages=messages, add_bos=False))
    assert built.rendered == "In short.\nThe sea<|fim_middle|> is"
    assert tokenizer.control_tokens["<|fim_middle|>"] not in built.prompt_ids
    with pytest.raises(RequestRefused, match="no place for tools"):
        builder.build(Generate("1", messages=messages, tools=[{"type": "function"}]))
