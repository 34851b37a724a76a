"""ModelStore: the models folder, and the only writer to it.

    <root>/version                                       {"layout": 1}
    <root>/manifests/<host>/<namespace>/<model>/<tag>.json   one model each; names lower-cased
    <root>/blobs/sha256-<64 hex>                         content, never changed once it is there
    <root>/partial/                                      unfinished downloads; may be resumed
    <root>/temp/                                         files being made; meaningless after a crash
    <root>/locks/                                        between processes (locking.py)

A file becomes visible in one rename, after its bytes are on the disk: blobs first, the manifest
last. So a crash at any point leaves the old model or the new one, never half a model, and at worst
a blob that no manifest names, which `collect` finds. Removal goes the other way round.

`collect` deletes nothing while any manifest cannot be read: what that one needs is not known.

Owner: the daemon's event loop, or one thread at a time; calls are short, except `add_blob` and
`verify`, which hash whole files and belong into a thread. A folder has one daemon, which locks it;
should two processes write to it all the same, changes of manifests exclude each other, and one of
two downloads of a file waits for the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BadModelFile, DigestMismatch, ModelNotFound, StoreDamaged, Unsupported
from .linking import hard_link, reflink
from .locking import FileLock
from .manifest import Manifest, ManifestFile, is_digest
from .names import ModelName

log = logging.getLogger("llmd.registry.store")

LAYOUT = 1
GRACE_S = 3600.0  # a blob this young may belong to a pull that has not written its manifest yet
PARTIAL_AGE_S = 7 * 24 * 3600.0  # how long an unfinished download can be resumed
HASH_CHUNK_BYTES = 4 << 20

FileState = tuple[int, int, int]  # inode, size, mtime in ns: a rename makes another inode


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed, or would remove."""

    paths: tuple[Path, ...]
    size: int  # bytes on the disk


class ModelStore:
    """The models below one root folder."""

    def __init__(self, root: Path) -> None:
        """Make the folders. Raises Unsupported if a newer llmd has laid them out otherwise."""
        self.root = root
        # Blobs that someone is about to name in a manifest, and how many do so. Never removed.
        self._pins: Counter[str] = Counter()
        self._pins_lock = threading.Lock()  # held while a pin is set, and while a blob is removed
        self._read_before: dict[Path, tuple[FileState, Manifest]] = {}  # see `find`
        for folder in (self.manifests, self.blobs, self.partial, self.temp, self.locks):
            folder.mkdir(parents=True, exist_ok=True)
        self._check_layout()

    def __repr__(self) -> str:
        return f"<ModelStore {self.root}: {sum(1 for _ in self._manifest_paths())} models>"

    @property
    def manifests(self) -> Path:
        """The folder of manifests."""
        return self.root / "manifests"

    @property
    def blobs(self) -> Path:
        """The folder of contents."""
        return self.root / "blobs"

    @property
    def partial(self) -> Path:
        """The folder of unfinished downloads."""
        return self.root / "partial"

    @property
    def temp(self) -> Path:
        """The folder of files in the making."""
        return self.root / "temp"

    @property
    def locks(self) -> Path:
        """The folder of locks between processes."""
        return self.root / "locks"

    def _changing(self) -> AbstractContextManager[None]:
        """One process at a time changes manifests or removes blobs."""
        return FileLock(self.locks / "change").held()

    # ------------------------------------------------------------------ models

    def list(self) -> list[Manifest]:
        """All models, the last modified first. One that cannot be read is logged and left out."""
        manifests = []
        for path in self._manifest_paths():
            try:
                manifests.append(self._read(path))
            except StoreDamaged as error:
                log.warning("model left out", extra={"path": str(path), "reason": str(error)})
        return sorted(manifests, key=lambda manifest: manifest.modified, reverse=True)

    def damaged(self) -> tuple[str, ...]:
        """One sentence for each manifest that cannot be read; nothing is collected until then."""
        problems = []
        for path in self._manifest_paths():
            try:
                self._read(path)
            except StoreDamaged as error:
                problems.append(str(error))
        return tuple(problems)

    def get(self, name: ModelName) -> Manifest:
        """Raises ModelNotFound, or StoreDamaged if its manifest cannot be read."""
        manifest = self.find(name)
        if manifest is None:
            raise ModelNotFound(name.display)
        return manifest

    def find(self, name: ModelName) -> Manifest | None:
        """As `get`, but None if there is no such model. Raises StoreDamaged.

        Every request asks; so what was read is kept, for as long as the file stays the same one.
        """
        path = self._manifest_path(name)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._read_before.pop(path, None)
            return None
        except OSError as error:
            raise StoreDamaged(f"the manifest {path} cannot be read: {error}") from None
        if not stat.S_ISREG(found.st_mode):
            return None
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = self._read_before.get(path)
        if known is None or known[0] != state:
            known = self._read_before[path] = (state, self._read(path))
        return known[1]

    def has(self, name: ModelName) -> bool:
        """Whether there is a model of this name, readable or not."""
        return self._manifest_path(name).is_file()

    def put(self, manifest: Manifest) -> Manifest:
        """Make the model visible, or replace it. Its files must be there already.

        A name that exists keeps its spelling; what is returned has it. Blobs that only the
        replaced model used are removed. Raises BadModelFile if a file is missing.
        """
        with self._changing():
            for file in manifest.files:
                self.path_of(file)
            replaced = self._find_readable(manifest.name)
            if replaced is not None:
                manifest = manifest.renamed(replaced.name)
            path = self._manifest_path(manifest.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_atomically(path, manifest.to_json().encode())
            if replaced is not None:
                self._drop_blobs(replaced.files)
        return manifest

    def delete(self, name: ModelName) -> Manifest | None:
        """Remove the model and the blobs that no other model uses. External files stay.

        Returns what was removed; None if its manifest could not even be read, and then its blobs
        are left to the next collection. Raises ModelNotFound.
        """
        with self._changing():
            path = self._manifest_path(name)
            if not path.is_file():
                raise ModelNotFound(name.display)
            manifest = self._find_readable(name)
            path.unlink()
            _sync_folder(path.parent)
            for folder in list(path.parents)[:3]:
                with contextlib.suppress(OSError):  # not empty: another tag or model is in it
                    folder.rmdir()
            if manifest is not None:
                self._drop_blobs(manifest.files)
        return manifest

    def copy(self, source: ModelName, target: ModelName) -> Manifest:
        """Give the model a second name. No blob is copied. Raises ModelNotFound."""
        return self.put(self.get(source).renamed(target))

    # ------------------------------------------------------------------- files

    def path_of(self, file: ManifestFile) -> Path:
        """Where the file's bytes lie.

        Raises BadModelFile if they are gone, or were changed by someone else since.
        """
        external = file.storage == "external" and file.external_path
        path = Path(external) if external else self.blob_path(file.digest)
        try:
            found = path.stat()
        except OSError as error:
            raise BadModelFile(f"{file.name} is gone: {path} ({error.strerror})") from None
        if found.st_size != file.size:
            raise BadModelFile(
                f"{path} has {found.st_size} bytes, {file.size} were expected: it was changed or "
                f"cut short; pull or import the model again"
            )
        if file.mtime_ns is not None and found.st_mtime_ns != file.mtime_ns:
            raise BadModelFile(
                f"{path} was changed after it was taken in; run `llmd verify`, or import it again"
            )
        return path

    def problems_of(self, manifest: Manifest) -> tuple[str, ...]:
        """One sentence for each file that is gone or was changed; reads no content."""
        problems = []
        for file in manifest.files:
            try:
                self.path_of(file)
            except BadModelFile as error:
                problems.append(str(error))
        return tuple(problems)

    def blob_path(self, digest: str) -> Path:
        """Where a blob lies, or would. The digest is checked before it becomes a path."""
        assert is_digest(digest), f"{digest!r} is no sha256"
        return self.blobs / f"sha256-{digest}"

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is here."""
        return is_digest(digest) and self.blob_path(digest).is_file()

    def partial_path(self, digest: str) -> Path:
        """Where an unfinished download of this blob lies, or would."""
        assert is_digest(digest), f"{digest!r} is no sha256"
        return self.partial / f"sha256-{digest}"

    @contextmanager
    def temp_folder(self) -> Iterator[Path]:
        """A fresh folder on the store's own disk, removed at the end."""
        folder = self.temp / secrets.token_hex(8)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add_blob(self, path: Path, digest: str | None = None, *, is_verified: bool = False) -> str:
        """Move a finished file of the store's own disk among the blobs; returns its digest.

        Hashes it first, unless `is_verified`. Raises DigestMismatch, with the file deleted, if it
        is not what `digest` promises.
        """
        if not is_verified or digest is None:
            found = hash_file(path)
            if digest is not None and found != digest:
                path.unlink(missing_ok=True)
                raise DigestMismatch(digest, found, path.name)
            digest = found
        target = self.blob_path(digest)
        if target.exists() and target.stat().st_size == path.stat().st_size:
            path.unlink()  # not replaced: it may be a link whose time a manifest remembers
            return digest
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o444)
        path.replace(target)
        _sync_folder(self.blobs)
        return digest

    def add_bytes(self, content: bytes) -> str:
        """Put a small content among the blobs; returns its digest."""
        digest = hashlib.sha256(content).hexdigest()
        if not self.has_blob(digest):
            with self.temp_folder() as folder:
                path = folder / "content"
                path.write_bytes(content)
                self.add_blob(path, digest, is_verified=True)
        return digest

    @contextmanager
    def pinned(self) -> Iterator[Callable[[str], None]]:
        """Gives a function; the blobs it is told, here or yet to come, stay until the end."""
        held: set[str] = set()

        def pin(digest: str) -> None:
            with self._pins_lock:
                if digest not in held:
                    held.add(digest)
                    self._pins[digest] += 1

        try:
            yield pin
        finally:
            with self._pins_lock:
                self._pins.subtract(held)
                self._pins = +self._pins

    def share_blob(self, path: Path, digest: str) -> str:
        """Have a file of someone else's among the blobs, without a copy of its bytes.

        Returns the storage that came of it: "blob" for a reflink, which is ours alone, "link" for
        a hard link, "external" where neither is possible and nothing was done.
        """
        target = self.blob_path(digest)
        if target.exists():
            return "link" if target.samefile(path) else "blob"
        clone = self.temp / secrets.token_hex(8)
        if reflink(path, clone):
            clone.chmod(0o444)
            clone.replace(target)
            storage = "blob"
        elif hard_link(path, target):
            storage = "link"
        else:
            return "external"
        _sync_folder(self.blobs)
        return storage

    # -------------------------------------------------------------- housekeeping

    def collect(self, *, now: float | None = None, dry_run: bool = False) -> Collected:
        """Remove what no model needs: unnamed blobs, old partial downloads, left temp files.

        Raises StoreDamaged, having removed nothing, if any manifest cannot be read.
        """
        now = time.time() if now is None else now
        with self._changing():
            used = self._used_digests()
            doomed = [
                path
                for path in self.blobs.iterdir()
                if path.name.startswith("sha256-")
                and path.name.removeprefix("sha256-") not in used
                and _age(path, now) > GRACE_S
            ]
            doomed += [path for path in self.partial.iterdir() if _age(path, now) > PARTIAL_AGE_S]
            doomed += [path for path in self.temp.iterdir() if _age(path, now) > GRACE_S]
            sizes = {path: _size_on_disk(path) for path in doomed}
            if not dry_run:
                doomed = [path for path in doomed if self._remove(path)]
            return Collected(tuple(doomed), sum(sizes[path] for path in doomed))

    def _remove(self, path: Path) -> bool:
        """Unless it is a blob that someone has pinned meanwhile, or the system forbids it."""
        with self._pins_lock:
            if path.name.removeprefix("sha256-") in self._pins:
                return False
            try:
                _remove(path)
            except OSError as error:
                log.warning("not removed: %s", error)
                return False
            return True

    def verify(
        self,
        manifest: Manifest,
        on_progress: Callable[[ManifestFile, int], None] | None = None,
        *,
        remove_damaged: bool = False,
    ) -> tuple[str, ...]:
        """Hash every file again; returns one sentence for each that is not as it should be.

        Blocking. `on_progress` is told the file and its bytes hashed so far. A damaged blob may be
        removed, never a file of someone else's; a pull then brings it anew.
        """
        problems = []
        for file in manifest.files:

            def report(done: int, file: ManifestFile = file) -> None:
                if on_progress is not None:
                    on_progress(file, done)

            try:
                path = self._plain_path_of(file)
                found = hash_file(path, report)
            except OSError as error:
                problems.append(f"{file.name} cannot be read: {error}")
                continue
            if found != file.digest:
                problems.append(f"{file.name} is damaged: want {file.digest}, got {found}")
                if remove_damaged and file.storage != "external":
                    self.blob_path(file.digest).unlink(missing_ok=True)
        return tuple(problems)

    def check(self) -> None:
        """Assert the invariants: every manifest readable, under its own name, its files in place,
        and every blob named as a digest. Reads no content. For tests."""
        for path in self._manifest_paths():
            manifest = self._read(path)
            assert path == self._manifest_path(manifest.name), f"{path} holds {manifest.name}"
            for file in manifest.files:
                self.path_of(file)
        for path in self.blobs.iterdir():
            prefix, _, digest = path.name.partition("-")
            assert prefix == "sha256" and is_digest(digest), f"{path} is no blob"

    # ----------------------------------------------------------------- internals

    def _check_layout(self) -> None:
        path = self.root / "version"
        if not path.exists():
            self._write_atomically(path, json.dumps({"layout": LAYOUT}).encode())
            return
        try:
            layout = json.loads(path.read_bytes())["layout"]
        except (ValueError, KeyError, TypeError):
            raise StoreDamaged(
                f"{path} cannot be read; it should hold the layout's number"
            ) from None
        if layout != LAYOUT:
            raise Unsupported(
                f"the models folder {self.root} has layout {layout}, this llmd knows {LAYOUT}"
            )

    def _manifest_path(self, name: ModelName) -> Path:
        host, namespace, model, tag = name.path_parts
        return self.manifests / host / namespace / model / f"{tag}.json"

    def _manifest_paths(self) -> Iterator[Path]:
        return self.manifests.glob("*/*/*/*.json")

    def _read(self, path: Path) -> Manifest:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StoreDamaged(f"the manifest {path} cannot be read: {error}") from None
        return Manifest.from_json(text, str(path))

    def _find_readable(self, name: ModelName) -> Manifest | None:
        """A damaged manifest may be replaced and removed: pulling again is the way to mend it."""
        try:
            return self.find(name)
        except StoreDamaged as error:
            log.warning("damaged manifest replaced or removed", extra={"reason": str(error)})
            return None

    def _used_digests(self) -> set[str]:
        with self._pins_lock:
            pinned = set(self._pins)
        return pinned | self._named_digests()

    def _named_digests(self) -> set[str]:
        manifests = [self._read(path) for path in self._manifest_paths()]
        return {file.digest for manifest in manifests for file in manifest.files}

    def drop(self, files: Iterable[ManifestFile]) -> None:
        """Remove the blobs of files that turned out to be of no use, unless a model names them.

        A pin does not keep them: the caller's own may still be there.
        """
        with self._changing():
            self._drop_blobs(files, keeps_pinned=False)

    def _drop_blobs(self, files: Iterable[ManifestFile], keeps_pinned: bool = True) -> None:
        try:
            used = self._named_digests()
        except StoreDamaged as error:
            log.warning("blobs kept", extra={"reason": str(error)})
            return
        with self._pins_lock:
            for file in files:
                most = 0 if keeps_pinned else 1
                if file.digest not in used and self._pins[file.digest] <= most:
                    self.blob_path(file.digest).unlink(missing_ok=True)

    def _plain_path_of(self, file: ManifestFile) -> Path:
        return Path(file.external_path) if file.external_path else self.blob_path(file.digest)

    def _write_atomically(self, path: Path, content: bytes) -> None:
        temporary = self.temp / secrets.token_hex(8)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def hash_file(path: Path, on_progress: Callable[[int], None] | None = None) -> str:
    """The file's sha256 in hex. Blocking; `on_progress` is told the bytes hashed so far."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_progress is not None:
                on_progress(done)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename in it survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size_on_disk(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size_on_disk(inner) for inner in path.iterdir())
    found = path.lstat()
    return getattr(found, "st_blocks", -(-found.st_size // 512)) * 512


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
