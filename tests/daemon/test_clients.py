"""The clients that people have, against a live daemon."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest

from .live import LiveDaemon

CALL = {"id": "call_a1b2c3d4", "name": "add", "arguments": {"a": 1, "b": 2}}
CALLS = "SCRIPT " + json.dumps([{"tool_calls": [CALL]}])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.fixture(scope="module")
def native(daemon: LiveDaemon) -> ollama.Client:
    return ollama.Client(host=daemon.url)


@pytest.fixture(scope="module")
def compatible(daemon: LiveDaemon) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="anything", max_retries=0)


@pytest.fixture(scope="module")
def claude(daemon: LiveDaemon) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=daemon.url, api_key="anything", max_retries=0)


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_ollama_lists_shows_and_pulls(native: ollama.Client) -> None:
    assert "plain:latest" in [model.model for model in native.list().models]
    assert native.show("plain").modelinfo["llama.context_length"] == 2048
    statuses = [progress.status for progress in native.pull("new", stream=True)]
    assert statuses[-1] == "success"
    assert native.pull("new").status == "success"
    with pytest.raises(ollama.ResponseError) as caught:
        native.show("x")
    assert (caught.value.status_code, caught.value.error) == (404, "model 'x' not found")


def test_ollama_chats_streams_and_generates(native: ollama.Client) -> None:
    answer = native.chat("plain", say("hi"))
    assert answer.message.content == "Hello wörld 👋"
    chunks = list(native.chat("plain", say("hi"), stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Hello wörld 👋"
    assert chunks[-1].done and chunks[-1].eval_duration
    generated = native.generate("plain", "hi", keep_alive="10m", options={"temperature": 0})
    assert generated.response == "Hello wörld 👋"
    assert generated.context
    assert "plain:latest" in [model.model for model in native.ps().models]


def test_ollama_calls_functions(native: ollama.Client) -> None:
    answer = native.chat("caller", say(CALLS), tools=[add])
    assert answer.message.tool_calls
    function = answer.message.tool_calls[0].function
    assert (function.name, function.arguments) == ("add", {"a": 1, "b": 2})


def test_ollama_sees_an_error_in_mid_stream(native: ollama.Client) -> None:
    script = 'SCRIPT [{"text": "a"}, {"sleep_s": 0.05, "finished": {"reason": "error"}}]'
    with pytest.raises(ollama.ResponseError):
        list(native.chat("plain", say(script), stream=True))


def test_openai_lists_chats_and_streams(compatible: openai.OpenAI) -> None:
    assert "plain:latest" in [model.id for model in compatible.models.list()]
    assert compatible.models.retrieve("plain").id == "plain"
    answer = compatible.chat.completions.create(model="plain", messages=say("hi"))
    assert answer.choices[0].message.content == "Hello wörld 👋"
    stream = compatible.chat.completions.create(
        model="plain",
        messages=say("hi"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 4
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "Hello wörld 👋"


def test_openai_calls_functions(compatible: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    answer = compatible.chat.completions.create(
        model="caller",
        messages=say(CALLS),
        tools=[tool],
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    called = answer.choices[0].message.tool_calls
    assert called and json.loads(called[0].function.arguments) == {"a": 1, "b": 2}  # type: ignore[union-attr]


def test_openai_sees_errors_as_its_own_classes(compatible: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        compatible.chat.completions.create(model="x", messages=say("hi"))
    assert caught.value.type == "not_found_error"
    with pytest.raises(openai.BadRequestError):
        compatible.chat.completions.create(model="plain", messages=[])


def test_openai_gets_responses_embeddings_and_completions(compatible: openai.OpenAI) -> None:
    response = compatible.responses.create(model="plain", input="hi")
    assert response.output_text == "Hello wörld 👋"
    embedded = compatible.embeddings.create(model="embedder", input=["a", "bc"])
    assert [len(entry.embedding) for entry in embedded.data] == [4, 4]
    completion = compatible.completions.create(model="plain", prompt="hi", n=2)
    assert [choice.text for choice in completion.choices] == ["Hello wörld 👋"] * 2


def test_ollama_embeds(native: ollama.Client) -> None:
    assert len(native.embed("embedder", ["a", "bc"]).embeddings) == 2


def test_anthropic_answers_and_streams(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="plain", max_tokens=9, messages=say("hi"))
    assert answer.content[0].text == "Hello wörld 👋"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 4)
    with claude.messages.stream(model="plain", max_tokens=9, messages=say("hi")) as stream:
        assert "".join(stream.text_stream) == "Hello wörld 👋"
        assert stream.get_final_message().stop_reason == "end_turn"
    assert claude.messages.count_tokens(model="plain", messages=say("hi you")).input_tokens == 2


def test_anthropic_calls_tools_in_a_stream(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    with claude.messages.stream(
        model="caller", max_tokens=9, messages=say(CALLS), tools=[tool]
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert (block.type, block.name, block.input) == ("tool_use", "add", {"a": 1, "b": 2})  # type: ignore[union-attr]


def test_anthropic_sees_errors_as_its_own_classes(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="x", max_tokens=9, messages=say("hi"))
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="plain", max_tokens=0, messages=say("hi"))
