"""Models that are on this machine already: a GGUF file, a safetensors folder. Never copied.

A file on the store's disk shares its bytes with a blob (a reflink where the file system can, else a
hard link), so that it stays when its owner deletes it; on another disk it is referred to by path.
Unless it is a reflink its size and time are remembered, and a later change is noticed
(`ModelStore.path_of`).

Files below a folder called `blobs` that are named by their sha256, as other model tools keep them,
are not hashed again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from ..details import PICKLES, role_of
from ..download import in_thread
from ..errors import BadModelFile, ModelNotFound, Unsupported
from ..formats import gguf
from ..manifest import ManifestFile
from ..store import ModelStore, hash_file
from .base import Fetched, Work

OnHashed = Callable[[str, int, int], None]  # file name, its bytes, bytes hashed so far
TOLD_BYTES = 64 << 20  # hashed between two lines of progress
_NAMED_BY_DIGEST = re.compile(r"(?:sha256[-:])?([0-9a-f]{64})\Z")


class LocalSource:
    """A path on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def label(self) -> str:
        """For people."""
        return f"local {'folder' if self.path.is_dir() else 'file'} {self.path}"

    @property
    def address(self) -> str:
        """See Source."""
        return ""

    async def fetch(self, work: Work) -> Fetched:
        """See Source."""
        work.say(f"hashing {self.path.name}")
        loop, told = asyncio.get_running_loop(), 0

        def on_hashed(name: str, total: int, done: int) -> None:
            nonlocal told
            if done - told >= TOLD_BYTES or done < told:
                told = done
                loop.call_soon_threadsafe(work.advance, name, None, total, done)

        return await in_thread(lambda: take_local(work.store, self.path, on_hashed))


def take_local(store: ModelStore, path: Path, on_hashed: OnHashed | None = None) -> Fetched:
    """Link or refer to a model's files. Blocking; hashes them.

    Raises ModelNotFound, Unsupported or BadModelFile, with the path named.
    """
    try:
        if not path.exists():
            raise ModelNotFound(str(path), f"there is no file or folder {path}")
        named = {path.name: path} if path.is_file() else _folder_files(path)
    except OSError as error:
        raise BadModelFile(f"{error.filename or path} cannot be read: {error.strerror}") from None
    taken = tuple(
        take_file(store, file, name, _role(name, file), on_hashed) for name, file in named.items()
    )
    return Fetched(taken, f"local {path}")


def take_file(
    store: ModelStore, path: Path, name: str, role: str, on_hashed: OnHashed | None = None
) -> ManifestFile:
    """Link or refer to one file."""
    real = path.resolve()
    try:
        before = real.stat()
        digest = _digest_by_name(real) or hash_file(
            real, lambda done: on_hashed(name, before.st_size, done) if on_hashed else None
        )
        after = real.stat()
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BadModelFile(f"{path} changes while it is read; try again when it is complete")
    storage = store.share_blob(real, digest)
    if storage == "blob":
        return ManifestFile(name, role, digest, after.st_size)
    external = str(real) if storage == "external" else None
    return ManifestFile(name, role, digest, after.st_size, storage, external, after.st_mtime_ns)


def _folder_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder by name; one GGUF, or a safetensors model."""
    found = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.iterdir()) + sorted(folder.glob("*/*"))
        if file.is_file()
    }
    model = {name: file for name, file in found.items() if role_of(name) is not None}
    ggufs = [name for name in model if name.endswith(".gguf")]
    if any(name.endswith(".safetensors") and "/" not in name for name in model):
        return {name: file for name, file in model.items() if name not in ggufs}
    if ggufs:
        return {name: model[name] for name in _one_gguf(folder, ggufs)}
    if any(name.endswith(PICKLES) for name in found):
        raise Unsupported(
            f"{folder} has its weights only as pickles, which run code when loaded; llmd takes "
            f"safetensors and GGUF"
        )
    raise Unsupported(f"{folder} holds no model: neither *.safetensors nor *.gguf is in it")


def _one_gguf(folder: Path, names: list[str]) -> list[str]:
    weights = [name for name in names if role_of(name) == "weights"]
    stems = {re.sub(r"-\d{5}-of-\d{5}\.gguf\Z", "", name) for name in weights}
    if len(stems) > 1:
        raise Unsupported(f"{folder} holds several GGUF models; name one: {', '.join(weights[:8])}")
    return names


def _role(name: str, path: Path) -> str:
    role = role_of(name)
    if role is not None:
        return role
    try:
        if gguf.is_gguf(path):
            return "weights"
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None
    raise Unsupported(f"{path} is no GGUF file; a safetensors model is given by its folder")


def _digest_by_name(path: Path) -> str | None:
    match = _NAMED_BY_DIGEST.match(path.name)
    return match[1] if match and path.parent.name == "blobs" else None
