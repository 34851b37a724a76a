"""Incremental text: whole, in step with its ids, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmd.backend.text.detokenizer import Detokenizer
from llmd.backend.text.tokenizer import Tokenizer

from .test_tokenizer import MULTILINGUAL
from .vocabularies import byte_level, sentence_piece

TOKENIZERS = {"bpe": byte_level(), "spm": sentence_piece()}


def run(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str]
) -> tuple[str, str | None]:
    """Feed ids in chunks of these sizes; check the promises about every delta on the way."""
    detokenizer = Detokenizer(tokenizer, (), stops)
    text, num_released, position, stop = "", 0, 0, None
    sizes = [*cuts, len(ids)]
    while position < len(ids) and stop is None:
        chunk = ids[position : position + max(sizes.pop(0) if sizes else 1, 1)]
        position += len(chunk)
        released = detokenizer.push(chunk)
        text += released.text
        num_released += released.num_ids
        stop = released.stop
        assert num_released <= position
        assert tokenizer.decode(ids[:num_released]).startswith(text)
    if stop is None:
        rest = detokenizer.flush()
        text += rest.text
        assert num_released + rest.num_ids == len(ids)
    return text, stop


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The specification: the stop string that is completed first, the longest of those."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s and s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


token_ids = st.lists(st.integers(0, 270), max_size=40)
chunk_sizes = st.lists(st.integers(1, 5), max_size=20)
stop_strings = st.lists(st.text("the in\n<|", min_size=1, max_size=4), max_size=3)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(ids=token_ids, cuts=chunk_sizes, stops=stop_strings, name=st.sampled_from(["bpe", "spm"]))
@example(ids=[0xE2, 0x82], cuts=[1], stops=[], name="bpe")
def test_any_chunks_of_any_ids_give_the_text_of_all_ids_at_once(
    ids: list[int], cuts: list[int], stops: list[str], name: str
) -> None:
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.decode(ids)
    assert run(tokenizer, ids, cuts, stops) == cut_at_first_stop(whole, stops)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", MULTILINGUAL)
def test_multilingual_text_streams_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert run(tokenizer, tokenizer.encode(text), [1] * 200, []) == (text, None)


def test_half_a_character_waits_for_its_other_half() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bpe"])
    euro = [id_of(byte) for byte in "€".encode()]
    assert detokenizer.push(euro[:1]) == ("", 0, None)
    assert detokenizer.push(euro[1:2]) == ("", 0, None)
    assert detokenizer.push(euro[2:]) == ("€", 3, None)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["bpe"]
    detokenizer = Detokenizer(tokenizer, (), ["</end>"])
    assert detokenizer.push(tokenizer.encode("a </")).text == "a "
    assert detokenizer.push(tokenizer.encode("b")).text == "</b"
    assert detokenizer.push(tokenizer.encode("</en")).text == ""
    released = detokenizer.push(tokenizer.encode("d>and more"))
    assert (released.text, released.stop) == ("", "</end>")
    assert detokenizer.push(tokenizer.encode("more")) == ("", 0, None)
    assert detokenizer.flush() == ("", 0, None)


def test_an_overlapping_start_is_not_missed() -> None:
    tokenizer = TOKENIZERS["bpe"]
    detokenizer = Detokenizer(tokenizer, (), ["aab"])
    released = [detokenizer.push(tokenizer.encode(letter)) for letter in "aaab"]
    assert "".join(piece.text for piece in released) == "a"
    assert released[-1].stop == "aab"


def test_the_stop_string_is_shown_when_asked_for() -> None:
    tokenizer = TOKENIZERS["bpe"]
    detokenizer = Detokenizer(tokenizer, (), ["STOP"], include_stop=True)
    released = detokenizer.push(tokenizer.encode("go STOP on"))
    assert (released.text, released.stop) == ("go STOP", "STOP")


def test_a_prompt_lets_the_first_token_keep_its_space() -> None:
    tokenizer = TOKENIZERS["spm"]
    ids = tokenizer.encode("the")
    assert Detokenizer(tokenizer, [1]).push(ids).text == " the"
    assert Detokenizer(tokenizer).push(ids).text == "the"


def test_a_character_that_the_prompt_began_is_completed() -> None:
    euro = [id_of(byte) for byte in "€".encode()]
    detokenizer = Detokenizer(TOKENIZERS["bpe"], euro[:2])
    assert detokenizer.push(euro[2:]).text == "€"


def id_of(byte: int) -> int:
    tokenizer = TOKENIZERS["bpe"]
    return next(i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte]))
