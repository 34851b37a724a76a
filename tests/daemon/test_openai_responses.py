"""/v1/responses, event by event, and /openapi.json."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from llmd.daemon.app import ROUTES

from .live import LiveDaemon

PATH = "/v1/responses"
CALL = {"id": "call_a1b2c3d4", "name": "f", "arguments": {"a": 1}}


def script(*deltas: dict[str, Any]) -> str:
    return "SCRIPT " + json.dumps([{"sleep_s": 0.03, **delta} for delta in deltas])


def request(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "thinker", "input": prompt, **more}


def sent(daemon: LiveDaemon, **more: Any) -> dict[str, Any]:
    answer = daemon.post(PATH, request("ECHO", **more)).json()
    message: dict[str, Any] = json.loads(answer["output"][0]["content"][0]["text"])
    return message


def test_a_stream_tells_every_step_in_order(daemon: LiveDaemon) -> None:
    prompt = script({"thinking": "hm"}, {"text": "He"}, {"text": "llo"}, {"tool_calls": [CALL]})
    events = daemon.events(PATH, request(prompt, stream=True))
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name.removeprefix("response.") for name, data in events if name == data["type"]] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = events[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[1]["content"][0]["text"] == "Hello"
    assert (output[2]["call_id"], output[2]["arguments"]) == ("call_a1b2c3d4", '{"a": 1}')


def test_an_answer_cut_by_its_length_is_incomplete(daemon: LiveDaemon) -> None:
    prompt = script({"text": "a", "finished": {"reason": "length"}})
    answer = daemon.post(PATH, request(prompt)).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    name, _ = daemon.events(PATH, request(prompt, stream=True))[-1]
    assert name == "response.incomplete"


def test_a_failure_in_mid_stream_is_the_last_event(daemon: LiveDaemon) -> None:
    prompt = script({"text": "a"}, {"finished": {"reason": "error", "error": "oh"}})
    name, data = daemon.events(PATH, request(prompt, stream=True))[-1]
    assert (name, data["response"]["error"]["message"]) == ("response.failed", "oh")


def test_items_become_the_conversation(daemon: LiveDaemon) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "hm"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "message", "role": "user", "content": "ECHO"},
    ]
    messages = sent(daemon, input=items, instructions="First.")["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert messages[3]["thinking"] == "hm"
    assert messages[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (messages[4]["content"], messages[4]["name"]) == ("7", "f")


def test_fields_have_their_native_meaning(daemon: LiveDaemon) -> None:
    message = sent(
        daemon,
        max_output_tokens=7,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tools=[{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
    )
    assert (message["max_tokens"], message["think"]) == (7, False)
    assert message["format"] == {"type": "object"}
    assert [tool["function"]["name"] for tool in message["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({"input": None}, 400, "input is required"),
        ({"input": [{"type": "x"}]}, 400, 'input[0]: unknown input item type: "x"'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            400,
            "file inputs are not currently supported",
        ),
        ({"model": "x"}, 404, "model 'x' not found"),
    ],
)
def test_a_wrong_request_is_refused(daemon: LiveDaemon, more: Any, status: int, text: str) -> None:
    response = daemon.post(PATH, request("hi", **more))
    assert (response.status_code, response.json()["error"]["message"]) == (status, text)
    stored = daemon.post(PATH, request("hi", previous_response_id="resp_1"))
    assert stored.status_code == 404


def test_the_openai_client_reads_it(daemon: LiveDaemon) -> None:
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="x", max_retries=0)
    assert client.responses.create(model="plain", input="hi").output_text == "Hello wörld 👋"
    events = list(client.responses.create(model="plain", input="hi", stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Hello wörld 👋"
    assert events[-1].type == "response.completed"


def test_the_document_describes_every_route(daemon: LiveDaemon) -> None:
    document = daemon.client.get("/openapi.json").json()
    described = {
        (method.upper(), path) for path, verbs in document["paths"].items() for method in verbs
    }
    served = {
        (method, route.path.replace(":path}", "}")) for route in ROUTES for method in route.methods
    }
    assert served - described == {("GET", "/openapi.json")}
    chat = document["paths"]["/api/chat"]["post"]["requestBody"]["content"]["application/json"]
    name = chat["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][name]["properties"]
