"""Golden wire samples: what every route writes, byte for byte, and the errors of each family.

A sample in tests/daemon/wire/ holds the requests of one route and the answers as they came over the
socket: status line, headers, framing and body. What differs from run to run (times, ids, durations,
the port) is masked. After a change that is meant: LLMD_WRITE_SAMPLES=1 pytest this file, and read
the difference.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.daemon.app import ROUTES

from .live import LiveDaemon, live_daemon
from .wire_requests import REFUSALS, REQUESTS

SAMPLES = Path(__file__).with_name("wire")
MASKS = [
    (rb"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)", b"TIME"),
    (rb"date: [^\r]+", b"date: DATE"),
    (rb'("(?:total|load|prompt_eval|eval)_duration"):\d+', rb"\1:NS"),
    (rb'("(?:created|created_at|completed_at)"):\d{9,}', rb"\1:SECONDS"),
    (rb'/[^\s"]*/blobs/', b"BLOBS/"),
    (rb'("(?:total_bytes|free_bytes|free|pid|blocks_cached|blocks_free)"):\d+', rb"\1:N"),
    (rb'("tokens_per_s"):[\d.]+', rb"\1:N"),
    (rb'("kind":"cpu","name"|"path"):"[^"]*"', rb'\1:"HERE"'),  # this machine's
    (rb'("history":\[\{[^}]*\})(?:,\{[^}]*\})*', rb"\1"),  # two models may come or go at once
    (rb"(?m)^llmd_.*\n", b""),  # what was counted; the names and kinds stay
    (rb'(\{"openapi":"[\d.]+").*', rb"\1 and the rest: see test_openai_responses"),
    (rb',"runtime":\{[^{}]*\}', b""),  # of a model that happens to be loaded
    (rb'"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|req_)[0-9a-z]{8,}', rb'"\1ID'),
]
NUM_TRIES = 5  # two deltas that wait for a busy daemon come as one line; seldom, and rightly


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One of this file's own: the order of its requests is part of the samples."""
    with live_daemon(tmp_path_factory.mktemp("wire")) as running:
        yield running


def exchange(
    daemon: LiveDaemon, method: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> bytes:
    """The answer as it came over the socket."""
    content = b"" if body is None else json.dumps(body).encode()
    if isinstance(body, str):
        content = body.encode()
    fields = {"Host": "localhost", "Connection": "close", **(headers or {})}
    head = f"{method} {path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    length = "\r\n" if body is None else f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as client:
        client.sendall((head + length).encode() + content)
        pieces = []
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def masked(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        body = unframed(body)
    for pattern, name in MASKS:
        head, body = re.sub(pattern, name, head), re.sub(pattern, name, body)
    head = re.sub(rb"content-length: \d+", b"content-length: N", head)
    return (head.replace(b"\r\n", b"\n") + b"\n\n" + body).decode()


def unframed(body: bytes) -> bytes:
    """The chunks one after the other; asserts that their framing is whole."""
    text = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        text += body[:length]
        assert body[length : length + 2] == b"\r\n", "a chunk ends where it says"
        body = body[length + 2 :]
        if length == 0:
            assert body == b"", "nothing follows the last chunk"
            return text


def request_line(method: str, path: str, body: Any) -> str:
    shown = "" if body is None else f" {json.dumps(body, ensure_ascii=False)}"
    return f">>> {method} {path}{shown}\n"


def samples_in(file: Path) -> dict[str, str]:
    """Answers by the line of their request."""
    if not file.exists():
        return {}
    parts = re.split(r"^(>>> .+\n)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("name", "method", "path", "bodies"), REQUESTS, ids=lambda value: value)
def test_an_answer_is_the_sample_byte_for_byte(
    daemon: LiveDaemon, name: str, method: str, path: str, bodies: list[Any]
) -> None:
    file = SAMPLES / f"{name}.http"
    known = samples_in(file)
    found: dict[str, str] = {}
    for body in bodies:
        line = request_line(method, path, body)
        if line in found:  # what is asked twice may be answered otherwise then
            line = line.replace(">>> ", ">>> again: ")
        for _ in range(NUM_TRIES):
            found[line] = masked(exchange(daemon, method, path, body)) + "\n\n"
            if found[line] == known.get(line) or os.environ.get("LLMD_WRITE_SAMPLES"):
                break
    compare(file, found)


@pytest.mark.parametrize(("name", "method", "path", "headers"), REFUSALS, ids=lambda value: value)
def test_so_is_one_that_the_headers_decide(
    daemon: LiveDaemon, name: str, method: str, path: str, headers: dict[str, str]
) -> None:
    line = request_line(method, path, headers)
    answer = masked(exchange(daemon, method, path, None, headers)) + "\n\n"
    compare(SAMPLES / f"{name}.http", {line: answer})


def test_every_route_has_a_sample() -> None:
    asked = {(method, path) for _, method, path, _ in REQUESTS}
    for route in ROUTES:
        pattern = re.sub(r"\{[^}]*\}", "[^ ]+", route.path)
        for method in route.methods:
            assert any(verb == method and re.fullmatch(pattern, path) for verb, path in asked), (
                f"{method} {route.path} has none"
            )


def compare(file: Path, found: dict[str, str]) -> None:
    """The answers with the sample; or they become the sample."""
    if os.environ.get("LLMD_WRITE_SAMPLES"):
        SAMPLES.mkdir(exist_ok=True)
        text = "".join(line + answer for line, answer in found.items())
        file.write_text(text, encoding="utf-8")
    assert found == samples_in(file)
