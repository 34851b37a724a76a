"""The exact bytes that each token stands for, read off the tokenizer's decoder.

A model writes bytes, not characters: one token may be the first half of an emoji. Everything that
turns ids into text (decoding, streaming, logprobs) goes through these bytes, so there is one answer
and no work grows with the length of the text.

    byte-level   every byte is spelt as one printable character (GPT-2's table)
    replacing    "▁" stands for a space, "<0xAB>" for a byte without a token of its own
    word pieces  "##x" continues a word, all else begins one with a space
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    spelling.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return spelling


@dataclass(frozen=True, slots=True)
class ByteRules:
    """How a token's spelling becomes bytes. Made by `rules_of`."""

    is_byte_level: bool = False
    has_byte_tokens: bool = False
    replacements: Sequence[tuple[str, str]] = ()
    continuation_prefix: str | None = None  # of word pieces
    word_end: str | None = None
    strips_leading_space: bool = False  # one space, at the very start of a text
    spelling: Mapping[str, int] = field(default_factory=byte_of_character)

    def bytes_of(self, token: str, is_added: bool) -> bytes:
        """`is_added`: the token is outside the learnt vocabulary and spelt as it is."""
        if self.is_byte_level:
            spelt = None if is_added else self._byte_level(token)
            return token.encode("utf-8", "replace") if spelt is None else spelt
        byte_token = _BYTE_TOKEN.fullmatch(token) if self.has_byte_tokens else None
        if byte_token is not None:
            return bytes([int(byte_token[1], 16)])
        if self.continuation_prefix is not None:
            is_inside = token.startswith(self.continuation_prefix)
            token = token.removeprefix(self.continuation_prefix) if is_inside else " " + token
        if self.word_end and token.endswith(self.word_end):
            token = token.removesuffix(self.word_end) + " "
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    def _byte_level(self, token: str) -> bytes | None:
        try:
            return bytes([self.spelling[character] for character in token])
        except KeyError:  # not of the table: a token spelt as it is
            return None


def rules_of(decoder: Mapping[str, Any] | None) -> ByteRules:
    """The rules that the `decoder` part of a tokenizer.json describes."""
    steps = list(_flattened(decoder))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return ByteRules(is_byte_level=True)
    word_pieces = _first(steps, "WordPiece")
    if word_pieces is not None:
        return ByteRules(
            continuation_prefix=word_pieces.get("prefix", "##"), strips_leading_space=True
        )
    replacements = [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step.get("type") == "Replace" and "String" in step.get("pattern", {})
    ]
    metaspace = _first(steps, "Metaspace")
    if metaspace is not None:
        replacements.append((metaspace.get("replacement", "▁"), " "))
    word_end = _first(steps, "BPEDecoder")
    return ByteRules(
        has_byte_tokens="ByteFallback" in kinds,
        replacements=tuple(replacements),
        word_end=None if word_end is None else word_end.get("suffix", "</w>"),
        strips_leading_space="Strip" in kinds
        or (metaspace is not None and metaspace.get("prepend_scheme", "always") != "never"),
    )


def _flattened(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return ()
    if decoder.get("type") != "Sequence":
        return (decoder,)
    return [step for part in decoder.get("decoders", ()) for step in _flattened(part)]


def _first(steps: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((step for step in steps if step.get("type") == kind), None)
