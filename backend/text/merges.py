"""The merges of a SentencePiece vocabulary, derived from its tokens, and kept in a file.

SentencePiece joins the two neighbours whose union has the best score. That is BPE with a merge for
every way to cut a token into two tokens, ranked by the whole.

Few of these can ever be used. Two neighbours in a text were made of their own characters, without
anything from beside them, so they came about just as if they stood alone: a token is completed by
one merge at most, that which completes it when it is the whole text. So each token with several
cuts is tokenized, thousands at once, and the last merge of each stays. Gemma has 262,144 tokens,
514,847 cuts and 236,307 merges.

Deriving takes 2 s for so many, so they are kept in a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Ids = NDArray[np.int32]

_PRIME = np.uint64(0x100000001B3)  # of FNV-1a
_LAYOUT = "4"  # part of the file's name: grows when the same tokens would give other merges
_NO_RANK = np.iinfo(np.int32).max


def derive_merges(
    tokens: Sequence[str], ranks: Sequence[float], atoms: Collection[str] = ()
) -> list[tuple[str, str]]:
    """What a text can need of all cuts of a token into two tokens, best whole first (the lowest
    rank).

    `atoms`: tokens that come into a text without being made of their characters.
    """
    return _pairs_of(tokens, _merge_ids(tokens, ranks, atoms).ravel().tolist())


def kept_merges(
    tokens: Sequence[str], ranks: Sequence[float], atoms: Collection[str], folder: Path
) -> list[tuple[str, str]]:
    """As `derive_merges`, from a file of `folder` if they were derived before.

    The file is named by what it was derived from: a checksum, then two token ids for each merge.
    """
    derived_from = hashlib.blake2b(_LAYOUT.encode(), digest_size=12)
    derived_from.update("\0".join(tokens).encode("utf-8", "surrogatepass"))
    derived_from.update(array("d", ranks).tobytes())
    derived_from.update("\0".join(sorted(atoms)).encode("utf-8", "surrogatepass"))
    path = folder / f"merges-{derived_from.hexdigest()}.bin"
    kept = _read_ids(path)
    if kept is None:
        kept = array("i", _merge_ids(tokens, ranks, atoms).tobytes())
        numbers = kept.tobytes()
        _write_atomically(path, hashlib.blake2b(numbers).digest() + numbers)
    return _pairs_of(tokens, kept)


def _pairs_of(tokens: Sequence[str], ids: Sequence[int]) -> list[tuple[str, str]]:
    """Two ids make a merge."""
    token = tokens.__getitem__
    return list(zip(map(token, ids[::2]), map(token, ids[1::2]), strict=True))


def _merge_ids(tokens: Sequence[str], ranks: Sequence[float], atoms: Collection[str]) -> Ids:
    """[merges, 2], the ids of the halves."""
    cuts = _all_cuts(tokens, ranks)
    chosen = _usable(tokens, cuts, atoms)
    return np.stack((cuts.left[chosen], cuts.right[chosen]), axis=1)


# -------------------------------------------------------------------------------------- all cuts


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Every cut of a token into two tokens, best whole first, as ids; each text has one id.

    Of the cuts of one token the one with the shortest left half is first.
    """

    left: Ids
    right: Ids
    whole: Ids


def _all_cuts(tokens: Sequence[str], ranks: Sequence[float]) -> _Cuts:
    """Millions of parts are looked up at once: by hashes, polynomials modulo 2 ** 64, of which that
    of a right half follows from those of the whole and the left one."""
    order = np.lexsort((np.arange(len(tokens)), np.asarray(ranks)))
    order = order[np.fromiter((bool(tokens[i]) for i in order.tolist()), bool, len(order))]
    lengths, characters = _spelt([tokens[token_id] for token_id in order.tolist()])
    starts = np.cumsum(lengths) - lengths
    ends = starts + lengths
    powers = np.full(int(lengths.max(initial=0)) + 1, _PRIME, dtype=np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    prefixes = _scattered(characters.astype(np.uint64))
    for place in range(1, len(powers) - 1):  # the hashes of all beginnings, a character at a time
        at = starts[lengths > place] + place
        prefixes[at] += prefixes[at - 1] * _PRIME
    wholes = prefixes[ends - 1]
    sorting = np.argsort(wholes, kind="stable")
    known, known_ids = wholes[sorting], order[sorting].astype(np.int32)
    left = _found(known, prefixes)
    is_last = np.zeros(len(prefixes), dtype=bool)
    is_last[ends - 1] = True
    cuts = np.flatnonzero((left >= 0) & ~is_last)
    owner = np.searchsorted(starts, cuts, side="right") - 1
    rest = ends[owner] - 1 - cuts
    right = _found(known, wholes[owner] - prefixes[cuts] * powers[rest])
    is_cut = right >= 0
    whole = known_ids[_found(known, wholes)][owner[is_cut]]
    return _Cuts(known_ids[left[cuts[is_cut]]], known_ids[right[is_cut]], whole)


def _spelt(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """How many characters each text has, and the characters of all."""
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    encoded = "".join(texts).encode("utf-32-le", "surrogatepass")
    return lengths, np.frombuffer(encoded, dtype="<u4")


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


# ----------------------------------------------------------------------------------- usable cuts


class _Ranks:
    """The rank of a merge of two tokens: its place among the cuts."""

    def __init__(self, cuts: _Cuts, num_ids: int) -> None:
        self._num_ids = num_ids
        keys = self._keys(cuts.left, cuts.right)
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._sorted = keys[self._order]

    def of(self, left: Ids, right: Ids) -> Ids:
        """_NO_RANK where no token is made of these two. Of a pair that stands there twice, as a
        text may be two tokens, the last place counts, as for the tokenizer."""
        wanted = self._keys(left, right)
        places = np.maximum(np.searchsorted(self._sorted, wanted, side="right") - 1, 0)
        is_known = self._sorted[places] == wanted
        return np.where(is_known, self._order[places], np.int32(_NO_RANK))

    def _keys(self, left: Ids, right: Ids) -> NDArray[np.int64]:
        return left.astype(np.int64) * self._num_ids + right


def _usable(tokens: Sequence[str], cuts: _Cuts, atoms: Collection[str]) -> NDArray[np.bool_]:
    """Which of the cuts a text can need, and those of tokens that have no other."""
    if not len(cuts.whole):
        return np.zeros(0, dtype=bool)
    num_cuts = np.bincount(cuts.whole, minlength=len(tokens))
    chosen: NDArray[np.bool_] = num_cuts[cuts.whole] == 1
    chosen |= _made_of_atoms(tokens, cuts, atoms)
    ranks = _Ranks(cuts, len(tokens) + 1)  # an id more than there are: for other characters
    for symbols in _characters_of(tokens, np.flatnonzero(num_cuts > 1), cuts):
        chosen[_last_merges(symbols, ranks, cuts.whole)] = True
    return chosen


def _made_of_atoms(tokens: Sequence[str], cuts: _Cuts, atoms: Collection[str]) -> NDArray[np.bool_]:
    """The cuts of which a half is an atom, or made of one: its characters do not tell how."""
    is_made = np.fromiter((token in atoms for token in tokens), bool, len(tokens))
    while True:
        found: NDArray[np.bool_] = is_made[cuts.left] | is_made[cuts.right]
        if is_made[cuts.whole[found]].all():
            return found
        is_made[cuts.whole[found]] = True


def _characters_of(tokens: Sequence[str], ids: NDArray[np.int64], cuts: _Cuts) -> Iterator[Ids]:
    """[tokens, characters] for each length there is: the ids of the characters."""
    by_character = np.full(0x110000, len(tokens), dtype=np.int32)
    is_half = np.zeros(len(tokens), dtype=bool)
    is_half[cuts.left] = is_half[cuts.right] = True
    for token_id in np.flatnonzero(is_half).tolist():
        if len(tokens[token_id]) == 1:
            by_character[ord(tokens[token_id])] = token_id
    lengths, characters = _spelt([tokens[token_id] for token_id in ids.tolist()])
    starts = np.cumsum(lengths) - lengths
    for length in np.unique(lengths).tolist():
        places = starts[lengths == length][:, None] + np.arange(length)
        yield by_character[characters[places]]


def _last_merges(symbols: Ids, ranks: _Ranks, whole: Ids) -> Ids:
    """The places among the cuts of the merges that complete these texts [texts, characters].

    In each turn all texts do their best merge, the leftmost of several. A text that comes to a halt
    before it is one token has none.
    """
    found = ranks.of(symbols[:, :-1], symbols[:, 1:])
    while symbols.shape[1] > 2:
        best = found.argmin(axis=1)
        is_merged = found[np.arange(len(found)), best] < _NO_RANK
        symbols, found, best = symbols[is_merged], found[is_merged], best[is_merged]
        texts = np.arange(len(symbols))
        symbols[texts, best] = whole[found[texts, best]]
        symbols, found = _without(symbols, best + 1), _without(found, best)
        for side in (best - 1, best):  # the pairs that the new symbol makes
            is_there = (side >= 0) & (side < found.shape[1])
            row, at = texts[is_there], side[is_there]
            found[row, at] = ranks.of(symbols[row, at], symbols[row, at + 1])
    last: Ids = found[:, 0]
    return last[last < _NO_RANK]


def _without(rows: Ids, columns: NDArray[np.int64]) -> Ids:
    """Each row less one of its elements."""
    stays = np.ones(rows.shape, dtype=bool)
    stays[np.arange(len(rows)), columns] = False
    return rows[stays].reshape(len(rows), rows.shape[1] - 1)


# --------------------------------------------------------------------------------------- the file


def _read_ids(path: Path) -> array[int] | None:
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
