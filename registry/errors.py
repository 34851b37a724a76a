"""The errors of the registry: one class for each thing a caller can do about it.

Each text is one clear sentence for the person in front of the terminal. What the daemon makes of a
class (an HTTP status) is the daemon's affair.

    RegistryError
    ├── NameInvalid          the text is no model name
    ├── ModelNotFound        well-formed, but not here; from `pull`: no source has it either
    ├── SourceUnavailable    a source could not be reached, or gave out; another may serve
    ├── AccessDenied         a source wants a token, or the acceptance of a licence
    ├── TermsNotAccepted     the model's makers have terms that the user has not accepted yet
    ├── DigestMismatch       bytes are not the ones that were promised
    ├── NotEnoughSpace       carries both sizes, in bytes
    ├── DiskRefuses          no permission, a disk that fails; the text names the file
    ├── BadModelFile         broken, truncated, changed or missing file of a model
    ├── Unsupported          a kind of model, file or archive that llmd does not take
    ├── BadRequest           a wrong Modelfile or a wrong create request
    └── StoreDamaged         the store's own files cannot be read
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RegistryError(Exception):
    """Base of all. `str(error)` is a sentence that may be shown as it is."""


class NameInvalid(RegistryError):
    """The text is no model name."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(f"invalid model name {text[:200]!r}" + (f": {reason}" if reason else ""))
        self.text = text


class ModelNotFound(RegistryError):
    """No such model, here or where it was looked for. `name` is its display form."""

    def __init__(self, name: str, message: str | None = None) -> None:
        super().__init__(message or f"model '{name}' not found")
        self.name = name


class SourceUnavailable(RegistryError):
    """This source cannot be reached or has failed. Nothing is wrong with the model's name."""


class AccessDenied(RegistryError):
    """The source knows the model and does not hand it to this user. The text says what to do."""


class TermsNotAccepted(RegistryError):
    """Nothing was fetched. The text holds the terms and how to accept them."""

    def __init__(self, name: str, terms: str) -> None:
        super().__init__(
            f"{name} comes under these terms:\n{terms}\n\n"
            f"pull it with --accept-terms (in the API: accept_terms) to accept them"
        )


class DigestMismatch(RegistryError):
    """Bytes that are not the promised ones. They have been deleted."""

    def __init__(self, want: str, got: str, what: str = "file") -> None:
        super().__init__(
            f"digest mismatch, {what} must be downloaded again: "
            f"want sha256:{want}, got sha256:{got}"
        )
        self.want = want
        self.got = got


class NotEnoughSpace(RegistryError):
    """What has arrived is kept; both sizes are in bytes. `needed` is 0 where it is not known."""

    def __init__(self, needed: int, free: int, folder: str) -> None:
        more = f"{show_size(needed)} needed, " if needed else ""
        super().__init__(f"not enough disk space in {folder}: {more}{show_size(free)} free")
        self.needed = needed
        self.free = free


class DiskRefuses(RegistryError):
    """The system does not let us write or read a file of the store."""


class BadModelFile(RegistryError):
    """A file of a model is broken, truncated, changed behind our back, or gone."""


class Unsupported(RegistryError):
    """Recognised, and not supported. The text names what it is and what would do."""


class BadRequest(RegistryError):
    """The caller's own input is wrong: a Modelfile, a create request."""


class StoreDamaged(RegistryError):
    """A file of the store itself cannot be read; it is named. Nothing is deleted meanwhile."""


@contextmanager
def told_plainly(folder: Path) -> Iterator[None]:
    """Turns what the system says about files below this folder into the errors above."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(0, shutil.disk_usage(folder).free, str(folder)) from error
        if error.filename is None and error.errno not in (errno.EIO, errno.EROFS, errno.EFBIG):
            raise  # about something else than a file
        raise DiskRefuses(f"{error.filename or folder}: {error.strerror or error}") from error


def show_size(size: int) -> str:
    """A size in bytes for people: decimal units, as disks are sold."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit in ("B", "KB") else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
