"""How an error looks to a client: one shape for each family of routes.

    NATIVE     {"error": "..."}
    OPENAI     {"error": {"message", "type", "param", "code"}}
    ANTHROPIC  {"type": "error", "error": {"type", "message"}, "request_id"}

The one place that turns errors into HTTP. The shapes are issue 2's and 6's.
"""

from __future__ import annotations

import enum
import logging
import secrets
from typing import Any

import msgspec

from ...registry.errors import RegistryError
from ..errors import DaemonError, ServerBusy, status_of

log = logging.getLogger("llmd.routes")

encode_json = msgspec.json.Encoder().encode
OPEN = msgspec.Raw(b"\0")  # a value that a frame leaves open; no JSON text has this byte

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class Family(enum.Enum):
    """Which API a route belongs to."""

    NATIVE = "native"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


_OPENAI_TYPES = {400: "invalid_request_error", 404: "not_found_error", 401: "authentication_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def family_of(path: str) -> Family:
    """For errors that come up before a route is found."""
    if path.startswith("/v1/messages"):
        return Family.ANTHROPIC
    return Family.OPENAI if path.startswith("/v1/") else Family.NATIVE


def line_of(value: Any) -> bytes:
    """One object of a native stream."""
    return encode_json(value) + b"\n"


def event_of(value: Any, event: str = "") -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return b"%sdata: %s\n\n" % (name, encode_json(value))


def frame_of(piece: bytes) -> bytes:
    """The piece with %b for each value that is OPEN."""
    return piece.replace(b"%", b"%%").replace(b"\0", b"%b")


def error_text(error: BaseException) -> str:
    """The sentence for the user. What nobody expected is named by its class."""
    if isinstance(error, DaemonError | RegistryError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}"


def error_object(error: BaseException, family: Family) -> dict[str, Any]:
    return error_shape(error_text(error), status_of(error), family)


def error_shape(text: str, status: int, family: Family) -> dict[str, Any]:
    if family is Family.NATIVE:
        return {"error": text}
    if family is Family.OPENAI:
        kind = _OPENAI_TYPES.get(status, "api_error")
        return {"error": {"message": text, "type": kind, "param": None, "code": None}}
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": text},
        "request_id": f"req_{secrets.token_hex(12)}",
    }


def headers_of(error: BaseException) -> list[tuple[bytes, bytes]]:
    """What an error's answer carries besides its body."""
    if isinstance(error, ServerBusy):
        return [(b"retry-after", str(error.retry_after_s).encode())]
    if status_of(error) == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []


def last_words(error: BaseException, family: Family) -> bytes:
    """The error as the last piece of a stream that has begun."""
    body = encode_json(error_object(error, family))
    if family is Family.NATIVE:
        return body + b"\n"
    event = b"event: error\n" if family is Family.ANTHROPIC else b""
    return event + b"data: " + body + b"\n\n"
