"""A hub on the loopback with its content network on another port, and faults to order.

    hub      metadata, small files, and redirects of large ones, as huggingface_hub expects them
    content  the bytes of large files; another origin, as in the real world

Real sockets and threads, so that the code under test runs as it does outside. `Faults` are read at
each request and may be changed between two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SMALL_BYTES = 100_000  # files below are kept in git there, with a git hash
COMMIT = "a" * 40
CHUNK_BYTES = 64 << 10


@dataclass
class Faults:
    """What goes wrong. Counters count down."""

    bytes_per_s: int = 0  # of one connection
    drop_after: int = 0  # bytes of one response, then the connection ends
    drops: int = 10**9  # how many times that happens
    quota: int = 0  # bytes served in all, then every connection ends without one more
    ignore_range: bool = False
    flip_byte: int = 0  # so many responses have their first byte changed
    busy: int = 0  # so many answers are 429
    unavailable: int = 0  # so many answers are 503
    stall: int = 0  # so many responses stop for ever after the first chunk
    strict_range: bool = True  # a signed link holds for the range it was made for alone
    etag: str = ""  # instead of the file's sha256
    deny: int = 0  # 401, 403 or 404 for everything
    error_code: str = ""  # X-Error-Code with it
    wrong_range: bool = False


@dataclass
class Hub:
    """A running fixture. `files` are those of every repository."""

    files: dict[str, bytes]
    faults: Faults = field(default_factory=Faults)
    endpoint: str = ""
    content_url: str = ""
    requests: list[str] = field(default_factory=list)  # "GET /path" of both ports
    authorized: list[tuple[str, bool]] = field(default_factory=list)  # port's name, had a token
    bytes_served: int = 0  # by the content network
    known: dict[str, tuple[bytes, tuple[str, str]]] = field(default_factory=dict)  # hashes
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)  # ends all stalls

    def spend(self, fault: str) -> bool:
        """Use up one occurrence of a counted fault."""
        with self.lock:
            left: int = getattr(self.faults, fault)
            setattr(self.faults, fault, max(0, left - 1))
            return left > 0

    def sha256(self, name: str) -> str:
        return self._hashes(name)[0]

    def git_sha1(self, name: str) -> str:
        return self._hashes(name)[1]

    def _hashes(self, name: str) -> tuple[str, str]:
        content = self.files[name]
        if name not in self.known or self.known[name][0] is not content:
            git = hashlib.sha1(f"blob {len(content)}\0".encode())
            git.update(content)
            hashes = hashlib.sha256(content).hexdigest(), git.hexdigest()
            self.known[name] = (content, hashes)
        return self.known[name][1]

    def sibling(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": self.git_sha1(name)}
        if size >= SMALL_BYTES:
            entry["lfs"] = {"sha256": self.sha256(name), "size": size, "pointerSize": 134}
        return entry

    def tree_entry(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        entry = {"type": "file", "path": name, "size": size, "oid": self.git_sha1(name)}
        if size >= SMALL_BYTES:
            entry["lfs"] = {"oid": self.sha256(name), "size": size, "pointerSize": 134}
        return entry


@contextmanager
def running_hub(files: Mapping[str, bytes], faults: Faults | None = None) -> Iterator[Hub]:
    """Both servers, until the end of the block."""
    hub = Hub(dict(files), faults or Faults())
    with running_servers(hub, _HubHandler):
        yield hub


@contextmanager
def running_servers(hub: Hub, handler: type[_Handler]) -> Iterator[None]:
    """A server of this handler, and one for the contents, until the end of the block."""
    hub_server = _serve(handler, hub)
    content_server = _serve(_ContentHandler, hub)
    hub.endpoint = f"http://127.0.0.1:{hub_server.server_port}"
    hub.content_url = f"http://127.0.0.1:{content_server.server_port}"
    try:
        yield
    finally:
        hub.released.set()
        for server in (hub_server, content_server):
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: Hub


def _serve(handler: type[BaseHTTPRequestHandler], hub: Hub) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    server.hub = hub
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    kind = ""
    headers: Message

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.hub
        with hub.lock:
            hub.requests.append(f"{self.command} {self.path}")
            hub.authorized.append((self.kind, "Authorization" in self.headers))
        try:
            self.route(unquote(urlsplit(self.path).path))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # the client hung up between requests
            super().handle()

    def route(self, path: str) -> None:
        raise NotImplementedError

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _HubHandler(_Handler):
    kind = "hub"

    def route(self, path: str) -> None:
        faults = self.hub.faults
        if faults.deny:
            message = "Access to this model is restricted."
            headers = {"X-Error-Code": faults.error_code, "X-Error-Message": message}
            self.send(faults.deny, headers, b"{}")
        elif self.hub.spend("busy"):
            self.send(429, {"ratelimit": '"api";r=0;t=0'})
        elif self.hub.spend("unavailable"):
            self.send(503, {"Retry-After": "0"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.model_info(match[1], match[2])
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/[^/]+", path):
            entries = [self.hub.tree_entry(name) for name in self.hub.files]
            self.send(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())
        elif match := re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", path):
            self.resolve(match[1])
        else:
            self.send(404, {"X-Error-Code": "RepoNotFound"})

    def model_info(self, repo: str, revision: str | None) -> None:
        if revision not in (None, "main", COMMIT):
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"})
            return
        info = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 1,
            "likes": 0,
            "siblings": [self.hub.sibling(name) for name in self.hub.files],
        }
        self.send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def resolve(self, name: str) -> None:
        hub = self.hub
        content = hub.files.get(name)
        if content is None:
            self.send(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"})
            return
        common = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if len(content) < SMALL_BYTES:
            etag = f'"{hub.git_sha1(name)}"'
            length = str(len(content))
            self.send(200, {**common, "ETag": etag, "Content-Length": length}, content)
            return
        signed = (self.headers.get("Range") or "").replace("bytes=", "")
        self.send(
            302,
            {
                **common,
                "Location": f"{hub.content_url}/cdn/{name}?range={signed}",
                "X-Linked-Etag": f'"{hub.faults.etag or hub.sha256(name)}"',
                "X-Linked-Size": str(len(content)),
            },
        )


class _ContentHandler(_Handler):
    kind = "content"

    def route(self, path: str) -> None:
        faults = self.hub.faults
        content = self.hub.files[path.removeprefix("/cdn/")]
        asked = (self.headers.get("Range") or "").replace("bytes=", "")
        signed = parse_qs(urlsplit(self.path).query).get("range", [""])[0]
        if faults.strict_range and asked != signed:
            self.send(403, {"X-Error-Message": "this link was signed for another range"})
            return
        if asked and not faults.ignore_range:
            start_text, _, end_text = asked.partition("-")
            start, end = int(start_text), int(end_text) if end_text else len(content) - 1
            if start >= len(content):
                self.send(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            if faults.wrong_range:
                start = max(0, start - 1)
            shown = f"bytes {start}-{end}/{len(content)}"
            self.stream(206, content[start : end + 1], {"Content-Range": shown})
        else:
            self.stream(200, content, {})

    def stream(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        hub, faults = self.hub, self.hub.faults
        self.send(status, {**headers, "Content-Length": str(len(body))})
        if self.command == "HEAD":
            return
        view = memoryview(body)
        if body and hub.spend("flip_byte"):
            view = memoryview(bytes([body[0] ^ 1]) + body[1:])
        is_stalled = hub.spend("stall")
        start, sent = time.monotonic(), 0
        while sent < len(view):
            if faults.quota and hub.bytes_served >= faults.quota:
                self.close_connection = True
                return
            if faults.drop_after and sent >= faults.drop_after and hub.spend("drops"):
                self.close_connection = True
                return
            chunk = view[sent : sent + CHUNK_BYTES]
            if sent < faults.drop_after:
                chunk = chunk[: faults.drop_after - sent]
            self.wfile.write(chunk)
            sent += len(chunk)
            with hub.lock:
                hub.bytes_served += len(chunk)
            if is_stalled:
                hub.released.wait(60)
                self.close_connection = True
                return
            if faults.bytes_per_s:
                ahead = sent / faults.bytes_per_s - (time.monotonic() - start)
                if ahead > 0:
                    hub.released.wait(ahead)
