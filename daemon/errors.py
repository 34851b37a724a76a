"""What can go wrong in the daemon: one class for each thing a caller can do about it.

    DaemonError                500
    ├── BadRequest             400  the request itself is wrong
    ├── Unauthorized           401  no key, or a wrong one
    ├── Forbidden              403  a foreign origin, a rebound host, a cloud name
    ├── NotFound               404  no such model, blob or response
    ├── TooSlow                408  the body did not come in time
    ├── TooLarge               413  the body is over the limit
    ├── ServerBusy             503  the queue is full; try again
    ├── NoMemory               503  the model does not fit; the text names both sizes
    ├── ShuttingDown           503  the daemon is about to end
    ├── LoadFailed             500  the worker could not load the model
    ├── WorkerDied             500  the worker ended while it was answering
    └── RequestFailed          by its code: the worker refused or failed this one request

`status_of` is the only place that turns an error into an HTTP status; the errors of the registry,
which knows no HTTP, are mapped there too.
"""

from __future__ import annotations

from ..registry import errors as registry_errors

BUSY = "server busy, please try again.  maximum pending requests exceeded"

_STATUS_OF_CODE = {
    "bad_request": 400,
    "too_long": 400,
    "unsupported": 400,
    "no_memory": 503,
    "bad_model": 500,
    "internal": 500,
}

_STATUS_OF_REGISTRY_ERROR: dict[type[registry_errors.RegistryError], int] = {
    registry_errors.NameInvalid: 400,
    registry_errors.BadRequest: 400,
    registry_errors.Unsupported: 400,
    registry_errors.AccessDenied: 403,
    registry_errors.ModelNotFound: 404,
    registry_errors.NotEnoughSpace: 507,
}


class DaemonError(Exception):
    """Base of all. `str(error)` is a sentence for the user."""

    status = 500


class BadRequest(DaemonError):
    """The request is wrong in itself; sending it again will not help."""

    status = 400


class Unauthorized(DaemonError):
    """An API key is wanted."""

    status = 401


class Forbidden(DaemonError):
    """Understood, and not allowed. The text names the setting that would allow it."""

    status = 403


class NotFound(DaemonError):
    """What the request names is not here."""

    status = 404


class TooSlow(DaemonError):
    """The sender took too long over its body."""

    status = 408


class TooLarge(DaemonError):
    """The body is over the limit, which the text names."""

    status = 413


class ServerBusy(DaemonError):
    """Too many requests wait for a model to be loaded."""

    status = 503

    def __init__(self, message: str = BUSY, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMemory(DaemonError):
    """The model does not fit, whatever idle model leaves."""

    status = 503


class ShuttingDown(DaemonError):
    """The daemon is about to end and loads nothing any more."""

    status = 503

    def __init__(self) -> None:
        super().__init__("llmd is shutting down")


class LoadFailed(DaemonError):
    """The worker could not load the model. The text is its own reason."""


class DiedInLoad(LoadFailed):
    """The worker ended before it could say why. The text ends with the last lines of its log."""


class WorkerDied(DaemonError):
    """The worker ended while it was answering. The text ends with the last lines of its log."""


class RequestFailed(DaemonError):
    """The worker refused or failed this request; the model stays loaded.

    `code` is one of protocol.Failed's.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def status_of(error: BaseException) -> int:
    """The HTTP status; 500 for whatever is not expected here."""
    if isinstance(error, RequestFailed):
        return _STATUS_OF_CODE.get(error.code, 500)
    if isinstance(error, DaemonError):
        return error.status
    for kind, status in _STATUS_OF_REGISTRY_ERROR.items():
        if isinstance(error, kind):
            return status
    return 500
