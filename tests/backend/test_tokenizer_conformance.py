"""Our tokenizers against the vectors of llama.cpp's vocabularies, token for token."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from llmd.backend.text.detokenizer import Detokenizer
from llmd.backend.text.tokenizer import Tokenizer, from_gguf_metadata
from llmd.registry.formats.gguf import read_header

from .. import conformance_files as files
from .test_tokenizer import MULTILINGUAL

pytestmark = pytest.mark.slow

# WordPiece forgets case, accents and spaces, so its text does not come back.
LOSSLESS = [name for name in files.VOCABULARIES if name != "bert-bge"]


@lru_cache(maxsize=1)
def tokenizer_of(name: str) -> Tokenizer:
    return from_gguf_metadata(read_header(files.vocabulary(name)).metadata)


@pytest.mark.parametrize("name", files.VOCABULARIES)
def test_every_vector_is_encoded_as_expected(name: str) -> None:
    tokenizer = tokenizer_of(name)
    wrong = [text for text, ids in files.vectors(name) if tokenizer.encode(text) != ids]
    assert wrong == []


@pytest.mark.parametrize("name", LOSSLESS)
def test_streamed_text_is_the_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    texts = [*MULTILINGUAL, *(text for text, _ in files.vectors(name))]
    for text in texts:
        ids = tokenizer.encode(text)
        for size in (1, 2, 3, 7):
            detokenizer = Detokenizer(tokenizer)
            chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
            streamed = "".join(detokenizer.push(chunk).text for chunk in chunks)
            assert streamed + detokenizer.flush().text == text


@pytest.mark.parametrize("name", LOSSLESS)
def test_decoding_is_that_of_the_tokenizers_library(name: str, tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizer_of(name)
    reference = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for text, ids in files.vectors(name):
        expected = reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == expected, text


@pytest.mark.parametrize("name", files.VOCABULARIES_WITHOUT_VECTORS)
def test_other_vocabularies_load_and_give_their_text_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in ("Hello wörld, 123", "def f(x): return x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
