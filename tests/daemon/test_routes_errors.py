"""Every error of the contract: status, text and shape."""

from __future__ import annotations

from typing import Any

import pytest

from .live import LiveDaemon

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THINK = '"high", "medium", "low", "max", true, or false'

# path, body, status, text: of the native routes.
NATIVE: list[tuple[str, Any, int, str]] = [
    ("generate", "", 400, "missing request body"),
    ("generate", "  \n", 400, "missing request body"),
    ("chat", "", 400, "missing request body"),
    ("generate", {}, 404, "model '' not found"),
    ("chat", {}, 400, "model is required"),
    ("show", {}, 400, "model is required"),
    ("generate", {"model": "x"}, 404, "model 'x' not found"),
    ("chat", {"model": "x"}, 404, "model 'x' not found"),
    ("show", {"model": "x"}, 404, "model 'x' not found"),
    ("generate", {"model": "a b"}, 400, "invalid model name"),
    ("pull", {"model": "a b"}, 400, "invalid model name"),
    (
        "generate",
        {"model": "x:cloud"},
        403,
        "ollama cloud is disabled: remote model is unavailable",
    ),
    (
        "chat",
        {"model": "x:7b-cloud"},
        403,
        "ollama cloud is disabled: remote model is unavailable",
    ),
    ("generate", {"model": "x:cloud:local"}, 400, "use either :local or :cloud, not both"),
    (
        "generate",
        {"model": "plain", "prompt": "a", "raw": True, "system": "s"},
        400,
        "raw mode does not support template, system, or context",
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "raw": True, "context": [1]},
        400,
        "raw mode does not support template, system, or context",
    ),
    ("generate", {"model": "embedder", "prompt": "a"}, 400, '"embedder" does not support generate'),
    ("chat", {"model": "embedder", "messages": USER}, 400, '"embedder" does not support chat'),
    (
        "chat",
        {"model": "plain", "messages": USER, "tools": [TOOL]},
        400,
        "registry.ollama.ai/library/plain:latest does not support tools",
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "suffix": "b"},
        400,
        "registry.ollama.ai/library/plain:latest does not support insert",
    ),
    (
        "chat",
        {"model": "plain", "messages": [{"role": "user", "content": "a", "images": ["AA=="]}]},
        400,
        "registry.ollama.ai/library/plain:latest does not support vision",
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "think": True},
        400,
        '"plain" does not support thinking',
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "think": "extreme"},
        400,
        f'invalid think value: "extreme" (must be {THINK})',
    ),
    (
        "chat",
        {"model": "plain", "messages": USER, "think": 3},
        400,
        f"think must be a boolean or string ({THINK})",
    ),
    (
        "generate",
        {"model": "plain", "top_logprobs": 21},
        400,
        "top_logprobs must be between 0 and 20",
    ),
    (
        "generate",
        {"model": "plain", "keep_alive": "300"},
        400,
        'time: missing unit in duration "300"',
    ),
    ("chat", {"model": "plain", "keep_alive": "abc"}, 400, 'time: invalid duration "abc"'),
    (
        "generate",
        {"model": "plain", "keep_alive": "5x"},
        400,
        'time: unknown unit "x" in duration "5x"',
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "format": "yaml"},
        400,
        'invalid format: "\\"yaml\\""; expected "json" or a valid JSON Schema object',
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "options": {"temperature": "hot"}},
        400,
        'option "temperature" must be of type float32',
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "options": {"num_predict": True}},
        400,
        'option "num_predict" must be of type integer',
    ),
    (
        "generate",
        {"model": "plain", "prompt": "a", "options": {"stop": "x"}},
        400,
        'option "stop" must be of type array',
    ),
    (
        "chat",
        {"model": "plain", "messages": USER, "options": {"stop": ["x", 1]}},
        400,
        'option "stop" must be of an array of strings',
    ),
    ("copy", {"source": "plain", "destination": ""}, 400, 'destination "" is invalid'),
    ("copy", {"source": "a b", "destination": "c"}, 400, 'source "a b" is invalid'),
    ("copy", {"source": "x", "destination": "c"}, 404, 'model "x" not found'),
    ("push", {}, 400, "model is required"),
    ("me", {}, 401, "unauthorized"),
    (
        "experimental/web_search",
        {},
        403,
        "ollama cloud is disabled: web access is unavailable",
    ),
    (
        "generate",
        {"model": "plain", "prompt": "FAIL too_long the prompt is too long", "stream": False},
        400,
        "the prompt is too long",
    ),
    ("generate", {"model": "plain", "prompt": "FAIL internal broken"}, 500, "broken"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), NATIVE)
def test_a_native_error_is_one_text(
    daemon: LiveDaemon, path: str, body: Any, status: int, text: str
) -> None:
    response = daemon.post(f"/api/{path}", body)
    assert (response.status_code, response.json()) == (status, {"error": text})
    assert response.headers["content-type"].startswith("application/json")


# The first wrong thing in the order of the checks decides.
ORDER: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"model": "a b", "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
    ("generate", {"model": "x", "raw": True, "system": "s"}, "model 'x' not found"),
    (
        "generate",
        {"model": "plain", "prompt": "a", "raw": True, "system": "s", "think": True},
        "raw mode does not support template, system, or context",
    ),
    (
        "generate",
        {"model": "embedder", "prompt": "a", "think": True, "options": {"top_k": "x"}},
        '"embedder" does not support thinking',
    ),
    (
        "generate",
        {"model": "embedder", "prompt": "a", "suffix": "s", "options": {"top_k": "x"}},
        '"embedder" does not support generate',
    ),
    (
        "chat",
        {"model": "plain", "messages": USER, "tools": [TOOL], "options": {"top_k": "x"}},
        "registry.ollama.ai/library/plain:latest does not support tools",
    ),
]


@pytest.mark.parametrize(("path", "body", "text"), ORDER)
def test_the_order_of_the_checks_decides(
    daemon: LiveDaemon, path: str, body: dict[str, Any], text: str
) -> None:
    assert daemon.post(f"/api/{path}", body).json() == {"error": text}


OPENAI: list[tuple[str, Any, int, str, str]] = [
    (
        "chat/completions",
        {"model": "plain"},
        400,
        "invalid_request_error",
        "[] is too short - 'messages'",
    ),
    (
        "chat/completions",
        {"model": "x", "messages": USER},
        404,
        "not_found_error",
        "model 'x' not found",
    ),
    (
        "chat/completions",
        {
            "model": "plain",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
                }
            ],
        },
        400,
        "invalid_request_error",
        "image URLs are not currently supported, please use base64 encoded data instead",
    ),
    (
        "chat/completions",
        {
            "model": "caller",
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ],
        },
        400,
        "invalid_request_error",
        "invalid tool call arguments",
    ),
    (
        "chat/completions",
        {"model": "plain", "messages": [{"role": "user", "content": "FAIL internal broken"}]},
        500,
        "api_error",
        "broken",
    ),
    (
        "chat/completions",
        {"model": "plain", "messages": USER, "n": 0},
        400,
        "invalid_request_error",
        "n must be between 1 and 128",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "text"), OPENAI)
def test_an_openai_error_is_an_object(
    daemon: LiveDaemon, path: str, body: Any, status: int, kind: str, text: str
) -> None:
    response = daemon.post(f"/v1/{path}", body)
    assert response.status_code == status
    assert response.json() == {
        "error": {"message": text, "type": kind, "param": None, "code": None}
    }


@pytest.mark.parametrize(
    "body", ["{", '{"model": 5}', '{"model": "plain", "prompt": ["a"]}', "[]", "[" * 5000, b"\xff"]
)
def test_a_body_that_is_not_what_it_should_be_is_a_400(
    daemon: LiveDaemon, body: str | bytes
) -> None:
    response = daemon.post("/api/generate", body)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]


def test_what_is_not_there_is_told_in_plain_words(daemon: LiveDaemon) -> None:
    nowhere = daemon.client.get("/nope")
    assert (nowhere.status_code, nowhere.text) == (404, "404 page not found")
    wrong_verb = daemon.client.get("/api/generate")
    assert (wrong_verb.status_code, wrong_verb.text) == (405, "405 method not allowed")
    assert wrong_verb.headers["content-type"].startswith("text/plain")


def test_a_deleted_name_must_exist(daemon: LiveDaemon) -> None:
    missing = daemon.client.request("DELETE", "/api/delete", json={"model": "x"})
    assert (missing.status_code, missing.json()) == (404, {"error": "model 'x' not found"})
    invalid = daemon.client.request("DELETE", "/api/delete", json={"name": "a b"})
    assert (invalid.status_code, invalid.json()) == (400, {"error": 'name "a b" is invalid'})


def test_an_error_in_mid_stream_is_the_last_line(daemon: LiveDaemon) -> None:
    script = (
        'SCRIPT [{"text": "He"}, {"sleep_s": 0.05, "finished": {"reason": "error", "error": "oh"}}]'
    )
    first, last = daemon.lines("/api/generate", {"model": "plain", "prompt": script})
    assert (first["response"], first["done"]) == ("He", False)
    assert last == {"error": "oh"}


def test_an_error_in_mid_stream_is_the_last_event(daemon: LiveDaemon) -> None:
    script = (
        'SCRIPT [{"text": "He"}, {"sleep_s": 0.05, "finished": {"reason": "error", "error": "oh"}}]'
    )
    body = {"model": "plain", "stream": True, "messages": [{"role": "user", "content": script}]}
    first, last = daemon.events("/v1/chat/completions", body)
    assert first[1]["choices"][0]["delta"]["content"] == "He"
    assert last[1]["error"]["message"] == "oh"
