"""/api/create and /api/blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from .live import LiveDaemon, live_daemon, tiny_gguf


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LiveDaemon]:
    with live_daemon(tmp_path, names=["caller"]) as running:
        yield running


def test_a_model_is_made_of_another_with_new_settings(own: LiveDaemon) -> None:
    body = {
        "model": "mine",
        "from": "caller",
        "system": "Be brief.",
        "parameters": {"top_k": 3},
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
    }
    lines = own.lines("/api/create", body)
    assert lines[-1] == {"status": "success"}
    assert sum(line == {"status": "success"} for line in lines) == 1
    shown = own.post("/api/show", {"model": "mine"}).json()
    assert shown["system"] == "Be brief."
    assert shown["details"]["parent_model"] == "caller:latest"
    assert "top_k" in shown["parameters"] and "temperature" in shown["parameters"]
    chat = {"model": "mine", "messages": [{"role": "user", "content": "ECHO"}]}
    assert [message["content"] for message in own.echo("/api/chat", chat)["messages"]] == [
        "Be brief.",
        "?",
        "!",
        "ECHO",
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"model": "mine"}, "neither 'from' or 'files' was specified"),
        ({"model": "a b", "from": "caller"}, "invalid model name"),
        ({"model": "mine", "files": {"../x": "sha256:" + "0" * 64}}, "file path must be relative"),
        ({"model": "mine", "files": {"x.gguf": ""}}, "invalid digest format"),
    ],
)
def test_a_wrong_wish_is_refused(daemon: LiveDaemon, body: dict[str, Any], text: str) -> None:
    response = daemon.post("/api/create", {**body, "stream": False})
    assert (response.status_code, response.json()) == (400, {"error": text})


def test_a_file_is_uploaded_once(own: LiveDaemon) -> None:
    content = tiny_gguf("uploaded")
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    path = f"/api/blobs/{digest}"
    assert own.client.head(path).status_code == 404
    assert own.post(path, content).status_code == 201
    assert own.post(path, content).status_code == 200
    assert own.client.head(path).status_code == 200


def test_a_file_that_is_not_what_was_promised_is_refused(own: LiveDaemon) -> None:
    promised, found = "sha256:" + "0" * 64, hashlib.sha256(b"other").hexdigest()
    response = own.post(f"/api/blobs/{promised}", b"other")
    text = f'digest mismatch, expected "{promised}", got "sha256:{found}"'
    assert (response.status_code, response.json()) == (400, {"error": text})
    assert own.client.head(f"/api/blobs/{promised}").status_code == 404
    assert own.client.head("/api/blobs/sha256:xyz").status_code == 400
    bad = own.post("/api/blobs/sha256:xyz", b"")
    assert (bad.status_code, bad.json()) == (400, {"error": "invalid digest format"})


def test_the_ollama_client_creates(own: LiveDaemon) -> None:
    client = ollama.Client(host=own.url)
    assert client.create("mine", from_="caller", system="Hi.").status == "success"
    assert client.copy("mine", "yours").status == "success"
    assert client.delete("mine").status == "success"
    assert {model.model for model in client.list().models} == {"yours:latest", "caller:latest"}
