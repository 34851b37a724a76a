"""The guard: hosts, origins and keys, and that no route lies outside it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator

import pytest

from llmd.daemon.app import ROUTES
from llmd.daemon.errors import Forbidden
from llmd.daemon.security import OPEN_PATHS, Guard

from .live import LiveDaemon, live_daemon


async def nothing(scope: object, receive: object, send: object) -> None:
    """Stands for the routes."""


def guard(**options: object) -> Guard:
    return Guard(nothing, own_hosts={"desk", "93.184.216.34"}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LocalHost:11434",
        "localhost.",
        "127.0.0.1:11434",
        "127.9.9.9",
        "[::1]:11434",
        "0.0.0.0",
        "192.168.1.7",
        "desk:80",
        "93.184.216.34",
        "a.localhost",
        "printer.local",
        "host.docker.internal",
        "llm.example.com",
        "a.corp.example.org",
    ],
)
def test_a_known_host_passes(host: str) -> None:
    guard(hosts=["llm.example.com", "*.corp.example.org"]).check_host(host)


@pytest.mark.parametrize(
    "host",
    ["evil.com", "evil.com:11434", "8.8.8.8", "localhost.evil.com", "llmd", "127.0.0.1.evil.com"],
)
def test_a_foreign_host_is_refused_and_the_setting_named(host: str) -> None:
    with pytest.raises(Forbidden, match="LLMD_HOSTS"):
        guard().check_host(host)


def test_a_name_without_a_dot_passes_where_other_machines_may_call() -> None:
    guard(is_loopback=False).check_host("llmd:11434")


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "http://localhost",
        "http://localhost:3000",
        "https://127.0.0.1:8443",
        "http://0.0.0.0:1",
        "app://obsidian.md",
        "vscode-webview://abc",
        "http://desk:11434",
        "chrome-extension://abc",
        "https://a.example.com",
    ],
)
def test_a_known_origin_passes(origin: str) -> None:
    known = guard(origins=["chrome-extension://*", "https://*.example.com"])
    known.check_origin(origin, "desk:11434")


@pytest.mark.parametrize(
    "origin",
    ["https://evil.com", "null", "http://localhost.evil.com", "https://127.0.0.1.evil.com:80"],
)
def test_a_foreign_origin_is_refused_and_the_setting_named(origin: str) -> None:
    with pytest.raises(Forbidden, match="LLMD_ORIGINS"):
        guard().check_origin(origin, "localhost:11434")


KEY, OTHER_KEY = "sk-one", "sk-two"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    hashed = "sha256:" + hashlib.sha256(OTHER_KEY.encode()).hexdigest()
    with live_daemon(tmp_path_factory.mktemp("m"), names=["plain"], api_keys=[KEY, hashed]) as it:
        yield it


def concrete(path: str) -> str:
    return path.replace("{model:path}", "plain").replace("{digest}", "sha256:0").replace("{", "")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.methods[0]} {route.path}")
def test_every_route_is_behind_the_guard(locked: LiveDaemon, route: object) -> None:
    path, methods = concrete(route.path), route.methods  # type: ignore[attr-defined]

    def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return locked.client.request(methods[0], path, headers=named).status_code

    right = {"authorization": f"Bearer {KEY}"}
    assert status(**right, host="evil.com") == 403
    assert status(**right, origin="https://evil.com") == 403
    if path in OPEN_PATHS:
        assert status() == 200
        return
    assert status() == 401
    assert status(authorization="Bearer wrong") == 401
    assert status(authorization=f"Basic {KEY}") == 401
    for headers in (right, {"x_api_key": KEY}, {"authorization": f"Bearer {OTHER_KEY}"}):
        allowed = locked.client.request(
            methods[0], path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert "LLMD_" not in allowed.text  # whatever it is, no refusal of the guard


def test_the_refusal_has_the_shape_of_its_api(locked: LiveDaemon) -> None:
    assert "LLMD_API_KEY" in locked.post("/api/chat", {}).json()["error"]
    assert locked.post("/v1/chat/completions", {}).json()["error"]["type"] == "authentication_error"
    anthropic = locked.post("/v1/messages", {}).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")


def test_two_keys_share_no_prefixes(locked: LiveDaemon) -> None:
    body = '{"model": "plain", "prompt": "ECHO", "stream": false}'
    salts = set()
    for key in (KEY, OTHER_KEY):
        answer = locked.post("/api/generate", body, headers={"x-api-key": key}).json()
        salts.add(answer["response"].partition('"cache_salt":"')[2].partition('"')[0])
    assert len(salts) == 2 and "" not in salts


def test_a_preflight_is_answered(daemon: LiveDaemon) -> None:
    response = daemon.client.options(
        "/api/chat",
        headers={
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type, x-stainless-os",
        },
    )
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]
    assert response.headers["access-control-max-age"] == "43200"


def test_an_answer_to_an_allowed_origin_carries_it(daemon: LiveDaemon) -> None:
    response = daemon.client.get("/api/tags", headers={"origin": "http://localhost:3000"})
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert response.headers["vary"] == "Origin"


def test_a_refusal_comes_before_the_body_is_read(daemon: LiveDaemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=5) as client:
        client.sendall(b"POST /api/pull HTTP/1.1\r\nHost: evil.com\r\nContent-Length: 99\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 403")


def test_a_body_over_the_limit_is_refused_by_its_length(daemon: LiveDaemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=5) as client:
        head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
        client.sendall(head)
        assert client.recv(100).startswith(b"HTTP/1.1 413")
