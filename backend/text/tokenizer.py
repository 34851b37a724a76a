"""Text to token ids and back, for one model, whatever form its tokenizer comes in.

    a folder of the hub  tokenizer.json (+ tokenizer_config, generation_config, config)
    a GGUF file          tokenizer.ggml.* in its metadata

Besides encoding, it knows which ids end a generation, which open a text, and the exact bytes of
each token. Text may hold *literal spans*, marked by two code points that Unicode reserves as never
being characters: what stands between them is encoded as text even if it spells a control token.
The chat template marks what users wrote in this way, so that no one can close their own turn.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import tokenizers

from ...registry.formats.gguf import read_header
from .gguf_vocabulary import TokenizerError, load_vocabulary
from .token_bytes import rules_of

LITERAL_OPEN, LITERAL_CLOSE = "\ufdd0", "\ufdd1"
_LITERAL = re.compile(f"{LITERAL_OPEN}([^{LITERAL_CLOSE}]*){LITERAL_CLOSE}")

# Tokens that end a turn in some family, whether or not the model's files name them as such.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)
_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class ModelFile(Protocol):
    """One file of a model; protocol.ModelFile fits."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def path(self) -> str: ...


class Tokenizer:
    """Owner: the worker. Encoding may be called from any thread; all else only reads.

    `prefix_ids` and `suffix_ids` are what the model wants around a text of its own.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        prefix_ids: Sequence[int],
        suffix_ids: Sequence[int] = (),
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        self.bos_id = self._id_in(backend, special_tokens.get("bos_token"))
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = _size_of(backend)
        self.add_bos = self.bos_id is not None and self.bos_id in self.prefix_ids
        added = backend.get_added_tokens_decoder()
        self.control_tokens = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(self.control_tokens.values())
        self._rules = rules_of(_state_of(backend.decoder))
        # The only mutable state. Whether control tokens are recognised is a switch on the backend,
        # not an argument; the lock keeps the switch and the encoding that it is meant for together.
        self._backend = backend
        self._lock = threading.Lock()
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._ids_with: dict[bytes, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer {self.vocab_size} tokens, ends {sorted(self.eos_ids)}>"

    @property
    def strips_leading_space(self) -> bool:
        """A text's first token brings a space that is not part of the text."""
        return self._rules.strips_leading_space

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """`parse_special`: control tokens spelt in the text become ids, outside literal spans."""
        if parse_special and LITERAL_OPEN in text:
            ids = self._encode_with_literals(text)
        else:
            ids = self._encode(text, parse_special)
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special else ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Control tokens are spelt out; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text. Empty for an id without a token: models have more rows
        than their vocabulary has tokens."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            spelt = self._backend.id_to_token(token_id) or ""
            known = self._rules.bytes_of(spelt, token_id in self._added_ids)
            self._bytes[token_id] = known
        return known

    def ids_with(self, part: bytes) -> tuple[int, ...]:
        """The tokens in whose bytes this part occurs. The first search takes a while."""
        found = self._ids_with.get(part)
        if found is None:
            found = tuple(i for i in range(self.vocab_size) if part in self.token_bytes(i))
            self._ids_with[part] = found
        return found

    def token_id(self, text: str) -> int | None:
        """The id of the token spelt so."""
        return self._id_in(self._backend, text)

    def is_special(self, token_id: int) -> bool:
        """A control token: it structures the text and is no part of it."""
        return token_id in self._special_ids

    def to_json(self) -> str:
        """The whole tokenizer as a tokenizer.json."""
        return str(self._backend.to_str())

    def twin(self) -> Callable[[str], list[int]]:
        """`encode` for a thread that must not wait for another's long text; the vocabulary is the
        same one in memory."""
        added = self._backend.get_added_tokens_decoder()
        twin = tokenizers.Tokenizer(self._backend.model)
        twin.normalizer = self._backend.normalizer
        twin.pre_tokenizer = self._backend.pre_tokenizer
        twin.add_tokens([added[token_id] for token_id in sorted(added)])
        twin.encode_special_tokens = True
        if set(twin.get_added_tokens_decoder()) != set(added):  # ids with gaps can't be had again
            return self.encode
        return lambda text: list(twin.encode(text, add_special_tokens=False).ids)

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def _encode_with_literals(self, text: str) -> list[int]:
        """Cut at the control tokens that are meant, and encode what lies between them as text."""
        ids: list[int] = []
        between: list[str] = []
        spelt = [token for token in self.control_tokens if token in text]
        control = re.compile("|".join(map(re.escape, sorted(spelt, key=len, reverse=True))) or "$.")
        position = 0
        for literal in _LITERAL.finditer(text):
            self._cut(text[position : literal.start()], control, between, ids)
            between.append(literal[1])
            position = literal.end()
        self._cut(text[position:], control, between, ids)
        self._flush(between, ids)
        return ids

    def _cut(self, text: str, control: re.Pattern[str], between: list[str], ids: list[int]) -> None:
        position = 0
        for token in control.finditer(text):
            between.append(text[position : token.start()])
            self._flush(between, ids)
            ids.append(self.control_tokens[token[0]])
            position = token.end()
        between.append(text[position:])

    def _flush(self, between: list[str], ids: list[int]) -> None:
        if any(between):
            ids.extend(self._encode("".join(between), parse_special=False))
        between.clear()

    @staticmethod
    def _id_in(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
        found = None if text is None else backend.token_to_id(text)
        return None if found is None else int(found)


def without_marks(text: str) -> str:
    """The text without the marks of literal spans, as it is shown to people."""
    return text.replace(LITERAL_OPEN, "").replace(LITERAL_CLOSE, "")


def load_tokenizer(
    files: Sequence[ModelFile],
    cache_dir: str | Path | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer that these files of one model describe; a tokenizer.json comes first.

    `cache_dir` is the model's own folder for derived files. `gguf_metadata` is the first GGUF's, of
    whoever has read it already. Raises TokenizerError if there is none, or it is of no supported
    kind.
    """
    by_name = {PurePosixPath(file.name).name: Path(file.path) for file in files}
    if "tokenizer.json" in by_name:
        return _from_hub_files(by_name)
    first_gguf = next(
        (path for name, path in sorted(by_name.items()) if _is_gguf(name, path)), None
    )
    if first_gguf is not None:
        metadata = gguf_metadata or read_header(first_gguf).metadata
        return from_gguf_metadata(metadata, Path(cache_dir) if cache_dir else None)
    names = ", ".join(sorted(by_name)) or "no files"
    raise TokenizerError(f"no tokenizer among the model's files: {names}")


def from_gguf_metadata(metadata: Mapping[str, Any], cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises TokenizerError."""
    backend = load_vocabulary(metadata, cache_dir)
    kind = metadata["tokenizer.ggml.model"]
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    ids = _gguf_role_ids(metadata, kind, len(tokens))
    special_tokens = {f"{role}_token": tokens[token_id] for role, token_id in ids.items()}
    ends = [ids.get("eos"), metadata.get("tokenizer.ggml.eot_token_id")]
    return Tokenizer(
        backend,
        special_tokens,
        _eos_ids(backend, ends),
        *_gguf_surroundings(metadata, kind, ids),
    )


# What llama.cpp takes where the metadata says nothing.
_GGUF_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"cls": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
_GGUF_KEYS = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # spelt so in the files


def _gguf_role_ids(metadata: Mapping[str, Any], kind: str, num_tokens: int) -> dict[str, int]:
    found = {}
    for role in _ROLES:
        key = f"tokenizer.ggml.{_GGUF_KEYS.get(role, role)}_token_id"
        token_id = metadata.get(key, _GGUF_DEFAULT_IDS.get(kind, {}).get(role))
        if isinstance(token_id, int) and 0 <= token_id < num_tokens:
            found[role] = token_id
    return found


def _gguf_surroundings(
    metadata: Mapping[str, Any], kind: str, ids: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    if kind == "bert":
        opening, closing = ids.get("cls", ids.get("bos")), ids.get("sep", ids.get("eos"))
    else:
        opening, closing = ids.get("bos"), ids.get("eos")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata, kind))
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", kind in ("bert", "t5"))
    prefix = [opening] if adds_bos and opening is not None else []
    suffix = [closing] if adds_eos and closing is not None else []
    return prefix, suffix


def _adds_bos(metadata: Mapping[str, Any], kind: str) -> bool:
    opens_bpe = metadata.get("tokenizer.ggml.pre") in ("llama3", "llama-bpe", "llama-v3", "tekken")
    return kind in ("llama", "bert") or (kind == "gpt2" and opens_bpe)


def _from_hub_files(by_name: Mapping[str, Path]) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(by_name["tokenizer.json"]))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
    config = _read_json(by_name, "tokenizer_config.json")
    backend.no_truncation()
    backend.no_padding()
    special_tokens = _hub_special_tokens(config, _read_json(by_name, "special_tokens_map.json"))
    model = _read_json(by_name, "config.json")
    generation = _read_json(by_name, "generation_config.json")
    ends = [
        backend.token_to_id(special_tokens.get("eos_token", "")),
        *_as_ids(model.get("eos_token_id")),
        *_as_ids((model.get("text_config") or {}).get("eos_token_id")),
        *_as_ids(generation.get("eos_token_id")),
    ]
    prefix, suffix = _hub_surroundings(backend)
    bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
    if bos_id is not None and isinstance(config.get("add_bos_token"), bool):
        rest = prefix[1:] if prefix[:1] == [bos_id] else prefix
        prefix = [bos_id, *rest] if config["add_bos_token"] else rest
    return Tokenizer(backend, special_tokens, _eos_ids(backend, ends), prefix, suffix)


def _hub_special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Each is spelt as a string, or as an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for role in _ROLES:
            value = source.get(f"{role}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(f"{role}_token", text)
    return found


def _hub_surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text, seen from what it does to one."""
    inner = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    return [], []


def _eos_ids(backend: tokenizers.Tokenizer, named: Iterable[int | None]) -> set[int]:
    ends = {token_id for token_id in named if token_id is not None}
    control = {
        token.content: token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    ends.update(token_id for text, token_id in control.items() if text in TURN_ENDS)
    if "<|return|>" in control:  # harmony: a turn has several messages, each of which ends so
        ends.discard(control.get("<|end|>", -1))
    return ends


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _read_json(by_name: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in by_name:
        return {}
    try:
        content = json.loads(by_name[name].read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{name} holds no JSON object")
    return content


def _is_gguf(name: str, path: Path) -> bool:
    if name.endswith(".gguf"):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _state_of(part: Any) -> Mapping[str, Any] | None:
    """A part of the backend as the tokenizer.json spells it."""
    state: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return state


def _size_of(backend: tokenizers.Tokenizer) -> int:
    """One more than the highest id: a vocabulary may have gaps."""
    added = backend.get_added_tokens_decoder()
    return max(int(backend.get_vocab_size()), max(added, default=-1) + 1)
