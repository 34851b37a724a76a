"""/v1/chat/completions, byte for byte where clients care."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .live import LiveDaemon

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def request(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "thinker", "messages": [{"role": "user", "content": prompt}], **more}


def script(*deltas: dict[str, Any]) -> str:
    return "SCRIPT " + json.dumps([{"sleep_s": 0.03, **delta} for delta in deltas])


def sent(daemon: LiveDaemon, **more: Any) -> dict[str, Any]:
    answer = daemon.post(PATH, request("ECHO", **more)).json()
    message: dict[str, Any] = json.loads(answer["choices"][0]["message"]["content"])
    return message


def test_a_stream_has_the_golden_form(daemon: LiveDaemon) -> None:
    call = {"id": "call_a1b2c3d4", "name": "weather", "arguments": {"city": "Oslo"}}
    prompt = script({"thinking": "hm"}, {"text": "He"}, {"text": "llo"}, {"tool_calls": [call]})
    body = request(prompt, stream=True, stream_options={"include_usage": True})
    events = daemon.events(PATH, body)
    assert events.pop() == ("", "[DONE]")
    chunks = [data for _, data in events]
    heads = {
        (chunk.pop("id"), chunk.pop("created"), chunk.pop("object"), chunk.pop("model"))
        for chunk in chunks
    }
    assert len(heads) == 1
    assert next(iter(heads))[2:] == ("chat.completion.chunk", "thinker")
    for chunk in chunks:
        assert chunk.pop("system_fingerprint") == "fp_ollama"
    *told, last = chunks
    usage = last.pop("usage")
    assert last == {"choices": []}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [chunk["choices"][0] for chunk in told] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "reasoning": "hm"},
            "finish_reason": None,
        },
        {"index": 0, "delta": {"content": "He"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "llo"}, "finish_reason": None},
        {
            "index": 0,
            "delta": {
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_a1b2c3d4",
                        "index": 0,
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            "finish_reason": None,
        },
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
    ]


def test_a_whole_answer_has_the_golden_form(daemon: LiveDaemon) -> None:
    answer = daemon.post(PATH, request(script({"thinking": "hm"}, {"text": "Hi"}))).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("usage")["completion_tokens"] == 2
    assert answer == {
        "object": "chat.completion",
        "model": "thinker",
        "system_fingerprint": "fp_ollama",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "reasoning": "hm"},
                "finish_reason": "stop",
            }
        ],
    }


def test_choices_run_side_by_side_with_seeds_of_their_own(daemon: LiveDaemon) -> None:
    answer = daemon.post(PATH, request("ECHO", n=3, seed=5)).json()
    seeds = [
        json.loads(choice["message"]["content"])["sampling"]["seed"]
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]
    assert seeds == [5, 6, 7]
    events = daemon.events(PATH, request(script({"text": "a"}), n=2, stream=True))
    ends = [
        data["choices"][0]["index"]
        for _, data in events[:-1]
        if data["choices"][0]["finish_reason"] == "stop"
    ]
    assert sorted(ends) == [0, 1]


def test_fields_have_their_native_meaning(daemon: LiveDaemon) -> None:
    message = sent(
        daemon,
        max_tokens=5,
        max_completion_tokens=9,
        stop="x",
        presence_penalty=0.5,
        logit_bias={"7": -100},
        min_tokens=2,
        ignore_eos=True,
        reasoning_effort="minimal",
        response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        logprobs=True,
        top_logprobs=2,
    )
    sampling = message["sampling"]
    assert message["max_tokens"] == 9
    assert message["stop"] == ["x"]
    assert message["think"] == "low"
    assert message["format"] == {"type": "object"}
    assert (sampling["temperature"], sampling["top_p"]) == (1.0, 1.0)
    assert sampling["logit_bias"] == {"7": -100.0}
    assert (sampling["min_tokens"], sampling["ignore_eos"]) == (2, True)
    assert (sampling["presence_penalty"], sampling["num_logprobs"]) == (0.5, 2)


def test_options_and_keep_alive_are_extras_and_named_fields_go_first(daemon: LiveDaemon) -> None:
    message = sent(daemon, temperature=0.1, options={"temperature": 0.9, "top_k": 3})
    assert (message["sampling"]["temperature"], message["sampling"]["top_k"]) == (0.1, 3)
    bad = daemon.post(PATH, request("hi", keep_alive="300"))
    assert bad.status_code == 400


def test_parts_of_text_become_one_message_and_developer_is_system(daemon: LiveDaemon) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "model": "thinker",
        "messages": [
            {"role": "developer", "content": parts},
            {"role": "user", "content": "ECHO"},
        ],
    }
    content = daemon.post(PATH, body).json()["choices"][0]["message"]["content"]
    assert json.loads(content)["messages"][0] == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    ("choice", "offered"),
    [(None, ["weather", "time"]), ("auto", ["weather", "time"]), ("none", [])],
)
def test_tools_are_offered_as_the_choice_says(
    daemon: LiveDaemon, choice: Any, offered: list[str]
) -> None:
    message = sent(daemon, tools=[WEATHER, TIME], tool_choice=choice)
    names = [tool["function"]["name"] for tool in message.get("tools", [])]
    assert names == offered
    assert "format" not in message


def test_a_call_that_is_insisted_on_is_asked_of_the_worker(daemon: LiveDaemon) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    message = sent(daemon, tools=[WEATHER, TIME], tool_choice=named)
    assert [tool["function"]["name"] for tool in message["tools"]] == ["weather"]
    assert message["must_call"] is True
    message = sent(daemon, tools=[WEATHER, TIME], tool_choice="required")
    assert (len(message["tools"]), message["must_call"]) == (2, True)
    assert "must_call" not in sent(daemon, tools=[WEATHER, TIME])


def test_only_one_call_is_passed_on_where_parallel_ones_are_not_wanted(daemon: LiveDaemon) -> None:
    calls = [{"id": f"call_{n}", "name": "time", "arguments": {}} for n in range(3)]
    prompt = script({"tool_calls": calls[:2]}, {"tool_calls": calls[2:]})
    body = request(prompt, tools=[TIME], parallel_tool_calls=False)
    found = daemon.post(PATH, body).json()["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in found] == ["call_0"]


def test_logprobs_have_their_lists(daemon: LiveDaemon) -> None:
    logprob = {"token_id": 1, "token": "a", "logprob": -0.5}
    body = request(script({"text": "a", "logprobs": [logprob]}), logprobs=True)
    choice = daemon.post(PATH, body).json()["choices"][0]
    assert choice["logprobs"]["content"] == [
        {"top_logprobs": [], "token": "a", "logprob": -0.5, "bytes": [97]}
    ]


def test_usage_can_come_with_every_chunk(daemon: LiveDaemon) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = request(script({"text": "a"}, {"text": "b"}), stream=True, stream_options=options)
    counts = [data["usage"]["completion_tokens"] for _, data in daemon.events(PATH, body)[:-1]]
    assert counts == [1, 2, 2, 2]
