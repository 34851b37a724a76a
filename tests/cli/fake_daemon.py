"""A loopback server with the daemon's routes and canned answers, for real `llmd` processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]
DIGEST = "0123456789abcdef" * 4


@dataclass
class Refusal:
    """An answer with this status and error text."""

    status: int
    text: str


@dataclass
class FakeDaemon:
    """`answers` maps "METHOD /path" to what is said: an object, lines, a Refusal, or a function
    of the request's body that returns one of them. `requests` has what came in."""

    port: int = 0
    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, Json]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def bodies(self, route: str) -> list[Json]:
        return [body for asked, body in self.requests if asked == route]

    def environ(self, home: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": str(home),
            "LLMD_HOST": f"127.0.0.1:{self.port}",
            "LLMD_NO_AUTOSTART": "1",
        }


@contextmanager
def fake_daemon() -> Iterator[FakeDaemon]:
    fake = FakeDaemon(
        answers={
            "GET /api/version": {"version": "1.0", "llmd_version": "9.9.9"},
            "POST /api/show": {"capabilities": ["completion"], "model_info": {}, "details": {}},
        }
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(fake: FakeDaemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            route = f"{self.command} {self.path}"
            fake.requests.append((route, body))
            fake.keys.append(self.headers.get("Authorization", ""))
            said = fake.answers.get(route, Refusal(404, "404 page not found"))
            if callable(said):
                said = said(body)
            if isinstance(said, Refusal):
                self._send_whole(said.status, {"error": said.text})
            elif isinstance(said, dict):
                self._send_whole(200, said)
            else:
                self._send_lines(said)

        do_GET = do_POST = do_DELETE = answer

        def _send_whole(self, status: int, value: Json) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _send_lines(self, lines: Iterator[Json] | Sequence[Json]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for line in lines:
                    content = json.dumps(line).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                self.wfile.write(b"0\r\n\r\n")
            except OSError:  # the client has left, which is what some tests are about
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    return Handler


def endless(line: Json) -> Callable[[Json], Iterator[Json]]:
    """An answer that goes on until the client leaves."""

    def lines(_: Json) -> Iterator[Json]:
        while True:
            yield line

    return lines


def llmd(
    *arguments: str,
    environ: dict[str, str],
    stdin: str = "",
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run the program, its stdin a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "llmd", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environ,
        timeout=timeout_s,
        check=False,
    )
