"""The vocabulary in a GGUF file's metadata, as a fast tokenizer.

    tokenizer.ggml.model   becomes
    gpt2                   byte-level BPE; tokenizer.ggml.pre says how text is split
    llama                  BPE over "▁" and byte fallback; if no merges stand there: merges.py
    gemma4                 the same with merges given, split at line ends
    bert                   word pieces
    t5                     unigram

Gemma's stored scores are not those it was made with; there a token's place decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import neg
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .merges import derive_merges, kept_merges
from .pretokenizers import pre_tokenizer

Metadata = Mapping[str, Any]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # of characters that are no tokens
_SPACE = "▁"
_GEMMAS_WITH_FALSE_SCORES = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma-embedding")


class TokenizerError(Exception):
    """The model's tokenizer cannot be used. The text says what is wrong or not supported."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The arrays of the metadata, complete and of one length."""

    metadata: Metadata
    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merge_texts: list[str]  # as they are stored, "left right"
    cache_dir: Path | None

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Raises TokenizerError if one is no pair."""
        return [_pair(merge) for merge in self.merge_texts]

    @property
    def unknown(self) -> str | None:
        """Of SentencePiece's BPE: what stands for characters that not even bytes can spell."""
        return self.text_of("unknown_token_id", 0)

    def value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get("tokenizer.ggml." + key, default)

    def text_of(self, key: str, default: int | None = None) -> str | None:
        """The token that a `..._token_id` names."""
        token_id = self.value(key, default)
        in_range = isinstance(token_id, int) and 0 <= token_id < len(self.tokens)
        return self.tokens[token_id] if in_range else None


def load_vocabulary(metadata: Metadata, cache_dir: Path | None) -> tokenizers.Tokenizer:
    """Built from the metadata; what takes long to derive is kept in `cache_dir`.

    Raises TokenizerError if a part is missing or the kind is not supported.
    """
    return _build(_read(metadata, cache_dir))


def _read(metadata: Metadata, cache_dir: Path | None) -> _Vocabulary:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise TokenizerError("the GGUF file has no tokenizer (tokenizer.ggml.model, .tokens)")
    if kind not in _BUILDERS:
        supported = ", ".join(_BUILDERS)
        raise TokenizerError(f"tokenizer kind {kind!r} is not supported; supported: {supported}")
    types = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    scores = list(metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens))
    if not len(tokens) == len(types) == len(scores):
        raise TokenizerError(
            f"tokenizer arrays differ in length: {len(tokens)} tokens, {len(types)} types, "
            f"{len(scores)} scores"
        )
    merges = list(metadata.get("tokenizer.ggml.merges") or ())
    return _Vocabulary(metadata, kind, list(tokens), types, scores, merges, cache_dir)


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # a part is never empty, and may begin with a space itself
    if cut < 0:
        raise TokenizerError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair")
    return merge[:cut], merge[cut + 1 :]


def _build(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    try:
        built = _BUILDERS[vocabulary.kind](vocabulary)
    except TokenizerError:
        raise
    except Exception as error:  # the Rust side raises bare Exception over an inconsistent table
        raise TokenizerError(f"the tokenizer tables are inconsistent: {error}") from error
    added = [
        (AddedToken(token, special=kind == CONTROL, normalized=False), kind)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    # All at once: each call makes the automaton anew that looks for them, Gemma has six thousand.
    built.add_special_tokens([token for token, kind in added if kind == CONTROL])
    built.add_tokens([token for token, kind in added if kind == USER_DEFINED])
    return built


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    split = pre_tokenizer(vocabulary.value("pre", "default"))
    built = tokenizers.Tokenizer(
        models.BPE(_ids(vocabulary.tokens), vocabulary.merges, ignore_merges=split.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    # Those that a user defined are looked for in the text as it is, before spaces are respelled.
    tokens = [
        token if " " not in token or kind == USER_DEFINED else _respaced(token)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    merges = vocabulary.merges or _merges_of_scores(vocabulary, tokens)
    has_prefix = bool(vocabulary.value("add_space_prefix", True))
    return _spaced_bpe(vocabulary, tokens, merges, has_prefix)


def _merges_of_scores(vocabulary: _Vocabulary, tokens: list[str]) -> list[tuple[str, str]]:
    has_scores = vocabulary.metadata.get("general.architecture") not in _GEMMAS_WITH_FALSE_SCORES
    ranks = array("d", map(neg, vocabulary.scores) if has_scores else range(len(tokens)))
    atoms = frozenset((*_BYTES, vocabulary.unknown or ""))
    if vocabulary.cache_dir is None:
        return derive_merges(tokens, ranks, atoms)
    return kept_merges(tokens, ranks, atoms, vocabulary.cache_dir)


def _gemma4(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    tokens = [_respaced(token) for token in vocabulary.tokens]
    merges = [(_respaced(left), _respaced(right)) for left, right in vocabulary.merges]
    built = _spaced_bpe(vocabulary, tokens, merges, has_prefix=False)
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return built


def _spaced_bpe(
    vocabulary: _Vocabulary,
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    has_prefix: bool,
) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(
        models.BPE(
            _ids(tokens),
            merges,
            unk_token=vocabulary.unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    built.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    built.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return built


def _word_pieces(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    spelt = [
        token if kind != 1 else token[1:] if token.startswith(_SPACE) else "##" + token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    unknown = vocabulary.text_of("unknown_token_id", 100) or "[UNK]"
    built = tokenizers.Tokenizer(
        models.WordPiece(_ids(spelt), unk_token=unknown, max_input_chars_per_word=100)
    )
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    return built


def _unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    built = tokenizers.Tokenizer(
        models.Unigram(pieces, unk_id=vocabulary.value("unknown_token_id", 2), byte_fallback=False)
    )
    charsmap = vocabulary.value("precompiled_charsmap")
    mapping = [normalizers.Precompiled(bytes(charsmap))] if charsmap else []
    single_spaces = normalizers.Replace(Regex(" {2,}"), " ")
    built.normalizer = normalizers.Sequence([*mapping, single_spaces])
    built.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    built.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always")
    return built


_BUILDERS: dict[str, Callable[[_Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma4,
    "bert": _word_pieces,
    "t5": _unigram,
}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _respaced(token: str) -> str:
    """Gemma files spell runs of spaces with real ones."""
    return token.replace(" ", _SPACE)
