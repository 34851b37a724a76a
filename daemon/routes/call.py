"""One HTTP request being answered: its body in, its answer out, and an eye on the client.

    Endpoint ──reads the body, within a size and a time──▶ Call ──▶ handler ──▶ send_json, or a
                                                                                stream of pieces

While the handler works, the Endpoint listens for the client's leaving, also during a load or a
prefill, when nothing is sent. If it leaves, the handler's task is cancelled; whatever the handler
holds (a lease, a sequence) it gives back on the way out. An error before the first byte is an
ordinary answer with a status; after it, it is the stream's last piece.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import BadRequest, DaemonError, TooLarge, TooSlow, status_of
from ..http_server import WIRE, Wire
from .compression import unpacked
from .replies import (
    JSON,
    NDJSON,
    SSE,
    TEXT,
    Family,
    encode_json,
    error_object,
    event_of,
    headers_of,
    last_words,
    line_of,
)
from .services import Services

log = logging.getLogger("llmd.routes")

MAX_JSON_BYTES = 256 * 2**20  # base64 images make bodies large
BODY_GRACE_S = 60.0  # a body has this long, and a second more
BODY_MIN_BYTES_PER_S = 16 * 1024  # for each so many bytes that came: slow links, not slow attacks
STATUS_CLIENT_GONE = 499  # counted, never seen by that client

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its request was read."""


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table of routes. `body` is None where no JSON is read."""

    methods: Sequence[str]
    path: str
    handler: Callable[[Call], Awaitable[None]]
    family: Family
    body: type[Any] | None = None
    summary: str = ""
    reads_body: bool = True  # False: the handler itself takes it, piece by piece


class Call:
    """A request and the way to answer it. Used by one handler, on one task."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, services: Services, family: Family
    ) -> None:
        self.services = services
        self.family = family
        self.arrived = time.monotonic()
        self.status = 0  # of the answer, once it has begun
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body = b""
        self._is_streaming = False
        # Takes pieces of a stream without waiting, if the server can do that (http_server.py).
        self.wire: Wire | None = scope.get("extensions", {}).get(WIRE)

    # ------------------------------------------------------------------ in

    @property
    def method(self) -> str:
        return str(self._scope["method"])

    @property
    def params(self) -> dict[str, str]:
        """What the route's pattern took from the path."""
        params: dict[str, str] = self._scope.get("path_params", {})
        return params

    @property
    def client_key(self) -> str:
        """Names the holder of the API key, or nobody; set by the guard (security.py)."""
        return str(self._scope.get("llmd.client", ""))

    @property
    def peer(self) -> str:
        """The address at the other end of the connection; "" if the server does not know."""
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    @property
    def fair_key(self) -> str:
        """Whose turn it is: requests of one key wait for one another, not for those of others.

        Keys tell clients apart best; without them, the address and the program that calls.
        """
        return self.client_key or f"{self.peer} {self.header('user-agent')}".strip()

    def header(self, name: str) -> str:
        """The header's value, or nothing. `name` in lower case."""
        wanted = name.encode("latin-1")
        for key, value in self._scope["headers"]:
            if key == wanted:
                return bytes(value).decode("latin-1")
        return ""

    async def pieces(self, max_bytes: int | None) -> AsyncIterator[bytes]:
        """The body as it comes. Raises TooLarge, TooSlow, ClientGone."""
        length = self.header("content-length")
        if max_bytes is not None and length.isdigit() and int(length) > max_bytes:
            raise TooLarge(_too_large(max_bytes))
        begun = time.monotonic()
        received = 0
        while True:
            left_s = begun + BODY_GRACE_S + received / BODY_MIN_BYTES_PER_S - time.monotonic()
            try:
                message = await asyncio.wait_for(self._receive(), max(left_s, 0.0))
            except TimeoutError:
                raise TooSlow("the request body took too long to arrive") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            received += len(piece)
            if max_bytes is not None and received > max_bytes:
                raise TooLarge(_too_large(max_bytes))
            if piece:
                yield piece
            if not message.get("more_body", False):
                return

    async def read_body(self) -> None:
        body = b"".join([piece async for piece in self.pieces(MAX_JSON_BYTES)])
        self._body = unpacked(body, self.header("content-encoding"))

    async def client_leaves(self) -> None:
        """Returns when the client has closed the connection. Only after the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def decode(self, kind: type[T]) -> T:
        """The body as this struct, whatever its Content-Type says. Raises BadRequest."""
        if not self._body.strip():
            raise BadRequest("missing request body")
        try:
            body: T = _decoder(cast("Any", kind)).decode(self._body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise BadRequest(str(error)) from error
        return body

    # ----------------------------------------------------------------- out

    async def send_json(self, value: Any, status: int = 200) -> None:
        await self.send_bytes(encode_json(value), JSON, status)

    async def send_text(self, text: str, status: int = 200) -> None:
        await self.send_bytes(text.encode(), TEXT, status)

    async def send_empty(self, status: int = 200) -> None:
        await self.send_bytes(b"", "", status)

    async def send_bytes(
        self,
        body: bytes,
        content_type: str,
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._begin(status, content_type, [length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def send_line(self, value: Any) -> None:
        """One object of a native stream."""
        if not self._is_streaming:
            await self._begin_stream(NDJSON)
        await self._write(line_of(value))

    async def send_event(self, value: Any, event: str = "") -> None:
        """One server-sent event."""
        if not self._is_streaming:
            await self._begin_stream(SSE)
        await self._write(event_of(value, event))

    async def send_done_mark(self) -> None:
        """The end of an OpenAI stream."""
        await self._write(b"data: [DONE]\n\n")

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def send_error(self, error: BaseException) -> None:
        """As an ordinary answer, or as the last piece of a stream that has begun."""
        if self._is_streaming:
            await self._write(last_words(error, self.family))
            await self.end_stream()
        elif self.status == 0:
            body = encode_json(error_object(error, self.family))
            await self.send_bytes(body, JSON, status_of(error), headers_of(error))

    async def _begin(
        self, status: int, content_type: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self.status = status
        kind = [(b"content-type", content_type.encode())] if content_type else []
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*kind, *headers]}
        )

    async def _begin_stream(self, content_type: str) -> None:
        self._is_streaming = True
        # Proxies that collect an answer before they pass it on would undo the streaming.
        await self._begin(
            200, content_type, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )

    async def _write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})


class Endpoint:
    """A route as an ASGI application."""

    def __init__(self, route: Route, services: Services) -> None:
        self._route = route
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, self._services, self._route.family)
        try:
            if self._route.reads_body:
                await call.read_body()
                await self._answer_unless_gone(call)
            else:
                await self._answer(call)
        except ClientGone:
            call.status = STATUS_CLIENT_GONE
        except (BadRequest, TooLarge, TooSlow) as error:  # about the body, before a handler has it
            await call.send_error(error)
        finally:
            self._services.metrics.count_request(self._route.path, call.status)

    async def _answer_unless_gone(self, call: Call) -> None:
        work = asyncio.create_task(self._answer(call))
        gone = asyncio.create_task(call.client_leaves())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.info("client gone: %s", self._route.path)
                raise ClientGone
            await work
        finally:
            await _end(work)
            await _end(gone)

    async def _answer(self, call: Call) -> None:
        try:
            await self._route.handler(call)
        except ClientGone:
            raise
        except Exception as error:
            if status_of(error) >= 500:
                # Where it was raised matters for what was not foreseen. The others name their
                # cause, and a crowd that is refused comes at a bad time for tracebacks.
                is_foreseen = isinstance(error, DaemonError)
                log.warning("%s failed: %s", self._route.path, error, exc_info=not is_foreseen)
            await call.send_error(error)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has given back what it holds."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is not None:
        log.debug("a cancelled request ended with %r", task.exception())


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _too_large(max_bytes: int) -> str:
    return f"the request body is larger than {max_bytes // 2**20} MiB"
