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

from .live import LiveDaemon, live_daemon

SAMPLES = Path(__file__).with_name("wire")
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_a1b2c3d4", "name": "add", "arguments": {"a": 1}}


def script(*deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that the scripted worker answers with these; slow enough not to be merged."""
    steps = [{"sleep_s": 0.05, **delta} for delta in deltas]
    return [{"role": "user", "content": "SCRIPT " + json.dumps(steps)}]


FULL = script({"thinking": "Hm."}, {"text": "A"}, {"text": " b"}, {"tool_calls": [CALL]})
CUT = script({"text": "A"}, {"finished": {"reason": "length"}})
BROKEN = script({"text": "A"}, {"finished": {"reason": "error", "error": "no luck"}})
LOGPROB = {"token_id": 1, "token": "A", "logprob": -0.5, "bytes": [65], "top": []}

# Name of the sample, method, path, and the bodies that are sent one after the other.
REQUESTS: list[tuple[str, str, str, list[Any]]] = [
    ("root", "GET", "/", [None]),
    ("version", "GET", "/api/version", [None]),
    ("status", "GET", "/api/status", [None]),
    ("unknown-path", "GET", "/nope", [None]),
    ("wrong-verb", "GET", "/api/generate", [None]),
    (
        "generate",
        "POST",
        "/api/generate",
        [
            {"model": "plain", "prompt": "hi", "stream": False},
            {"model": "plain", "prompt": script({"text": "A"}, {"text": " b"})[0]["content"]},
            {"model": "plain", "prompt": CUT[0]["content"]},
            {"model": "plain", "prompt": BROKEN[0]["content"]},
            {"model": "plain", "prompt": "hi", "raw": True, "stream": False},
            {"model": "plain", "prompt": "hi", "_debug_render_only": True},
            {"model": "plain"},
            {"model": "plain", "keep_alive": 0},
            {"model": "plain", "prompt": "FAIL too_long the prompt is too long"},
            {},
            {"model": "x", "prompt": "hi"},
            {"model": "plain", "prompt": "hi", "options": {"temperature": "hot"}},
        ],
    ),
    (
        "chat",
        "POST",
        "/api/chat",
        [
            {"model": "thinker", "messages": USER, "stream": False},
            {"model": "thinker", "messages": FULL, "tools": [TOOL]},
            {"model": "thinker", "messages": FULL, "tools": [TOOL], "stream": False},
            {
                "model": "plain",
                "messages": script({"text": "A", "logprobs": [LOGPROB]}),
                "logprobs": True,
            },
            {"model": "plain", "messages": CUT},
            {"model": "plain", "messages": BROKEN},
            {"model": "plain", "messages": []},
            {"model": "plain", "messages": [], "keep_alive": 0},
            {"model": "plain", "messages": USER, "tools": [TOOL]},
            {},
        ],
    ),
    (
        "embed",
        "POST",
        "/api/embed",
        [
            {"model": "embedder", "input": "hi"},
            {"model": "embedder", "input": ["a", "bc"], "dimensions": 2},
            {"model": "embedder", "input": []},
            {"model": "embedder", "input": 5},
            {"model": "x", "input": "hi"},
        ],
    ),
    (
        "embeddings",
        "POST",
        "/api/embeddings",
        [{"model": "embedder", "prompt": "hi"}, {"model": "embedder", "prompt": ""}, {}],
    ),
    (
        "openai-chat",
        "POST",
        "/v1/chat/completions",
        [
            {"model": "plain", "messages": USER},
            {"model": "thinker", "messages": FULL, "tools": [TOOL]},
            {
                "model": "thinker",
                "messages": FULL,
                "tools": [TOOL],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            {"model": "plain", "messages": CUT, "stream": True},
            {"model": "plain", "messages": BROKEN, "stream": True},
            {"model": "plain"},
            {"model": "x", "messages": USER},
        ],
    ),
    (
        "openai-completions",
        "POST",
        "/v1/completions",
        [
            {"model": "plain", "prompt": "hi"},
            {
                "model": "plain",
                "prompt": script({"text": "A"})[0]["content"],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            {"model": "plain", "prompt": {}},
        ],
    ),
    (
        "openai-embeddings",
        "POST",
        "/v1/embeddings",
        [
            {"model": "embedder", "input": "hi"},
            {"model": "embedder", "input": ["hi"], "encoding_format": "base64"},
            {"model": "embedder", "input": "hi", "encoding_format": "hex"},
        ],
    ),
    ("openai-models", "GET", "/v1/models", [None]),
    ("openai-model", "GET", "/v1/models/plain", [None]),
    ("openai-no-model", "GET", "/v1/models/x", [None]),
    (
        "responses",
        "POST",
        "/v1/responses",
        [
            {"model": "plain", "input": "hi"},
            {
                "model": "thinker",
                "input": FULL[0]["content"],
                "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
                "stream": True,
            },
            {"model": "plain", "input": CUT[0]["content"], "stream": True},
            {"model": "plain", "input": BROKEN[0]["content"], "stream": True},
            {"model": "plain", "input": [{"type": "odd"}]},
        ],
    ),
    (
        "anthropic",
        "POST",
        "/v1/messages",
        [
            {"model": "plain", "max_tokens": 9, "messages": USER},
            {
                "model": "thinker",
                "max_tokens": 9,
                "messages": FULL,
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "stream": True,
            },
            {"model": "plain", "max_tokens": 9, "messages": CUT, "stream": True},
            {"model": "plain", "max_tokens": 9, "messages": BROKEN, "stream": True},
            {"model": "plain", "messages": USER},
            {"model": "x", "max_tokens": 9, "messages": USER},
        ],
    ),
    (
        "anthropic-count",
        "POST",
        "/v1/messages/count_tokens",
        [{"model": "plain", "messages": USER}, {"model": "plain"}],
    ),
    ("tokenize", "POST", "/tokenize", [{"model": "plain", "prompt": "hi there"}, {}]),
    ("detokenize", "POST", "/detokenize", [{"model": "plain", "tokens": [2, 5]}]),
    ("show", "POST", "/api/show", [{"model": "plain"}, {}, {"model": "x"}]),
    ("tags", "GET", "/api/tags", [None]),
    ("pull", "POST", "/api/pull", [{"model": "new"}, {"model": "new", "stream": False}, {}]),
    ("pull-unknown", "POST", "/api/pull", [{"model": "unknown"}]),
    ("push", "POST", "/api/push", [{}]),
    ("create", "POST", "/api/create", [{"model": "mine"}, {"model": "mine", "from": "plain"}]),
    (
        "copy",
        "POST",
        "/api/copy",
        [
            {"source": "plain", "destination": "twin"},
            {"source": "x", "destination": "y"},
            {"source": "plain", "destination": ""},
        ],
    ),
    ("delete", "DELETE", "/api/delete", [{"model": "twin"}, {"model": "x"}, {"model": "a b"}]),
    ("blob-bad-digest", "POST", "/api/blobs/sha256:0", ["x"]),
    ("blob-mismatch", "POST", "/api/blobs/sha256:" + "0" * 64, ["x"]),
    ("me", "POST", "/api/me", [None]),
    ("signout", "POST", "/api/signout", [None]),
]

MASKS = [
    (rb"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)", b"TIME"),
    (rb"date: [^\r]+", b"date: DATE"),
    (rb'("(?:total|load|prompt_eval|eval)_duration"):\d+', rb"\1:NS"),
    (rb'("(?:created|created_at|completed_at)"):\d{9,}', rb"\1:SECONDS"),
    (rb'/[^\s"]*/blobs/', b"BLOBS/"),
    (rb',"runtime":\{[^{}]*\}', b""),  # of a model that happens to be loaded
    (rb'"(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|req_)[0-9a-z]{8,}', rb'"\1ID'),
]
NUM_TRIES = 5  # two deltas that wait for a busy daemon come as one line; seldom, and rightly


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """One of this file's own: the order of its requests is part of the samples."""
    with live_daemon(tmp_path_factory.mktemp("wire")) as running:
        yield running


def exchange(daemon: LiveDaemon, method: str, path: str, body: Any) -> bytes:
    """The answer as it came over the socket."""
    content = b"" if body is None else json.dumps(body).encode()
    if isinstance(body, str):
        content = body.encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    length = f"Content-Length: {len(content)}\r\n\r\n" if content else "\r\n"
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
    found = {}
    for body in bodies:
        line = request_line(method, path, body)
        for _ in range(NUM_TRIES):
            found[line] = masked(exchange(daemon, method, path, body)) + "\n\n"
            if found[line] == known.get(line) or os.environ.get("LLMD_WRITE_SAMPLES"):
                break
    if os.environ.get("LLMD_WRITE_SAMPLES"):
        SAMPLES.mkdir(exist_ok=True)
        text = "".join(line + answer for line, answer in found.items())
        file.write_text(text, encoding="utf-8")
    assert found == samples_in(file)
