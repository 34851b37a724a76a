"""Derived merges: fewer than all cuts of all tokens, and no text can tell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import models

from llmd.backend.text.merges import derive_merges

ALPHABET = "abé▁😀"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _all_cuts(tokens: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for _, _, token in sorted(zip(ranks, range(len(tokens)), tokens, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token=tokens[0], fuse_unk=True, byte_fallback=True)
    )


def _vocabulary(chance: random.Random) -> tuple[list[str], list[float]]:
    """Parts of a few words; some letters are missing, and some parts there twice."""
    words = [letter for letter in ALPHABET if chance.random() < 0.8]
    for _ in range(chance.randrange(1, 8)):
        word = "".join(chance.choices(ALPHABET[:3], k=9))
        ends = (sorted(chance.sample(range(10), 2)) for _ in range(20))
        words += [word[begin:end] for begin, end in ends]
    if chance.random() < 0.3:
        words += [*BYTES, "<0xA4>a", "<0xA4>ab", "<0xC3><0xA4>", "<0xC3><0xA4>b", "<?>a", "<?>ab"]
        words += ["<", "0", "x", "C", "3", ">", "<0xC3", "0xC3>", "<0", "<0xC3><", "?>", "ab"]
    if chance.random() < 0.7:
        words = list(dict.fromkeys(words))
    return ["<?>", "", *words], [chance.random() for _ in range(len(words) + 2)]


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_tokenized_as_with_all_cuts(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        tokens, ranks = _vocabulary(chance)
        every = _all_cuts(tokens, ranks)
        merges = derive_merges(tokens, ranks, frozenset((*BYTES, tokens[0])))
        texts = [
            "".join(chance.choices(ALPHABET[:3] * 4 + ALPHABET + "cä<", k=40)) for _ in range(50)
        ]
        texts += ["".join(chance.choices(tokens, k=8)) for _ in range(50)]
        whole, lean = _bpe(tokens, every), _bpe(tokens, merges)
        for wanted, found in zip(whole.encode_batch(texts), lean.encode_batch(texts), strict=True):
            assert found.ids == wanted.ids


def test_they_are_some_of_all_cuts_the_best_token_first() -> None:
    chance = random.Random(1)
    num_cuts = num_merges = 0
    for _ in range(100):
        tokens, ranks = _vocabulary(chance)
        tokens = list(dict.fromkeys(tokens))
        ranks = ranks[: len(tokens)]
        every = _all_cuts(tokens, ranks)
        places = [every.index(merge) for merge in derive_merges(tokens, ranks)]
        assert all(one < next for one, next in pairwise(places))
        num_cuts, num_merges = num_cuts + len(every), num_merges + len(places)
    assert 0 < num_merges < 0.6 * num_cuts


def test_a_token_is_completed_by_the_merge_that_its_own_text_comes_to() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    assert derive_merges(tokens, [0, 0, 0, 1, 2, 3]) == [("a", "b"), ("b", "c"), ("ab", "c")]
    assert derive_merges(tokens, [0, 0, 0, 2, 1, 3]) == [("b", "c"), ("a", "b"), ("a", "bc")]


def test_a_vocabulary_without_merges_has_none() -> None:
    assert derive_merges([], []) == []
    assert derive_merges(["", "a", "b"], [0.0, 1.0, 2.0]) == []
