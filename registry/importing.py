"""Models that other tools keep on this machine: found, and taken over without copying.

    discover(path) ──▶ [Found, ...]        reads names and small files only
    take_over(store, found) ──▶ Manifest   links the files (sources/local.py), reads their headers

Known layouts, told by what the folder holds:

    an Ollama store      manifests/<host>/<ns>/<model>/<tag> and blobs/sha256-<hex>
    a Hugging Face cache models--<owner>--<repo>/{refs,snapshots,blobs}; links of links
    an LM Studio tree    <publisher>/<repo>/<file>.gguf
    a model folder       *.safetensors with config.json, or *.gguf

Nothing is ever written to or deleted from these places. A model that cannot be run is found too,
with its `problem`, so that people see why it is missing.

Sources: the layouts as written down in issue 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .build import inspect_fetched, make_manifest
from .details import role_of
from .errors import BadModelFile, ModelNotFound, NameInvalid, RegistryError, Unsupported
from .manifest import Manifest
from .names import HUB_HOST, ModelName
from .ollama_format import (
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    TEXT_KINDS,
    Layer,
    Texts,
    file_names,
    parse_manifest,
    parse_texts,
)
from .sources.base import Fetched
from .sources.hub import RepoFile, choose_files, gguf_groups
from .sources.local import OnHashed, take_file
from .store import ModelStore

_HF_REPO = re.compile(r"models--([^/]+?)--(.+)\Z")
_QUANT = re.compile(r"[-._]((?:IQ|Q|TQ)\d\w*|BF16|F16|F32|MXFP4)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """One model of another tool. `files` is name -> (role, where it lies)."""

    name: ModelName
    kind: str  # "Ollama store", "Hugging Face cache", "LM Studio", "folder"
    files: Mapping[str, tuple[str, Path]]
    texts: Texts | None = None
    problem: str = ""  # why it cannot be taken over; then `files` is empty

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(path.stat().st_size for _, path in self.files.values())


def discover(path: Path, *, may_be_empty: bool = False) -> list[Found]:
    """The models below this path. Raises ModelNotFound if there is no such path or none in it,
    BadModelFile if it may not be read."""
    try:
        if not path.exists():
            raise ModelNotFound(str(path), f"there is no file or folder {path}")
        found = list(_discover(path))
    except OSError as error:
        if may_be_empty:
            return []
        raise BadModelFile(f"{error.filename or path} cannot be read: {error.strerror}") from None
    if not found and not may_be_empty:
        raise ModelNotFound(str(path), f"no model of a known kind is in {path}")
    return sorted(found, key=lambda model: model.name.key)


def take_over(
    store: ModelStore,
    found: Found,
    name: ModelName | None = None,
    on_hashed: OnHashed | None = None,
) -> Manifest:
    """Link one found model into the store. Blocking; hashes what is not named by its hash."""
    if found.problem:
        raise Unsupported(f"{found.name.display} cannot be imported: {found.problem}")
    files = tuple(
        take_file(store, path, file_name, role, on_hashed)
        for file_name, (role, path) in found.files.items()
    )
    texts = found.texts or Texts(None, None, {}, (), None)
    fetched = Fetched(
        files,
        f"{found.kind} on this machine",
        go_template=texts.go_template,
        system=texts.system,
        params=texts.params,
        messages=texts.messages,
        license=texts.license,
    )
    return store.put(make_manifest(name or found.name, fetched, inspect_fetched(store, fetched)))


def _discover(path: Path) -> Iterator[Found]:
    if path.is_file():
        yield Found(_name("", path.stem, ""), "folder", {path.name: ("weights", path)})
    elif (path / "manifests").is_dir() and (path / "blobs").is_dir():
        yield from _ollama_models(path)
    elif any(path.glob("models--*--*/snapshots")):
        yield from _hub_models(path)
    elif any(path.glob("hub/models--*--*/snapshots")):
        yield from _hub_models(path / "hub")
    elif _HF_REPO.match(path.name) and (path / "snapshots").is_dir():
        yield from _hub_repo(path)
    elif _own_files(path):
        yield from _folder_models(path, "", path.name, "folder")
    else:
        for repo in sorted(path.glob("*/*")):
            if repo.is_dir() and _own_files(repo):
                yield from _folder_models(repo, repo.parent.name, repo.name, "LM Studio")


# ------------------------------------------------------------------ Ollama


def _ollama_models(root: Path) -> Iterator[Found]:
    for path in sorted((root / "manifests").glob("*/*/*/*")):
        host, namespace, model, tag = path.relative_to(root / "manifests").parts
        if path.name.startswith(".") or not path.is_file():
            continue
        try:
            name = ModelName.parse(f"{host}/{namespace}/{model}:{tag}")
        except NameInvalid:
            continue  # not one of its files
        try:
            yield _ollama_model(root, path, name)
        except (RegistryError, OSError) as error:
            yield Found(name, "Ollama store", {}, problem=str(error))


def _ollama_model(root: Path, path: Path, name: ModelName) -> Found:
    content = _read_limited(path, MAX_MANIFEST_BYTES)
    layers = parse_manifest(content, name.display)
    files = {
        file_name: (role, _ollama_blob(root, layer))
        for layer, role, file_name in file_names(layers)
    }
    texts = [
        (layer.kind, _read_limited(_ollama_blob(root, layer), MAX_TEXT_BYTES))
        for layer in layers
        if layer.kind in TEXT_KINDS
    ]
    return Found(name, "Ollama store", files, parse_texts(texts, name.display))


def _ollama_blob(root: Path, layer: Layer) -> Path:
    """Where the layer lies; its size is checked, its hash only by `verify`."""
    for name in (f"sha256-{layer.digest}", f"sha256:{layer.digest}"):
        path = root / "blobs" / name
        if path.is_file():
            if path.stat().st_size != layer.size:
                raise BadModelFile(f"its {layer.kind} {path} has not {layer.size} bytes")
            return path
    raise BadModelFile(f"its {layer.kind} is missing: blob {layer.digest[:12]}")


def _read_limited(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise BadModelFile(f"{path} is larger than {limit} bytes")
    return content


# ------------------------------------------------------------------ Hugging Face


def _hub_models(cache: Path) -> Iterator[Found]:
    for repo in sorted(cache.glob("models--*--*")):
        if (repo / "snapshots").is_dir():
            yield from _hub_repo(repo)


def _hub_repo(repo: Path) -> Iterator[Found]:
    match = _HF_REPO.match(repo.name)
    snapshot = _newest_snapshot(repo)
    if match is None or snapshot is None:
        return
    owner, model = match[1], match[2]
    yield from _folder_models(snapshot, owner, model, "Hugging Face cache", HUB_HOST)


def _newest_snapshot(repo: Path) -> Path | None:
    """What `main` points to; else the newest of all."""
    reference = repo / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{40}", commit) and (repo / "snapshots" / commit).is_dir():
            return repo / "snapshots" / commit
    snapshots = [path for path in (repo / "snapshots").iterdir() if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


# ------------------------------------------------------------------ folders


def _own_files(folder: Path) -> dict[str, Path]:
    """The model files of this folder by name; links are followed, also links of links."""
    candidates = sorted(folder.glob("*")) + sorted(folder.glob("*/*.json"))
    found = {path.relative_to(folder).as_posix(): path.resolve() for path in candidates}
    model = {
        name: path for name, path in found.items() if role_of(name) is not None and path.is_file()
    }
    has_weights = any(role_of(name) == "weights" for name in model)
    return model if has_weights else {}


def _folder_models(
    folder: Path, owner: str, model: str, kind: str, host: str = ""
) -> Iterator[Found]:
    files = _own_files(folder)
    listed = [RepoFile(name, path.stat().st_size, None, None) for name, path in files.items()]
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        yield _chosen(files, choose_files(model, listed), _name(owner, model, "", host), kind)
        return
    groups = gguf_groups(listed)
    for name, group in groups.items():
        stem = name.removesuffix(".gguf")
        quant = _QUANT.search(stem)
        is_alone = len(groups) == 1 and not host
        tag = "" if is_alone else (quant[1] if quant else stem)
        yield _chosen(files, group, _name(owner, model, tag, host), kind)


def _chosen(files: Mapping[str, Path], group: list[RepoFile], name: ModelName, kind: str) -> Found:
    placed = {file.path: (role_of(file.path) or "other", files[file.path]) for file in group}
    return Found(name, kind, placed)


def _name(owner: str, model: str, tag: str, host: str = "") -> ModelName:
    """A name from folder names, with what a name cannot have replaced."""

    def plain(text: str, also: str = "") -> str:
        return re.sub(rf"[^A-Za-z0-9_{also}-]+", "-", text).strip("-.")[:80] or "model"

    path = plain(model.removesuffix(".gguf"), ".")
    if owner:
        path = f"{plain(owner, '.' if host else '')}/{path}"
    if host:
        path = f"{host}/{path}"
    return ModelName.parse(f"{path}:{plain(tag, '.')}" if tag else path)
