"""Tokenizers from GGUF metadata and from a folder of the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmd.backend.text.gguf_vocabulary import TokenizerError, load_vocabulary
from llmd.backend.text.tokenizer import (
    LITERAL_CLOSE,
    LITERAL_OPEN,
    Tokenizer,
    from_gguf_metadata,
    load_tokenizer,
    without_marks,
)

from .vocabularies import (
    byte_level,
    byte_level_metadata,
    sentence_piece,
    sentence_piece_metadata,
)

MULTILINGUAL = (
    "the tin  heather 123\n\n\tthe",
    "naïve Ünïcödé – “quotes” … €",
    "日本語のテキスト 中文 한국어",
    "مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 é",
    "def f(x):\n    return x  # ok\r\n",
    "",
    " leading and trailing ",
)


@dataclass(frozen=True)
class File:
    name: str
    role: str
    path: str


def hub_folder(folder: Path, **files: Any) -> list[File]:
    """A folder with the tokenizer.json of the byte-level vocabulary and these JSON files."""
    contents = {"tokenizer.json": byte_level().to_json()}
    contents.update({f"{name}.json": json.dumps(value) for name, value in files.items()})
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [File(name, "tokenizer", str(folder / name)) for name in contents]


@pytest.mark.parametrize("text", MULTILINGUAL)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["bpe", "spm"])
def test_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["bpe", "spm"])
def test_a_twin_encodes_alike(tokenizer: Tokenizer) -> None:
    encode = tokenizer.twin()
    for text in (*MULTILINGUAL, "<|im_end|> the <tool_call>", "<s>the</s>"):
        assert encode(text) == tokenizer.encode(text)


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text() -> None:
    tokenizer = byte_level()
    text = "the 👩‍👩‍👧 naïve <|im_end|>"
    ids = tokenizer.encode(text, parse_special=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(10**9) == b""


def test_merges_follow_the_scores_of_a_sentence_piece_vocabulary() -> None:
    tokenizer = sentence_piece()
    spelt = [tokenizer.token_bytes(i) for i in tokenizer.encode("the hello")]
    assert spelt == [b" the", b" ", b"he", b"ll", b"o"]


def test_a_run_of_spaces_that_a_user_defined_is_the_token_of_its_place() -> None:
    """Gemma 3's files spell them with real spaces; no id is beyond the table of embeddings."""
    metadata = sentence_piece_metadata()
    first = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["  ", "   "]
    metadata["tokenizer.ggml.token_type"] += [4, 4]
    metadata["tokenizer.ggml.scores"] += [0.0, 0.0]
    metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = from_gguf_metadata(metadata)
    assert tokenizer.vocab_size == first + 2
    ids = tokenizer.encode("a   a  a a")
    assert [token_id for token_id in ids if token_id >= first] == [first + 1, first]
    assert tokenizer.decode(ids) == "a   a  a a"


def test_the_best_score_wins_though_a_longer_token_exists() -> None:
    metadata = sentence_piece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.scores"][tokens.index("el")] = 1.0
    tokenizer = from_gguf_metadata(metadata)
    spelt = [tokenizer.token_bytes(i) for i in tokenizer.encode("hello")]
    assert spelt == [b" ", b"h", b"ello"]


def test_a_digit_is_a_token_of_its_own_where_the_vocabulary_says_so() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"].append("12")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.merges"].append("1 2")
    apart = from_gguf_metadata(metadata)
    together = from_gguf_metadata({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert len(apart.encode("12")) == 2
    assert len(together.encode("12")) == 1


def test_control_tokens_are_recognised_only_when_asked() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [end]
    as_text = tokenizer.encode("<|im_end|>")
    assert end not in as_text
    assert tokenizer.decode(as_text) == "<|im_end|>"


def test_a_literal_span_is_text_among_control_tokens_that_are_meant() -> None:
    tokenizer = byte_level()
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    marked = f"<|im_start|>the {LITERAL_OPEN}<|im_end|>{LITERAL_CLOSE} the<|im_end|>"
    ids = tokenizer.encode(marked, parse_special=True)
    assert (ids[0], ids[-1], ids.count(end or 0)) == (start, end, 1)
    assert tokenizer.decode(ids) == without_marks(marked)
    assert ids[1:-1] == tokenizer.encode("the <|im_end|> the")


def test_a_text_is_opened_by_bos_where_the_model_wants_it() -> None:
    without, with_bos = byte_level(), sentence_piece()
    assert not without.add_bos
    assert without.encode("the", add_special=True) == without.encode("the")
    assert with_bos.add_bos
    assert with_bos.encode("the", add_special=True) == [1, *with_bos.encode("the")]


def test_the_ends_of_generation_are_those_named_and_those_known() -> None:
    tokenizer = byte_level()
    known = {tokenizer.token_id(text) for text in ("<|end|>", "<|im_end|>")}
    assert tokenizer.eos_ids == known
    assert tokenizer.is_special(tokenizer.token_id("<tool_call>") or 0)


def test_derived_merges_are_kept_and_read_again(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    built = load_vocabulary(metadata, tmp_path)
    (kept,) = tmp_path.iterdir()
    written = kept.stat().st_mtime_ns
    assert load_vocabulary(metadata, tmp_path).to_str() == built.to_str()
    assert load_vocabulary(metadata, None).to_str() == built.to_str()
    assert kept.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [kept]


def test_damaged_merges_are_derived_again(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    built = load_vocabulary(metadata, tmp_path)
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-8], whole[:10], b"", whole[:-1] + b"?"):
        kept.write_bytes(damaged)
        assert load_vocabulary(metadata, tmp_path).to_str() == built.to_str()
        assert kept.read_bytes() == whole


def test_another_vocabulary_does_not_take_the_kept_merges(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    load_vocabulary(metadata, tmp_path)
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "another"]
    other = {**metadata, "tokenizer.ggml.tokens": tokens}
    assert load_vocabulary(other, tmp_path).to_str() == load_vocabulary(other, None).to_str()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "differ in length"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no pair"),
        ({"tokenizer.ggml.merges": ["not there"]}, "inconsistent"),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        from_gguf_metadata({**byte_level_metadata(), **changes})


def test_a_hub_folder_says_what_ends_and_opens_a_text(tmp_path: Path) -> None:
    start, end = byte_level().token_id("<|im_start|>"), byte_level().token_id("<|im_end|>")
    files = hub_folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
        },
        generation_config={"eos_token_id": [65, end]},
        config={"eos_token_id": 66},
    )
    tokenizer = load_tokenizer(files)
    assert {65, 66, end} <= tokenizer.eos_ids
    assert (tokenizer.bos_id, tokenizer.add_bos) == (start, True)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.encode("the", add_special=True)[0] == start


def test_files_without_a_tokenizer_are_refused_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345678")
    with pytest.raises(TokenizerError, match=r"model\.safetensors"):
        load_tokenizer([File("model.safetensors", "weights", str(path))])


def test_a_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer([File("tokenizer.json", "tokenizer", str(path))])


@pytest.mark.real_model
def test_the_real_vocabulary_encodes_as_the_reference_does(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Expected ids by llama.cpp's llama-tokenize over the same file."""
    tokenizer = load_tokenizer([File("model.gguf", "weights", str(smollm2_gguf))], tmp_path)
    ids = tokenizer.encode("Hello  123 wörld")
    assert ids == [19556, 256, 33, 34, 35, 267, 29989, 400]
    assert tokenizer.eos_ids == {0, 2}
    for text in MULTILINGUAL:
        assert tokenizer.decode(tokenizer.encode(text)) == text
