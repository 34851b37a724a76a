"""What every source of models has in common.

A source brings files into the store and says what they are; it writes no manifest. It raises
SourceUnavailable when it cannot be reached, and then another source may be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..download import Downloader, in_thread
from ..manifest import ManifestFile
from ..places import find_blob
from ..runnable import check_config, check_gguf_start
from ..settings import PullSettings
from ..store import ModelStore, hash_file
from ..transfer import RemoteFile
from ..web import proxy_shown


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One line of a pull. Bytes are counted for the file named by `digest`; `overall_` for all."""

    status: str
    digest: str | None = None  # "sha256:<64 hex>"
    total: int | None = None
    completed: int | None = None
    source: str | None = None  # who serves it, once that is known
    overall_total: int | None = None
    overall_completed: int | None = None


EARLY_CHECK_BYTES = 32 << 20  # a smaller file is looked at when it is here

OnProgress = Callable[[PullProgress], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a source has brought: files that are in the store, and settings that came with them."""

    files: tuple[ManifestFile, ...]
    source: str  # for people
    template: str | None = None
    go_template: str | None = None
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    license: str | None = None


class Source(Protocol):
    """One place that a model can come from."""

    @property
    def label(self) -> str:
        """For people: what it is and where."""
        ...

    @property
    def address(self) -> str:
        """Where requests go, for the choice of a proxy; "" for this machine."""
        ...

    async def fetch(self, work: Work) -> Fetched:
        """Bring the files. Raises a RegistryError; SourceUnavailable if another may serve."""
        ...


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A remote file and its place in the model."""

    remote: RemoteFile
    name: str
    role: str


def share_checked(
    store: ModelStore, path: Path, file: WantedFile, digest: str
) -> ManifestFile | None:
    """Take the file over without a copy, if it is what its name says. Blocking; hashes it."""
    try:
        before = path.stat()
        if hash_file(path) != digest:
            return None
        storage = store.share_blob(path, digest)
    except OSError:
        return None
    if storage == "blob":
        return ManifestFile(file.name, file.role, digest, before.st_size)
    external = str(path) if storage == "external" else None
    time_ns = before.st_mtime_ns
    return ManifestFile(file.name, file.role, digest, before.st_size, storage, external, time_ns)


class Work:
    """One pull's tools: the store, the downloads, the settings, and the way to report."""

    def __init__(
        self,
        store: ModelStore,
        downloader: Downloader,
        settings: PullSettings,
        on_progress: OnProgress,
        pin: Callable[[str], None],
    ) -> None:
        self.store = store
        self.downloader = downloader
        self.settings = settings
        self.pin = pin  # keeps a blob from being deleted while the pull lasts
        self._on_progress = on_progress
        self._label: str | None = None
        self._completed: dict[str, int] = {}  # bytes by file, never falling
        self._total = 0

    def serve_from(self, label: str, address: str = "") -> None:
        """From now on reports name this source, and the proxy on the way to its address."""
        proxy = proxy_shown(address) if address else None
        self._label = label if proxy is None else f"{label} (through the proxy {proxy})"

    def say(self, status: str) -> None:
        """Report a step that has no bytes."""
        self._on_progress(PullProgress(status, source=self._label))

    def plan(self, sizes: Mapping[str, int]) -> None:
        """These files, by any unique key, make the overall total."""
        self._completed = dict.fromkeys(sizes, 0)
        self._total = sum(sizes.values())

    def advance(self, key: str, digest: str | None, total: int, completed: int) -> None:
        """Report bytes of one planned file. What was reported before is never undercut."""
        completed = max(self._completed.get(key, 0), min(completed, total))
        self._completed[key] = completed
        short = digest[:12] if digest else key[:40]
        self._on_progress(
            PullProgress(
                f"pulling {short}",
                f"sha256:{digest}" if digest else None,
                total,
                completed,
                self._label,
                max(self._total, total),
                sum(self._completed.values()),
            )
        )

    async def fetch_files(
        self, wanted: Sequence[WantedFile], settings: PullSettings | None = None
    ) -> tuple[ManifestFile, ...]:
        """Download all of these, small ones first, so that a wrong model is known early."""
        settings = settings or self.settings
        self.plan({file.name: file.remote.size for file in wanted})
        fetched = await self._taken_over(wanted)
        remotes = [file.remote for file in wanted if file.name not in fetched]
        self.downloader.check_space(remotes, settings)
        for file in sorted(wanted, key=lambda file: file.remote.size):
            if file.name not in fetched:
                fetched[file.name] = await self._fetch_one(file, settings)
            if file.name == "config.json":
                check_config(self.store.path_of(fetched[file.name]), self._label or file.name)
        return tuple(fetched[file.name] for file in wanted)

    async def _taken_over(self, wanted: Sequence[WantedFile]) -> dict[str, ManifestFile]:
        """Those that another tool on this machine has: shared with it, not fetched."""
        taken = {}
        for file in wanted:
            digest = file.remote.sha256
            if digest is None or self.store.has_blob(digest):
                continue
            self.pin(digest)
            path = find_blob(digest, file.remote.size)
            if path is None:
                continue
            self.say(f"checking {path}")
            shared = await in_thread(partial(share_checked, self.store, path, file, digest))
            if shared is not None:
                taken[file.name] = shared
                self.say(f"{file.name} is shared with {path}")
                self.advance(file.name, digest, file.remote.size, file.remote.size)
        return taken

    async def _fetch_one(self, file: WantedFile, settings: PullSettings) -> ManifestFile:
        remote = file.remote
        is_verifying = False
        if remote.sha256 is not None:
            self.pin(remote.sha256)

        def on_bytes(completed: int, stage: str) -> None:
            nonlocal is_verifying
            if stage == "pulling":
                self.advance(file.name, remote.sha256, remote.size, completed)
            elif not is_verifying:
                is_verifying = True
                self.advance(file.name, remote.sha256, remote.size, remote.size)
                self.say("verifying sha256 digest")

        is_gguf = file.role == "weights" and file.name.lower().endswith(".gguf")
        check = check_gguf_start if is_gguf and remote.size > EARLY_CHECK_BYTES else None
        digest = await self.downloader.fetch(remote, on_bytes, settings, check)
        self.pin(digest)
        self.advance(file.name, digest, remote.size, remote.size)
        size = self.store.blob_path(digest).stat().st_size
        return ManifestFile(file.name, file.role, digest, size)
