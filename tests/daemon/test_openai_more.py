"""/v1/completions, the embedding routes, /tokenize and /detokenize."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from .live import LiveDaemon


def completion(daemon: LiveDaemon, prompt: Any, **more: Any) -> dict[str, Any]:
    response = daemon.post("/v1/completions", {"model": "plain", "prompt": prompt, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def script(*deltas: dict[str, Any]) -> str:
    return "SCRIPT " + json.dumps([{"sleep_s": 0.03, **delta} for delta in deltas])


def test_a_completion_has_the_golden_form(daemon: LiveDaemon) -> None:
    answer = completion(daemon, script({"text": "a"}, {"text": "b"}))
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("usage")["completion_tokens"] == 2
    del answer["created"]
    assert answer == {
        "object": "text_completion",
        "model": "plain",
        "system_fingerprint": "fp_ollama",
        "choices": [{"text": "ab", "index": 0, "logprobs": None, "finish_reason": "stop"}],
    }


def test_a_completions_stream_ends_with_usage_and_the_mark(daemon: LiveDaemon) -> None:
    prompt = script({"text": "a"}, {"text": "b"})
    body = {
        "model": "plain",
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "echo": True,
    }
    *events, mark = daemon.events("/v1/completions", body)
    assert mark == ("", "[DONE]")
    *chunks, last, usage = [data for _, data in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt + "ab"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2


def test_usage_can_come_with_every_chunk_of_a_completion(daemon: LiveDaemon) -> None:
    steps = [{"sleep_s": 0.03, "text": text} for text in "ab"]
    options = {"continuous_usage_stats": True, "include_usage": True}
    body = {"model": "plain", "prompt": f"SCRIPT {json.dumps(steps)}", "stream": True}
    events = daemon.events("/v1/completions", {**body, "stream_options": options})
    counts = [data["usage"]["completion_tokens"] for _, data in events[:-1]]
    assert counts[-2:] == [2, 2] and counts == sorted(counts) and counts[0] >= 1


def test_prompts_are_raw_and_each_gives_its_choices(daemon: LiveDaemon) -> None:
    answer = completion(daemon, ["ECHO", "ECHO"], n=2, seed=1, max_tokens=3)
    sent = [json.loads(choice["text"]) for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [message["sampling"]["seed"] for message in sent] == [1, 2, 1, 2]
    assert sent[0]["prompt"] == "ECHO" and sent[0]["parse"] is False
    assert sent[0]["max_tokens"] == 3
    assert answer["usage"]["prompt_tokens"] == 4  # two prompts of two tokens


def test_token_ids_are_a_prompt(daemon: LiveDaemon) -> None:
    assert completion(daemon, [5, 6, 7])["choices"][0]["text"] == "Hello wörld 👋"
    assert len(completion(daemon, [[5, 6], [7]])["choices"]) == 2


def test_logprobs_are_parallel_lists(daemon: LiveDaemon) -> None:
    best = {"token_id": 2, "token": "b", "logprob": -0.1}
    entries = [
        {"token_id": 1, "token": "ab", "logprob": -0.5, "top": [best]},
        {"token_id": 3, "token": "c", "logprob": -0.7},
    ]
    answer = completion(daemon, script({"text": "abc", "logprobs": entries}), logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.7],
        "top_logprobs": [{"b": -0.1}, {}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"prompt": {}}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"best_of": 1, "n": 2}, "best_of must be at least n"),
        ({"best_of": 2, "stream": True}, "best_of cannot be streamed"),
        ({"logprobs": 21}, "logprobs must be between"),
        ({"suffix": "b"}, "does not support insert"),
    ],
)
def test_a_wrong_completion_is_refused(daemon: LiveDaemon, more: Any, text: str) -> None:
    response = daemon.post("/v1/completions", {"model": "plain", "prompt": "a", **more})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


# ----------------------------------------------------------------------- embeddings


def test_embed_has_one_vector_for_each_text(daemon: LiveDaemon) -> None:
    answer = daemon.post("/api/embed", {"model": "embedder", "input": ["a", "bb cc"]}).json()
    assert answer.pop("total_duration") > 0 and answer.pop("load_duration") > 0
    assert answer == {
        "model": "embedder",
        "embeddings": [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]],
        "prompt_eval_count": 3,
    }
    short = daemon.post("/api/embed", {"model": "embedder", "input": "a", "dimensions": 2}).json()
    assert short["embeddings"] == [[0.0, 1.0]]


@pytest.mark.parametrize("empty", [None, "", []])
def test_without_a_text_the_model_is_only_loaded(daemon: LiveDaemon, empty: Any) -> None:
    answer = daemon.post("/api/embed", {"model": "embedder", "input": empty}).json()
    assert answer == {"model": "embedder", "embeddings": []}


def test_the_older_form_has_one_vector(daemon: LiveDaemon) -> None:
    path = "/api/embeddings"
    answer = daemon.post(path, {"model": "embedder", "prompt": "a"}).json()
    assert answer == {"embedding": [0.0, 1.0, 0.0, 0.0]}
    assert daemon.post(path, {"model": "embedder"}).json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("embed", {"model": "embedder", "input": 5}, 400, "invalid input type"),
        ("embed", {"model": "embedder", "input": ["a", 5]}, 400, "invalid input type"),
        ("embed", {"model": "x"}, 404, 'model "x" not found, try pulling it first'),
        ("embeddings", {"model": "x"}, 404, 'model "x" not found, try pulling it first'),
        ("embeddings", {}, 400, "model is required"),
        (
            "embed",
            {"model": "embedder", "input": "too long", "truncate": False},
            400,
            "the input length exceeds the context length",
        ),
    ],
)
def test_an_embedding_that_fails_says_why(
    daemon: LiveDaemon, path: str, body: Any, status: int, text: str
) -> None:
    response = daemon.post(f"/api/{path}", body)
    assert (response.status_code, response.json()) == (status, {"error": text})


def test_openai_embeddings_come_as_numbers_or_as_base64(daemon: LiveDaemon) -> None:
    body = {"model": "embedder", "input": ["a", ""]}
    answer = daemon.post("/v1/embeddings", body).json()
    assert answer["usage"] == {"prompt_tokens": 1, "total_tokens": 1}
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert answer["data"][0]["embedding"] == [0.0, 1.0, 0.0, 0.0]
    answer = daemon.post("/v1/embeddings", {**body, "encoding_format": "BASE64"}).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"encoding_format": "hex"},
            "Invalid value for 'encoding_format' = hex. Supported values: ['float', 'base64'].",
        ),
        ({"input": None}, "invalid input"),
        ({"input": []}, "invalid input"),
        ({"input": [1, 2]}, "invalid input: texts are expected, not token ids"),
    ],
)
def test_wrong_openai_embeddings_are_refused(daemon: LiveDaemon, more: Any, text: str) -> None:
    response = daemon.post("/v1/embeddings", {"model": "embedder", "input": "a", **more})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == text


def test_text_becomes_ids_and_ids_text(daemon: LiveDaemon) -> None:
    found = daemon.post("/tokenize", {"model": "plain", "prompt": "one three"}).json()
    assert found == {"count": 2, "max_model_len": 2048, "tokens": [3, 5]}
    text = daemon.post("/detokenize", {"model": "plain", "tokens": [3, 5]}).json()
    assert text == {"prompt": "3 5"}
