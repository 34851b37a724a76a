"""Who may talk to the daemon: the Host, the Origin and the key of a request, before its body.

    request ─▶ Host known? ─▶ Origin allowed? ─▶ preflight? answer it ─▶ key right? ─▶ routes
                  403             403                                       401

*Host*: a page on evil.com may have its name re-pointed at 127.0.0.1 (DNS rebinding) and is then of
the same origin as we. Its requests still carry `Host: evil.com`.
*Origin*: any page can send a simple POST to a port of the user's machine; browsers name the page.
*Key*: compared as a hash, all of them always, in constant time. `/` and `/api/version` tell nothing
and stay open, so that a client can find out that a server is there.

A refusal says in its body which setting would allow the request.

Sources: issue 2 (lists of allowed hosts and origins); the Fetch standard's CORS protocol.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import psutil
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Forbidden, Unauthorized, status_of
from .routes.replies import JSON, encode_json, error_object, family_of, headers_of

OPEN_PATHS = frozenset({"/", "/api/version"})
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_BUILT_IN_ORIGINS = (
    *(f"{scheme}://{host}" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1")),
    "http://0.0.0.0",
    "https://0.0.0.0",
    "app://*",
    "file://*",
    "tauri://*",
    "vscode-webview://*",
    "vscode-file://*",
)
_STAINLESS = (
    "arch,async,custom-poll-interval,helper-method,lang,os,package-version,poll-helper,"
    "retry-count,runtime,runtime-version,timeout"
)
_ALLOWED_HEADERS = ", ".join(
    [
        "Authorization",
        "Content-Type",
        "User-Agent",
        "Accept",
        "X-Requested-With",
        "OpenAI-Beta",
        "anthropic-version",
        "anthropic-beta",
        "anthropic-dangerous-direct-browser-access",
        "x-api-key",
        *(f"x-stainless-{name}" for name in _STAINLESS.split(",")),
    ]
)
_PREFLIGHT_HEADERS = [
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"),
    (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
    (b"access-control-max-age", b"43200"),
]
_HASHED_KEY = re.compile(r"sha256:([0-9a-fA-F]{64})\Z")


class Guard:
    """An ASGI application around the routes. Holds no state that changes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_loopback: bool = True,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
        api_keys: Sequence[str] = (),
        own_hosts: Iterable[str] | None = None,
    ) -> None:
        """`api_keys`: as they are, or "sha256:" and the hash of one, for settings kept in files."""
        self._app = app
        self._is_loopback = is_loopback
        self._origins = (*_BUILT_IN_ORIGINS, *(origin.lower() for origin in origins))
        self._hosts = tuple(host.lower() for host in hosts)
        self._key_hashes = tuple(_key_hash(key) for key in api_keys)
        self._own_hosts = frozenset(own_names() if own_hosts is None else own_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin", "")
        try:
            self.check_host(headers.get(b"host", ""))
            self.check_origin(origin, headers.get(b"host", ""))
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await _respond(send, 204, b"", "", [*_PREFLIGHT_HEADERS, *_cors(origin)])
                return
            if scope["path"] not in OPEN_PATHS:
                scope["llmd.client"] = self.check_key(headers)
        except (Forbidden, Unauthorized) as error:
            body = encode_json(error_object(error, family_of(scope["path"])))
            allowed = _cors(origin) if isinstance(error, Unauthorized) else []
            await _respond(send, status_of(error), body, JSON, [*headers_of(error), *allowed])
            return
        await self._app(scope, receive, _with_headers(send, _cors(origin)) if origin else send)

    # ------------------------------------------------------------------- host

    def check_host(self, header: str) -> None:
        """Raises Forbidden."""
        host = _host_of(header)
        if not host or self._is_known_host(host) or _matches(host, self._hosts):
            return
        raise Forbidden(f"host {json.dumps(host)} is not allowed; add it to LLMD_HOSTS to allow it")

    def _is_known_host(self, host: str) -> bool:
        if host == "localhost" or host in self._own_hosts or host.endswith(_LOCAL_SUFFIXES):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            # A name without a dot is not in the public DNS: nobody can re-point it from outside.
            # It is how containers call each other, which they do on other than loopback addresses.
            return not self._is_loopback and "." not in host
        return address.is_loopback or address.is_private or address.is_unspecified

    # ----------------------------------------------------------------- origin

    def check_origin(self, origin: str, host_header: str) -> None:
        """Raises Forbidden."""
        if not origin or self._is_same_origin(origin, host_header):
            return
        lowered = origin.lower()
        without_port = re.sub(r":\d+\Z", "", lowered)
        if _matches(lowered, self._origins) or _matches(without_port, self._origins):
            return
        raise Forbidden(
            f"origin {json.dumps(origin)} is not allowed; add it to LLMD_ORIGINS to allow it"
        )

    @staticmethod
    def _is_same_origin(origin: str, host_header: str) -> bool:
        return bool(host_header) and urlsplit(origin).netloc.lower() == host_header.lower()

    # -------------------------------------------------------------------- key

    def check_key(self, headers: dict[bytes, str]) -> str:
        """The name that stands for the key's holder; empty where no keys are set.

        Raises Unauthorized.
        """
        if not self._key_hashes:
            return ""
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        candidates = [token.strip()] if scheme.lower() == "bearer" else []
        candidates.append(headers.get(b"x-api-key", "").strip())
        found = ""
        for candidate in candidates:
            given = hashlib.sha256(candidate.encode("latin-1")).digest()
            for known in self._key_hashes:
                if hmac.compare_digest(given, known) and candidate:
                    found = known.hex()[:16]
        if not found:
            raise Unauthorized("an API key is required: send it as Bearer token (LLMD_API_KEY)")
        return found


def own_names() -> set[str]:
    """The machine's host name and addresses, in lower case."""
    names = {socket.gethostname().lower()}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                names.add(address.address.partition("%")[0].lower())
    return names


def _key_hash(key: str) -> bytes:
    hashed = _HASHED_KEY.match(key)
    return bytes.fromhex(hashed.group(1)) if hashed else hashlib.sha256(key.encode()).digest()


def _host_of(header: str) -> str:
    """Without port, brackets and the root's dot, in lower case."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    if text.count(":") == 1:
        text = text.partition(":")[0]
    return text.rstrip(".")


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


def _cors(origin: str) -> list[tuple[bytes, bytes]]:
    if not origin:
        return []
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return send_with_headers


async def _respond(
    send: Send, status: int, body: bytes, content_type: str, headers: list[Any]
) -> None:
    described = [(b"content-type", content_type.encode())] if body else []
    if status != 204:  # which has no body, and so no length
        described.append((b"content-length", str(len(body)).encode()))
    start = {"type": "http.response.start", "status": status, "headers": [*described, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
