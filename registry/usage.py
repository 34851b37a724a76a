"""What the models folder costs on the disk, model by model.

    own         freed when the model is removed
    shared      blobs that another model here uses too
    elsewhere   hard links to other tools' files, and files that are only referred to

Pure arithmetic over the manifests, and one look at each file's size.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .errors import StoreDamaged
from .manifest import Manifest
from .store import ModelStore


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """One model's bytes, by who else holds them."""

    manifest: Manifest
    own: int
    shared: int
    elsewhere: int
    missing: tuple[str, ...]  # sentences about files that are gone or were changed


@dataclass(frozen=True, slots=True)
class Usage:
    """The whole folder, in bytes."""

    models: tuple[ModelUsage, ...]
    blobs: int  # all of them, each once, without what is someone else's too
    partial: int  # unfinished downloads
    unused: int  # what `collect` would remove now
    free: int  # on the folder's disk
    damaged: tuple[str, ...]  # sentences about manifests that cannot be read


def usage_of(store: ModelStore) -> Usage:
    """Blocking, and brief. Manifests that cannot be read are left out."""
    manifests = store.list()
    users = Counter(
        digest
        for manifest in manifests
        for digest in {file.digest for file in manifest.files if file.storage == "blob"}
    )
    try:
        unused = store.collect(dry_run=True).size
    except StoreDamaged:
        unused = 0  # nothing is collected before that is mended
    return Usage(
        models=tuple(_model(store, manifest, users) for manifest in manifests),
        blobs=sum(_size(path) for path in store.blobs.iterdir() if _links(path) == 1),
        partial=sum(_size(path) for path in store.partial.iterdir()),
        unused=unused,
        free=shutil.disk_usage(store.root).free,
        damaged=store.damaged(),
    )


def _model(store: ModelStore, manifest: Manifest, users: Counter[str]) -> ModelUsage:
    sizes = Counter({"own": 0, "shared": 0, "elsewhere": 0})
    for digest, file in {file.digest: file for file in manifest.files}.items():
        if file.storage == "external" or _links(store.blob_path(digest)) > 1:
            sizes["elsewhere"] += file.size
        else:
            sizes["shared" if users[digest] > 1 else "own"] += file.size
    return ModelUsage(
        manifest, sizes["own"], sizes["shared"], sizes["elsewhere"], store.problems_of(manifest)
    )


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return getattr(found, "st_blocks", -(-found.st_size // 512)) * 512


def _links(path: Path) -> int:
    try:
        return path.stat().st_nlink
    except FileNotFoundError:
        return 1
