"""/api/generate and /api/chat: what is sent to the worker, and how its answer looks."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

import pytest

from .live import LiveDaemon

CREATED_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z\Z")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def script(*deltas: dict[str, Any]) -> str:
    """With pauses, so that each delta is a chunk of its own."""
    return "SCRIPT " + json.dumps([{"sleep_s": 0.03, **delta} for delta in deltas])


def test_a_generate_stream_has_the_golden_form(daemon: LiveDaemon) -> None:
    prompt = script({"text": "He"}, {"text": "llo"})
    lines = daemon.lines("/api/generate", {"model": "plain", "prompt": prompt})
    for line in lines:
        assert CREATED_AT.match(line.pop("created_at"))
    *chunks, final = lines
    assert chunks == [
        {"model": "plain", "response": "He", "done": False},
        {"model": "plain", "response": "llo", "done": False},
    ]
    assert final.pop("total_duration") > 0
    assert final.pop("load_duration") > 0
    context = final.pop("context")
    assert context[0] == 1 and context[-2:] == [100, 101]
    assert final == {
        "model": "plain",
        "response": "",
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len(context) - 2,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 2,
        "eval_duration": 250_000_000,
    }


def test_a_chat_stream_tells_thinking_text_and_calls(daemon: LiveDaemon) -> None:
    calls = [
        {"id": "call_a1b2c3d4", "name": "f", "arguments": {"city": "Oslo"}},
        {"id": "call_a1b2c3d5", "name": "g", "arguments": {}},
    ]
    prompt = script(
        {"thinking": "Need it"},
        {"text": "ok"},
        {"tool_calls": calls[:1]},
        {"tool_calls": calls[1:]},
    )
    lines = daemon.lines("/api/chat", {"model": "thinker", "messages": messages(prompt)})
    told = [line["message"] for line in lines]
    assert told == [
        {"role": "assistant", "content": "", "thinking": "Need it"},
        {"role": "assistant", "content": "ok"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_a1b2c3d4",
                    "function": {"index": 0, "name": "f", "arguments": {"city": "Oslo"}},
                }
            ],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_a1b2c3d5", "function": {"index": 1, "name": "g", "arguments": {}}}
            ],
        },
        {"role": "assistant", "content": ""},
    ]
    assert [line["done"] for line in lines] == [False] * 4 + [True]
    assert lines[-1]["done_reason"] == "stop"
    assert "context" not in lines[-1]


def test_an_answer_that_is_not_streamed_is_one_object(daemon: LiveDaemon) -> None:
    prompt = script({"thinking": "a"}, {"thinking": "b"}, {"text": "c"}, {"text": "d"})
    body = {"model": "thinker", "messages": messages(prompt), "stream": False}
    answer = daemon.post("/api/chat", body).json()
    assert answer["message"] == {"role": "assistant", "content": "cd", "thinking": "ab"}
    assert answer["done"] is True


def test_logprobs_come_with_their_text_and_only_when_asked_for(daemon: LiveDaemon) -> None:
    logprob = {"token_id": 1, "token": "é", "logprob": -0.5, "top": []}
    best = {"token_id": 2, "token": "e", "logprob": -0.25}
    delta = {"text": "é", "logprobs": [{**logprob, "top": [best]}]}
    body = {"model": "plain", "prompt": script(delta), "logprobs": True, "top_logprobs": 1}
    chunk, _ = daemon.lines("/api/generate", body)
    assert chunk["logprobs"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [0xC3, 0xA9],
            "top_logprobs": [{"token": "e", "logprob": -0.25, "bytes": [0x65]}],
        }
    ]
    sent = daemon.echo("/api/generate", {"model": "plain", "prompt": "ECHO", "logprobs": True})
    assert sent["sampling"]["num_logprobs"] == 0
    sent = daemon.echo("/api/generate", {"model": "plain", "prompt": "ECHO", "top_logprobs": 3})
    assert "num_logprobs" not in sent["sampling"]


def test_the_end_by_length_and_the_cut_prompt_are_told(daemon: LiveDaemon) -> None:
    prompt = script({"text": "a", "finished": {"reason": "length", "num_cached_tokens": 3}})
    body = {"model": "plain", "prompt": prompt, "options": {"num_ctx": 4}, "stream": False}
    answer = daemon.post("/api/generate", body).json()
    assert answer["done_reason"] == "length"
    assert answer["llmd"] == {"truncated_tokens": 5, "cached_tokens": 3}


# ------------------------------------------------------------------- what is sent


def test_options_go_before_the_models_and_these_before_the_defaults(daemon: LiveDaemon) -> None:
    body: dict[str, Any] = {"model": "caller", "messages": messages("ECHO")}
    sampling = daemon.echo("/api/chat", body)["sampling"]
    assert (sampling["temperature"], sampling.get("top_k", 40)) == (0.5, 40)
    options = {"temperature": 0, "top_k": 7.9, "seed": 3, "stop": ["x"], "mirostat": None, "?": 1}
    sent = daemon.echo("/api/chat", {**body, "options": options})
    assert sent["sampling"]["temperature"] == 0
    assert sent["sampling"]["top_k"] == 7
    assert sent["sampling"]["seed"] == 3
    assert sent["stop"] == ["x"]


@pytest.mark.parametrize(
    ("num_predict", "max_tokens"), [(None, 20480), (-1, 20480), (-2, 20480), (0, 0), (9, 9)]
)
def test_num_predict_bounds_the_answer(
    daemon: LiveDaemon, num_predict: int | None, max_tokens: int
) -> None:
    body = {"model": "plain", "prompt": "ECHO", "options": {"num_predict": num_predict}}
    assert daemon.echo("/api/generate", body)["max_tokens"] == max_tokens


def test_without_shift_the_answer_ends_with_the_window(daemon: LiveDaemon) -> None:
    sent = daemon.echo("/api/generate", {"model": "plain", "prompt": "ECHO", "shift": False})
    assert sent["shift"] is False
    assert "max_tokens" not in sent


def test_the_models_system_text_goes_first_unless_one_is_given(daemon: LiveDaemon) -> None:
    own = {"role": "system", "content": "You are a caller."}
    user = {"role": "user", "content": "ECHO"}
    assert daemon.echo("/api/chat", {"model": "caller", "messages": [user]})["messages"] == [
        own,
        user,
    ]
    mine = {"role": "SYSTEM", "content": "mine"}
    sent = daemon.echo("/api/chat", {"model": "caller", "messages": [mine, user]})
    assert sent["messages"] == [{"role": "system", "content": "mine"}, user]
    sent = daemon.echo("/api/generate", {"model": "caller", "prompt": "ECHO", "system": "mine"})
    assert sent["messages"] == [{"role": "system", "content": "mine"}, user]


def test_raw_goes_as_it_stands(daemon: LiveDaemon) -> None:
    body = {"model": "caller", "prompt": "ECHO", "raw": True}
    sent = daemon.echo("/api/generate", body)
    assert (sent["prompt"], sent["parse"]) == ("ECHO", False)
    assert "messages" not in sent
    assert "context" not in daemon.post("/api/generate", {**body, "stream": False}).json()


def test_the_order_of_a_tools_properties_survives(daemon: LiveDaemon) -> None:
    properties = {name: {"type": "string"} for name in ("z", "a", "m")}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    sent = daemon.echo(
        "/api/chat", {"model": "caller", "messages": messages("ECHO"), "tools": [tool]}
    )
    assert sent["tools"] == [tool]
    assert list(sent["tools"][0]["function"]["parameters"]["properties"]) == ["z", "a", "m"]


def test_tool_turns_reach_the_template_under_every_name(daemon: LiveDaemon) -> None:
    turns = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "thinking": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_name": "f", "tool_call_id": "c1", "content": "7"},
        {"role": "user", "content": "ECHO"},
    ]
    sent = daemon.echo("/api/chat", {"model": "thinker", "messages": turns})["messages"]
    assert sent[1] == {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }
    assert sent[2] == {
        "role": "tool",
        "content": "7",
        "tool_name": "f",
        "name": "f",
        "tool_call_id": "c1",
    }


@pytest.mark.parametrize(
    ("model", "think", "sent"),
    [
        ("thinker", None, True),
        ("thinker", False, False),
        ("thinker", "low", "low"),
        ("plain", None, None),
        ("plain", False, None),
    ],
)
def test_a_model_that_can_think_does_unless_told_not_to(
    daemon: LiveDaemon, model: str, think: Any, sent: Any
) -> None:
    body = {"model": model, "messages": messages("ECHO"), "think": think}
    assert daemon.echo("/api/chat", body).get("think") == sent


def test_a_schema_reaches_the_worker_and_an_empty_format_does_not(daemon: LiveDaemon) -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    body = {"model": "plain", "prompt": "ECHO"}
    assert daemon.echo("/api/generate", {**body, "format": schema})["format"] == schema
    assert daemon.echo("/api/generate", {**body, "format": "json"})["format"] == "json"
    assert "format" not in daemon.echo("/api/generate", {**body, "format": ""})


def test_an_earlier_context_is_put_before_the_prompt(daemon: LiveDaemon) -> None:
    body = {"model": "plain", "prompt": "ECHO", "context": [5, 6]}
    assert daemon.echo("/api/generate", body)["context_ids"] == [5, 6]


def test_the_prompt_can_be_rendered_without_being_run(daemon: LiveDaemon) -> None:
    body = {"model": "plain", "prompt": "hi", "_debug_render_only": True}
    answer = daemon.post("/api/generate", body).json()
    del answer["created_at"]
    assert answer == {
        "model": "plain",
        "response": "",
        "done": False,
        "_debug_info": {"rendered_template": "<user>hi", "image_count": 0},
    }


def test_curl_without_a_content_type_is_understood(daemon: LiveDaemon) -> None:
    response = daemon.client.post(
        "/api/generate",
        content='{"model":"plain","prompt":"hi","stream":false}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert response.json()["response"] == "Hello wörld 👋"


# --------------------------------------------------------------- loading, leaving


def test_an_empty_prompt_loads_and_keep_alive_zero_unloads(daemon: LiveDaemon) -> None:
    answer = daemon.post("/api/generate", {"model": "filler", "keep_alive": -1}).json()
    del answer["created_at"]
    assert answer == {"model": "filler", "response": "", "done": True, "done_reason": "load"}
    rows = {row["name"]: row for row in daemon.client.get("/api/ps").json()["models"]}
    assert int(rows["filler:latest"]["expires_at"][:4]) > 2200
    answer = daemon.post("/api/chat", {"model": "filler", "keep_alive": "0"}).json()
    del answer["created_at"]
    assert answer == {
        "model": "filler",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "unload",
    }
    names = [row["name"] for row in daemon.client.get("/api/ps").json()["models"]]
    assert "filler:latest" not in names
    again = daemon.post("/api/generate", {"model": "filler", "keep_alive": 0}).json()
    assert again["done_reason"] == "unload"


def running(daemon: LiveDaemon) -> dict[str, Any]:
    rows = daemon.client.get("/api/ps").json()["models"]
    return next(row for row in rows if row["name"] == "plain:latest")


def wait_until(condition: Any, timeout_s: float = 5.0) -> float:
    """The time it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not become true"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize(
    "path", ["/api/generate", "/api/chat", "/v1/chat/completions", "/v1/chat/completions?stream"]
)
def test_a_client_that_leaves_before_the_first_token_ends_its_sequence(
    daemon: LiveDaemon, path: str
) -> None:
    daemon.post("/api/generate", {"model": "plain"})
    body = {
        "model": "plain",
        "prompt": "HANG",
        "messages": messages("HANG"),
        "stream": path.endswith("stream"),
    }
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", daemon.port)) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        wait_until(lambda: running(daemon)["running"] == 1)
        assert running(daemon)["kv"]["blocks_in_use"] == 3
    assert wait_until(lambda: running(daemon)["running"] == 0) < 1.0
    assert running(daemon)["kv"]["blocks_in_use"] == 0
