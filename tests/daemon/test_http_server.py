"""Connections that would hold the daemon up, and bodies that came compressed."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import zstandard
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llmd.daemon import http_server
from llmd.daemon.routes import call

from .live import LiveDaemon

BODY = json.dumps({"model": "plain", "prompt": "hi", "stream": False}).encode()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """The smallest application."""
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    await send(head)
    await send({"type": "http.response.body", "body": b"hi"})


async def count(scope: Scope, receive: Receive, send: Send) -> None:
    """Counts to 60: some numbers at once, some as messages, some after a turn of the event loop."""
    wire: http_server.Wire = scope["extensions"][http_server.WIRE]
    assert not wire.put(b"too early;"), "the answer has not begun"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(60):
        piece = b"%d;" % number
        if number % 7 == 3:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        else:
            assert wire.put(piece)
        if number % 5 == 0:
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"end"})
    assert not wire.put(b"too late;"), "the answer is over"


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, head_timeout_s: float, app: ASGIApp = hello
) -> Iterator[int]:
    """That application on a port, with less patience than a daemon has."""
    monkeypatch.setattr(http_server.Connection, "head_timeout_s", head_timeout_s)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = http_server.make_server(app)
    thread = threading.Thread(target=lambda: http_server.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_pieces_and_messages_come_in_the_order_they_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(monkeypatch, 30, count) as port:
        url = f"http://127.0.0.1:{port}/"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: httpx.get(url), range(40)))
    expected = "".join(f"{number};" for number in range(60)) + "end"
    assert {answer.text for answer in answers} == {expected}
    assert all(answer.headers["transfer-encoding"] == "chunked" for answer in answers)


async def given_while_another_leaves(aborts_first: bool) -> bytes:
    """What a client gets that is sent a piece in the turn in which another one leaves."""
    loop, outbox = asyncio.get_running_loop(), http_server.Outbox()
    (leaving, _), (staying, client) = socket.socketpair(), socket.socketpair()
    with leaving, staying, client:
        for one in (leaving, staying, client):
            one.setblocking(False)
        gone, _ = await loop.create_connection(asyncio.Protocol, sock=leaving)
        here, _ = await loop.create_connection(asyncio.Protocol, sock=staying)
        for transport in (gone, here):
            cycle = SimpleNamespace(
                transport=transport,
                disconnected=False,
                response_complete=False,
                chunked_encoding=True,
                flow=SimpleNamespace(write_paused=False),
            )
            wire = http_server.Wire(cast("RequestResponseCycle", cycle), outbox)
            wire.look()
            if transport is gone and aborts_first:
                gone.abort()
            assert wire.put(b"piece")
        gone.abort()
        await asyncio.sleep(0)
        received = await asyncio.wait_for(loop.sock_recv(client, 100), 10)
        here.close()
        await asyncio.sleep(0)
    return received


@pytest.mark.parametrize("aborts_first", [False, True])
def test_a_client_that_leaves_takes_nobody_elses_piece_along(aborts_first: bool) -> None:
    assert http_server.run(given_while_another_leaves(aborts_first)) == b"5\r\npiece\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    with serving(monkeypatch, head_timeout_s=0.3) as port, connected(port) as client:
        client.sendall(sent)
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert client.recv(1000) == b""


def test_bytes_one_by_one_do_not_buy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, head_timeout_s=0.5) as port, connected(port) as client:
        client.settimeout(0.05)
        answer = b""
        for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 1000:
            try:
                client.send(bytes([byte]))
                answer += client.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_second_request_has_the_same_time_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(monkeypatch, head_timeout_s=0.5) as port, connected(port) as client:
        client.sendall(request)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        client.sendall(request[:20])
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_head_without_an_end_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, head_timeout_s=60) as port, connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (http_server.MAX_HEAD_BYTES + 1))
        assert client.recv(1000).startswith(b"HTTP/1.1 431 ")


def test_a_body_that_does_not_come_is_not_waited_for(
    daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "BODY_GRACE_S", 0.3)
    with connected(daemon.port) as client:
        client.sendall(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_takes_nothing_is_let_go(
    daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server.Connection, "stall_timeout_s", 0.3)
    # More than the buffers between us hold, and then an end that is long in coming.
    script = json.dumps([*[{"text": "x" * 2**20}] * 12, {"sleep_s": 60, "text": "end"}])
    body = json.dumps({"model": "plain", "prompt": f"SCRIPT {script}"}).encode()
    with socket.socket() as client:
        # A buffer of a set size: the system lets others grow, to 32 MiB on some machines.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", daemon.port))
        head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        client.recv(10)  # the answer has begun; now nothing is read until it is broken off
        deadline = time.monotonic() + 60
        while 'route="/api/generate",status="499"' not in daemon.client.get("/metrics").text:
            assert time.monotonic() < deadline, "the daemon still waits"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("zstd", zstandard.compress(BODY)),
        ("identity", BODY),
    ],
)
def test_a_compressed_body_is_unpacked(daemon: LiveDaemon, encoding: str, body: bytes) -> None:
    answer = daemon.post("/api/generate", body, headers={"content-encoding": encoding})
    assert answer.json()["response"] == "Hello wörld 👋"


@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("br", BODY, 400, "use gzip, deflate or zstd"),
        ("gzip", BODY, 400, "no valid gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:20], 400, "no valid gzip"),
        ("zstd", BODY, 400, "no valid zstd"),
        ("zstd", zstandard.compress(bytes(21 * 2**20)), 413, "unpacks to more than 20 MiB"),
        ("gzip", gzip.compress(bytes(21 * 2**20)), 413, "unpacks to more than 20 MiB"),
    ],
)
def test_a_damaged_or_swelling_body_is_refused(
    daemon: LiveDaemon, encoding: str, body: bytes, status: int, text: str
) -> None:
    answer = daemon.post("/api/generate", body, headers={"content-encoding": encoding})
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_the_loop_and_the_parser_are_the_fast_ones() -> None:
    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert http_server.run(name()) == "uvloop"
