"""/v1/messages and count_tokens, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .live import LiveDaemon

PATH = "/v1/messages"
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
CALL = {"id": "call_a1b2c3d4", "name": "weather", "arguments": {"city": "Oslo"}}


def request(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "thinker",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": prompt}],
        **more,
    }


def script(*deltas: dict[str, Any]) -> str:
    return "SCRIPT " + json.dumps([{"sleep_s": 0.03, **delta} for delta in deltas])


def sent(daemon: LiveDaemon, **more: Any) -> dict[str, Any]:
    answer = daemon.post(PATH, request("ECHO", **more)).json()
    message: dict[str, Any] = json.loads(answer["content"][0]["text"])
    return message


def test_a_stream_is_blocks_that_never_overlap(daemon: LiveDaemon) -> None:
    prompt = script({"thinking": "hm"}, {"text": "He"}, {"text": "llo"}, {"tool_calls": [CALL]})
    events = daemon.events(PATH, request(prompt, stream=True, tools=[TOOL]))
    assert all(name == data["type"] for name, data in events)
    start, *blocks, delta, stop = [data for _, data in events]
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    assert message.pop("usage")["input_tokens"] > 0
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "thinker",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    assert [(block["type"].removeprefix("content_block_"), block["index"]) for block in blocks] == [
        ("start", 0),
        ("delta", 0),
        ("stop", 0),
        ("start", 1),
        ("delta", 1),
        ("delta", 1),
        ("stop", 1),
        ("start", 2),
        ("delta", 2),
        ("stop", 2),
    ]
    assert blocks[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert blocks[1]["delta"] == {"type": "thinking_delta", "thinking": "hm"}
    assert blocks[4]["delta"] == {"type": "text_delta", "text": "He"}
    assert blocks[7]["content_block"] == {
        "type": "tool_use",
        "id": "call_a1b2c3d4",
        "name": "weather",
        "input": {},
    }
    assert json.loads(blocks[8]["delta"]["partial_json"]) == {"city": "Oslo"}
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 4
    assert stop == {"type": "message_stop"}


def test_a_whole_answer_has_its_blocks(daemon: LiveDaemon) -> None:
    prompt = script({"thinking": "hm"}, {"text": "Hi"}, {"tool_calls": [CALL]})
    answer = daemon.post(PATH, request(prompt, tools=[TOOL])).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hi"},
        {"type": "tool_use", "id": "call_a1b2c3d4", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        ({"reason": "stop"}, "end_turn", None),
        ({"reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"reason": "length"}, "max_tokens", None),
    ],
)
def test_the_reason_to_stop_is_told(
    daemon: LiveDaemon, finished: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = daemon.post(PATH, request(script({"text": "a", "finished": finished}))).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_tool_results_go_before_the_text_that_comes_with_them(daemon: LiveDaemon) -> None:
    turns = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "ECHO"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"text": "7 C"}]},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    messages = sent(daemon, messages=turns, system=system)["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert messages[0]["content"] == "Be brief."
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[2]["thinking"] == "hm"
    assert (messages[3]["content"], messages[3]["tool_name"]) == ("7 C", "weather")


def test_fields_have_their_native_meaning(daemon: LiveDaemon) -> None:
    message = sent(
        daemon,
        temperature=0.2,
        top_k=3,
        stop_sequences=["END"],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert message["max_tokens"] == 50
    assert (message["sampling"]["temperature"], message["sampling"]["top_k"]) == (0.2, 3)
    assert message["stop"] == ["END"]
    assert [tool["function"]["name"] for tool in message["tools"]] == ["weather"]
    assert message["think"] is True
    assert sent(daemon)["think"] is False


def test_a_budget_for_a_model_that_cannot_think_is_dropped(daemon: LiveDaemon) -> None:
    body = request("hi", model="plain", thinking={"type": "enabled", "budget_tokens": 1024})
    assert daemon.post(PATH, body).status_code == 200


def test_tokens_are_counted(daemon: LiveDaemon) -> None:
    body = {"model": "plain", "messages": [{"role": "user", "content": "hi"}]}
    assert daemon.post(f"{PATH}/count_tokens", body).json() == {"input_tokens": 1}


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({}, 400, "invalid_request_error", "model is required"),
        (
            {"model": "plain", "max_tokens": 0},
            400,
            "invalid_request_error",
            "max_tokens is required and must be positive",
        ),
        (
            {"model": "plain", "max_tokens": 1},
            400,
            "invalid_request_error",
            "messages is required",
        ),
        (request("hi", model="x"), 404, "not_found_error", "model 'x' not found"),
        (request("FAIL internal broken"), 500, "api_error", "broken"),
        (request("FAIL internal broken", stream=True), 500, "api_error", "broken"),
    ],
)
def test_an_error_has_its_shape(
    daemon: LiveDaemon, body: Any, status: int, kind: str, text: str
) -> None:
    response = daemon.post(f"{PATH}?beta=true", body)
    error = response.json()
    assert error.pop("request_id").startswith("req_")
    assert (response.status_code, error) == (
        status,
        {"type": "error", "error": {"type": kind, "message": text}},
    )


def test_an_error_in_mid_stream_is_an_event(daemon: LiveDaemon) -> None:
    prompt = script({"text": "a"}, {"finished": {"reason": "error", "error": "oh"}})
    name, data = daemon.events(PATH, request(prompt, stream=True))[-1]
    assert (name, data["error"]["message"]) == ("error", "oh")
