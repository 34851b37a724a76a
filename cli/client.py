"""The daemon's HTTP API as the command line needs it: JSON in, JSON or lines of JSON out.

The standard library's client, not httpx2: it is imported in a tenth of the time, and each command
is a new process. Nothing here goes through a proxy, since the daemon is the user's own.

Closing a stream closes its connection, by which the daemon knows that the answer is not wanted.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from .address import Address

CONNECT_TIMEOUT_S = 5.0
Json = dict[str, Any]


class ApiError(Exception):
    """The daemon said no. `status` is 200 if the answer had begun already."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(Exception):
    """Nothing answers there, or what answers is no llmd daemon."""


class Client:
    """One connection for each request; holds no state."""

    def __init__(self, address: Address, api_key: str = "") -> None:
        self.address = address
        self._api_key = api_key

    def get(self, path: str, timeout_s: float | None = None) -> Json:
        """Raises ApiError, Unreachable."""
        return self._one("GET", path, None, timeout_s)

    def post(self, path: str, body: Json) -> Json:
        """Raises ApiError, Unreachable."""
        return self._one("POST", path, body, None)

    def delete(self, path: str, body: Json) -> Json:
        """Raises ApiError, Unreachable."""
        return self._one("DELETE", path, body, None)

    def has(self, path: str) -> bool:
        """Whether a HEAD request finds something there. Raises ApiError, Unreachable."""
        try:
            connection, _ = self._send("HEAD", path, None, None)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        connection.close()
        return True

    def upload(self, path: str, file: Path) -> None:
        """POST a file's content. Raises ApiError, Unreachable, OSError."""
        with file.open("rb") as content:
            connection, response = self._send("POST", path, content, None)
            response.read()
        connection.close()

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """One object for each line of the answer. Close it to stop the answer.

        Raises ApiError, also for an error in the middle of the answer, and Unreachable.
        """
        connection, response = self._send("POST", path, body, None)
        try:
            for line in response:
                if line.strip():
                    yield _checked(response.status, line)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the connection to llmd was lost: {_why(error)}") from error
        finally:
            connection.close()

    def _one(self, method: str, path: str, body: Json | None, timeout_s: float | None) -> Json:
        connection, response = self._send(method, path, body, timeout_s)
        try:
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the connection to llmd was lost: {_why(error)}") from error
        finally:
            connection.close()
        return _checked(response.status, content) if content.strip() else {}

    def _send(
        self, method: str, path: str, body: Json | BinaryIO | None, timeout_s: float | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer's head has arrived, and it is no error."""
        kind = (
            http.client.HTTPSConnection
            if self.address.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(
            self.address.host, self.address.port, timeout=timeout_s or CONNECT_TIMEOUT_S
        )
        headers = self._headers()
        content: bytes | BinaryIO | None = None
        if isinstance(body, dict):
            content = json.dumps(body, ensure_ascii=False).encode()
        elif body is not None:
            content = body
            headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
        try:
            connection.connect()
            # Loading a large model may take minutes before the first byte.
            connection.sock.settimeout(timeout_s)
            connection.request(method, self.address.path + path, content, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(response.status, _error_text(response.status, response.read()))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(
                f"could not connect to llmd at {self.address}: {_why(error)}"
            ) from error
        except ApiError:
            connection.close()
            raise
        return connection, response

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": f"llmd/{__version__}"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers


def _checked(status: int, content: bytes) -> Json:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise Unreachable("what answers there does not speak llmd's API") from error
    if not isinstance(value, dict):
        raise Unreachable("what answers there does not speak llmd's API")
    if "error" in value:
        raise ApiError(status, _text_of(value["error"]))
    return value


def _error_text(status: int, content: bytes) -> str:
    try:
        value = json.loads(content)
    except ValueError:
        text = content.decode("utf-8", "replace").strip()
        return text[:200] or f"status {status}"
    return _text_of(value.get("error", value) if isinstance(value, dict) else value)


def _text_of(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message", error)
    return error if isinstance(error, str) else json.dumps(error)


def _why(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
