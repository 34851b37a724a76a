"""Making a model out of others: new settings over old files, or files that were uploaded.

    from      an existing model: its files are shared, its settings inherited and replaced
    files     uploaded blobs by file name: a GGUF, or a safetensors folder

Blocking, and brief: nothing is copied. The result is written in one step, so that a wrong request
changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .build import inspect_fetched, make_manifest
from .details import read_json_object, role_of
from .details import with_template as capabilities_with
from .download import ensure_space
from .errors import (
    BadModelFile,
    BadRequest,
    DigestMismatch,
    ModelNotFound,
    Unsupported,
    told_plainly,
)
from .formats import gguf
from .formats.errors import FormatError
from .formats.quantization import method_of
from .go_template import to_jinja
from .manifest import Manifest, ManifestFile, is_digest, is_safe_file_name
from .modelfile import checked_parameter
from .names import ModelName
from .pull import name_from_path
from .quantize import check_source, checked_level, follow, quantize, size_at
from .quantize_folder import PLAIN, parts_at, settings_at, size_of
from .sources.base import Fetched
from .sources.local import take_local
from .store import ModelStore


class OnStatus(Protocol):
    """Is told each step; of a long one the bytes done and their sum too."""

    def __call__(self, status: str, completed: int = 0, total: int = 0) -> None: ...


def _ignore(status: str, completed: int = 0, total: int = 0) -> None:
    """For callers who do not want to know."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What to make. None leaves what the parent has."""

    name: ModelName
    base: str | None = None  # a model's name, or an absolute path on this machine
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> sha256:<hex>
    adapters: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None  # Jinja or Go syntax
    system: str | None = None
    licenses: Sequence[str] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] | None = None
    quantize: str | None = None


def missing_parent(store: ModelStore, request: CreateRequest) -> ModelName | None:
    """The model that must be pulled before `create` can work; None if nothing is missing."""
    if request.base is None or Path(request.base).is_absolute():
        return None
    name = ModelName.parse(request.base)
    return None if store.find(name) is not None else name


def create(store: ModelStore, request: CreateRequest, on_status: OnStatus = _ignore) -> Manifest:
    """Make the model and put it into the store, replacing one of that name. Blocking.

    Raises BadRequest, ModelNotFound, Unsupported or BadModelFile; the store is then unchanged.
    """
    with told_plainly(store.root):
        return _create(store, request, on_status)


def _create(store: ModelStore, request: CreateRequest, on_status: OnStatus) -> Manifest:
    level = checked_level(request.quantize) if request.quantize else None
    settings = {name: checked_parameter(name, value) for name, value in request.params.items()}
    base = _start(store, request, on_status)
    if level is not None:
        base = quantized(store, base, level, on_status)
    for file in base.files:
        on_status(f"using existing layer sha256:{file.digest}")
    manifest = replace(
        base,
        name=request.name,
        modified=datetime.now(UTC),
        system=request.system if request.system is not None else base.system,
        params={**base.params, **settings},
        messages=request.messages if request.messages is not None else base.messages,
        license="\n\n".join(filter(None, [base.license, *request.licenses])) or None,
    )
    if request.adapters:
        manifest = with_adapter(store, manifest, request.adapters)
    if request.template is not None:
        manifest = with_template(manifest, request.template)
    on_status("writing manifest")
    manifest = store.put(manifest)
    on_status("success")
    return manifest


def quantized(store: ModelStore, base: Manifest, level: str, on_status: OnStatus) -> Manifest:
    """The model with its weights at this level. Blocking, for minutes.

    Raises Unsupported if they are of no full precision, NotEnoughSpace.
    """
    if base.format == "safetensors":
        return quantized_folder(store, base, level, on_status)
    weights = base.files_of("weights")
    if len(weights) != 1:
        raise Unsupported(
            f"a GGUF model can be quantized from one file; {base.name.display} has {len(weights)}"
        )
    source = store.path_of(weights[0])
    header = _gguf_header(source, weights[0].name)
    check_source(header, weights[0].name)
    ensure_space(store.root, size_at(header, level), 0)
    status = f"quantizing {base.quantization} model to {level}"
    on_status(status)
    with store.temp_folder() as folder:
        target = folder / "model.gguf"
        quantize(source, target, level, partial(on_status, status))
        size = target.stat().st_size
        on_status("verifying conversion")
        digest = store.add_blob(target)
    made = ManifestFile(f"model-{level}.gguf", "weights", digest, size)
    files = (made, *(file for file in base.files if file.role != "weights"))
    details = inspect_fetched(store, Fetched(files, base.source))
    return replace(
        base,
        files=files,
        quantization=details.quantization,
        parameter_count=details.parameter_count,
        source=f"{base.source}, quantized here",
    )


def quantized_folder(
    store: ModelStore, base: Manifest, level: str, on_status: OnStatus
) -> Manifest:
    """As `quantized`, of a safetensors model: one file of weights, and a config.json for it."""
    shards = [store.path_of(file) for file in base.files_of("weights")]
    config_path = store.path_of(next(file for file in base.files if file.name == "config.json"))
    config = read_json_object(config_path, "config.json")
    if method_of(config):
        raise Unsupported(f"{base.name.display} is quantized already, by {method_of(config)}")
    if "embedding" in base.capabilities and level not in PLAIN:
        raise Unsupported("an embedding model is not quantized here; F16 and BF16 are possible")
    parts = parts_at(shards, level)
    ensure_space(store.root, size_of(parts), 0)
    status = f"quantizing {base.quantization} model to {level}"
    on_status(status)
    with store.temp_folder() as folder:
        target = folder / "model.safetensors"
        arguments = [str(target), level, *map(str, shards)]
        follow("quantize_folder", arguments, target, partial(on_status, status))
        size = target.stat().st_size
        on_status("verifying conversion")
        weights = store.add_blob(target)
    text = json.dumps(settings_at(config, parts, level), indent=2).encode()
    made = (
        ManifestFile("model.safetensors", "weights", weights, size),
        ManifestFile("config.json", "config", store.add_bytes(text), len(text)),
    )
    replaced = ("weights", "shard_index")
    kept = (f for f in base.files if f.role not in replaced and f.name != "config.json")
    files = (*made, *kept)
    details = inspect_fetched(store, Fetched(files, base.source))
    return replace(
        base,
        files=files,
        quantization=details.quantization,
        source=f"{base.source}, quantized here",
    )


def with_adapter(store: ModelStore, manifest: Manifest, adapters: Mapping[str, str]) -> Manifest:
    """The model with this LoRA adapter: one GGUF, or a safetensors file with its configuration.

    Raises BadRequest, ModelNotFound or BadModelFile.
    """
    files = [_adapter_file(store, name, digest) for name, digest in adapters.items()]
    weights = [file for file in files if file.name.endswith((".gguf", ".safetensors"))]
    if len(weights) != 1:
        raise BadRequest("only one adapter is currently supported")
    if weights[0].name.endswith(".gguf"):
        header = _gguf_header(store.blob_path(weights[0].digest), weights[0].name)
        if header.metadata.get("general.type") != "adapter":
            raise BadRequest(f"{weights[0].base_name} is no adapter; a model stands after FROM")
        if header.architecture and manifest.format == "gguf":
            _check_same_kind(header.architecture, manifest)
    elif not any(file.base_name == "adapter_config.json" for file in files):
        raise BadRequest("a safetensors adapter needs its adapter_config.json beside it")
    kept = tuple(file for file in manifest.files if file.role != "adapter")
    return replace(manifest, files=(*kept, *files))


def _check_same_kind(architecture: str, manifest: Manifest) -> None:
    if architecture != manifest.architecture:
        raise BadRequest(
            f"the adapter is for models of the architecture {architecture}, "
            f"{manifest.name.display} is {manifest.architecture}"
        )


def _gguf_header(path: Path, name: str) -> gguf.GGUFHeader:
    try:
        return gguf.read_header(path, name, max_items=0)
    except FormatError as error:
        raise BadModelFile(str(error)) from None


def _adapter_file(store: ModelStore, name: str, digest: str) -> ManifestFile:
    path = _uploaded_path(store, name, digest)
    base = name.rpartition("/")[2]
    if not base.endswith((".gguf", ".safetensors", ".json")):
        if not gguf.is_gguf(path):
            raise BadRequest(f"unknown type: {name} is no adapter, which is GGUF or safetensors")
        base += ".gguf"
    return ManifestFile(f"adapter/{base}", "adapter", checked_digest(digest), path.stat().st_size)


def with_template(manifest: Manifest, text: str) -> Manifest:
    """The model with this prompt template, whichever of the two languages it is written in.

    Raises BadRequest("template error: ...") or Unsupported for Go text without a translation.
    """
    is_jinja = "{%" in text or "{#" in text
    jinja = text if is_jinja else to_jinja(text)
    return replace(
        manifest,
        template=jinja,
        go_template=None if is_jinja else text,
        capabilities=capabilities_with(manifest.capabilities, jinja),
    )


def _start(store: ModelStore, request: CreateRequest, on_status: OnStatus) -> Manifest:
    """The model before the request's own settings are laid over it."""
    if request.files:
        files = tuple(_uploaded(store, name, digest) for name, digest in request.files.items())
        on_status("parsing GGUF" if len(files) == 1 else "reading model files")
        fetched = Fetched(files, "created here")
        return make_manifest(request.name, fetched, inspect_fetched(store, fetched))
    if request.base is None:
        raise BadRequest("neither 'from' or 'files' was specified")
    path = Path(request.base)
    if path.is_absolute():
        on_status(f"reading {path.name}")
        fetched = take_local(store, path)
        name = name_from_path(path)
        return make_manifest(name, fetched, inspect_fetched(store, fetched))
    parent = store.get(ModelName.parse(request.base))
    return replace(parent, parent=parent.name.display)


def _uploaded(store: ModelStore, name: str, digest: str) -> ManifestFile:
    path = _uploaded_path(store, name, digest)
    role = role_of(name)
    if role is None:
        try:
            is_model = gguf.is_gguf(path)
        except OSError as error:
            raise BadModelFile(f"{name} cannot be read: {error.strerror}") from None
        if not is_model:
            raise BadRequest(f"unknown type: {name} is neither GGUF nor a file of a model folder")
        role = "weights"
    return ManifestFile(name, role, checked_digest(digest), path.stat().st_size)


def _uploaded_path(store: ModelStore, name: str, digest: str) -> Path:
    """Where the uploaded file lies. Its name and digest come from the client."""
    if not is_safe_file_name(name):
        raise BadRequest("file path must be relative")
    plain = checked_digest(digest)
    if not store.has_blob(plain):
        raise ModelNotFound(name, f"blob sha256:{plain} of {name} was not uploaded")
    return store.blob_path(plain)


def checked_digest(text: str) -> str:
    """The 64 hex digits of "sha256:<hex>" or "sha256-<hex>". Raises BadRequest."""
    plain = text.removeprefix("sha256:").removeprefix("sha256-").lower()
    if not is_digest(plain) or plain == text:
        raise BadRequest("invalid digest format")
    return plain


class BlobUpload:
    """One uploaded blob: written in pieces, hashed as they come, moved into the store at the end.

        with BlobUpload(store, "sha256:...") as upload:
            upload.write(piece)
            upload.finish()

    Leaving the block without `finish` deletes what was written.
    """

    def __init__(self, store: ModelStore, digest: str) -> None:
        """Raises BadRequest if the digest is none."""
        self.digest = checked_digest(digest)
        self._store = store
        self._hash = hashlib.sha256()
        self._path = store.temp / secrets.token_hex(8)
        self._file: BinaryIO | None = None

    def __enter__(self) -> BlobUpload:
        with told_plainly(self._store.root):
            self._file = self._path.open("wb")
        return self

    def __exit__(self, *args: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is thrown away
                self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """Add a piece. Blocking, as disks are."""
        assert self._file is not None, "used outside its block"
        self._hash.update(piece)
        with told_plainly(self._store.root):
            self._file.write(piece)

    def finish(self) -> str:
        """Put the blob in its place; returns its digest. Raises DigestMismatch."""
        assert self._file is not None, "used outside its block"
        found = self._hash.hexdigest()
        if found != self.digest:
            raise DigestMismatch(self.digest, found, "the uploaded blob")
        with told_plainly(self._store.root):
            self._file.flush()
            return self._store.add_blob(self._path, found, is_verified=True)
