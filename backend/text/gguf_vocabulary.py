"""The vocabulary in a GGUF file's metadata, as a fast tokenizer.

    tokenizer.ggml.model   becomes
    gpt2                   byte-level BPE; tokenizer.ggml.pre says how text is split
    llama                  BPE over "▁" and byte fallback; merges derived from scores if none stand
    gemma4                 the same with merges given, split at line ends
    bert                   word pieces
    t5                     unigram

Merges of a `llama` vocabulary: SentencePiece joins the two neighbours whose union has the best
score. That is BPE with a merge for every way to cut a token into two tokens, ranked by the score of
the whole. Gemma's stored scores are not those it was made with; there a token's place decides.

Half a million merges take seconds to derive, so they are kept in a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .pretokenizers import pre_tokenizer

log = logging.getLogger(__name__)

Metadata = Mapping[str, Any]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"
_GEMMAS_WITH_FALSE_SCORES = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma-embedding")
_PRIME = np.uint64(0x100000001B3)  # of FNV-1a
_LAYOUT = "3"  # part of that file's name: grows when the same tokens would give other merges


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
    # All at once: each call makes the automaton anew that looks for them, Gemma has six thousand.
    for wanted, add in ((CONTROL, built.add_special_tokens), (USER_DEFINED, built.add_tokens)):
        add(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
                if kind == wanted and token
            ]
        )
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
    architecture = vocabulary.metadata.get("general.architecture", "")
    ranks = (
        [float(token_id) for token_id in range(len(tokens))]
        if architecture in _GEMMAS_WITH_FALSE_SCORES
        else [-score for score in vocabulary.scores]
    )
    merges = vocabulary.merges
    if not merges:
        folder = vocabulary.cache_dir
        merges = derive_merges(tokens, ranks) if not folder else _kept_merges(tokens, ranks, folder)
    has_prefix = bool(vocabulary.value("add_space_prefix", True))
    return _spaced_bpe(vocabulary, tokens, merges, has_prefix)


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
    unknown = vocabulary.text_of("unknown_token_id", 0)
    built = tokenizers.Tokenizer(
        models.BPE(_ids(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
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


def derive_merges(tokens: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens, best whole first (the lowest rank).

    Of the cuts of one token the one with the shortest left half is first: it never matters, since
    all of them make the same token.
    """
    return _pairs_of(tokens, _merge_ids(tokens, ranks).ravel().tolist())


def _pairs_of(tokens: Sequence[str], ids: Sequence[int]) -> list[tuple[str, str]]:
    """Two ids make a merge."""
    token = tokens.__getitem__
    return list(zip(map(token, ids[::2]), map(token, ids[1::2]), strict=True))


def _merge_ids(tokens: Sequence[str], ranks: Sequence[float]) -> NDArray[np.int32]:
    """[merges, 2], the ids of the halves.

    Millions of parts are looked up at once: by hashes, polynomials modulo 2 ** 64, of which that of
    a right half follows from those of the whole and the left one.
    """
    order = np.lexsort((np.arange(len(tokens)), np.asarray(ranks)))
    texts = [tokens[token_id] for token_id in order.tolist()]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    encoded = "".join(texts).encode("utf-32-le", "surrogatepass")
    starts = np.cumsum(lengths) - lengths
    powers = np.full(int(lengths.max(initial=0)) + 1, _PRIME, dtype=np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    prefixes = _scattered(np.frombuffer(encoded, dtype=np.uint32).astype(np.uint64))
    for place in range(1, len(powers) - 1):  # the hashes of all beginnings, a character at a time
        at = starts[lengths > place] + place
        prefixes[at] += prefixes[at - 1] * _PRIME
    is_spelt = lengths > 0
    wholes = prefixes[(starts + lengths - 1)[is_spelt]]
    sorting = np.argsort(wholes, kind="stable")
    known, known_ids = wholes[sorting], order[is_spelt][sorting]
    left = _found(known, prefixes)
    is_last = np.zeros(len(prefixes), dtype=bool)
    is_last[(starts + lengths - 1)[is_spelt]] = True
    cuts = np.flatnonzero((left >= 0) & ~is_last)
    owner = np.searchsorted(starts[is_spelt], cuts, side="right") - 1
    rest = (starts + lengths)[is_spelt][owner] - 1 - cuts
    right = _found(known, wholes[owner] - prefixes[cuts] * powers[rest])
    pairs = np.stack((known_ids[left[cuts]], known_ids[right]), axis=1)
    return pairs[right >= 0].astype(np.int32)


def _found(known: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where in `known`, which is sorted; -1 if it is not there."""
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[places] == wanted, places, -1)


def _scattered(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: neighbours in the alphabet become numbers without a pattern."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _respaced(token: str) -> str:
    """Gemma files spell runs of spaces with real ones."""
    return token.replace(" ", _SPACE)


def _kept_merges(
    tokens: Sequence[str], ranks: Sequence[float], folder: Path
) -> list[tuple[str, str]]:
    """As `derive_merges`, from a file of `folder` if they were derived before.

    The file is named by what it was derived from: a checksum, then two token ids for each merge.
    """
    derived_from = hashlib.blake2b(_LAYOUT.encode(), digest_size=12)
    derived_from.update("\0".join(tokens).encode("utf-8", "surrogatepass"))
    derived_from.update(array("d", ranks).tobytes())
    path = folder / f"merges-{derived_from.hexdigest()}.bin"
    kept = _read_ids(path, len(tokens))
    if kept is None:
        kept = array("i", _merge_ids(tokens, ranks).tobytes())
        numbers = kept.tobytes()
        _write_atomically(path, hashlib.blake2b(numbers).digest() + numbers)
    return _pairs_of(tokens, kept)


def _read_ids(path: Path, vocab_size: int) -> array[int] | None:
    """None if the file is not there, or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.blake2b().digest_size
    checksum, numbers = content[:size], content[size:]
    if hashlib.blake2b(numbers).digest() != checksum:
        log.warning("%s is damaged and made again", path)
        return None
    return array("i", numbers)


def _write_atomically(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
