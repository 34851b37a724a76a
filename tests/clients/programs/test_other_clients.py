"""litellm, LlamaIndex and LangChain on the real model."""

from __future__ import annotations

import json

import litellm
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel

QUESTION = "What is the capital of France? Answer in one sentence."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}


class Town(BaseModel):
    name: str
    inhabitants: int


def test_litellm_speaks_the_native_and_the_openai_api(url: str, real_model: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for model, base in ((f"ollama_chat/{real_model}", url), (f"openai/{real_model}", f"{url}/v1")):
        answer = litellm.completion(
            model=model, messages=messages, api_base=base, api_key="x", temperature=0, max_tokens=20
        )
        assert "Paris" in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0
        chunks = litellm.completion(
            model=model,
            messages=messages,
            api_base=base,
            api_key="x",
            temperature=0,
            max_tokens=20,
            stream=True,
        )
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_litellm_gets_what_fits_its_schema(url: str, real_model: str) -> None:
    answer = litellm.completion(
        model=f"openai/{real_model}",
        messages=[{"role": "user", "content": QUESTION}],
        api_base=f"{url}/v1",
        api_key="x",
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}},
    )
    assert list(json.loads(answer.choices[0].message.content)) == ["city"]


def test_litellm_calls_a_tool(url: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    answer = litellm.completion(
        model="openai/obliging",
        messages=[{"role": "user", "content": QUESTION}],
        api_base=f"{url}/v1",
        api_key="x",
        tools=[tool],
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "look"


def test_litellm_embeds(url: str) -> None:
    answer = litellm.embedding(
        model="openai/embedder", input=["a", "b"], api_base=f"{url}/v1", api_key="x"
    )
    assert len(answer.data) == 2


def test_llama_index_chats_and_streams(url: str, real_model: str) -> None:
    llm = Ollama(
        model=real_model, base_url=url, temperature=0.0, context_window=2048, request_timeout=300
    )
    assert "Paris" in str(llm.chat([ChatMessage(role="user", content=QUESTION)]))
    assert "Paris" in list(llm.stream_complete(QUESTION))[-1].text


def test_llama_index_fills_a_class(url: str) -> None:
    llm = Ollama(model="obliging", base_url=url, context_window=2048, request_timeout=300)
    town = llm.as_structured_llm(Town).complete("A town of 7").raw
    assert town == Town(name="cats", inhabitants=7)


def test_langchain_on_the_real_model(url: str, real_model: str) -> None:
    for llm in (
        ChatOllama(model=real_model, base_url=url, temperature=0, num_predict=20),
        ChatOpenAI(
            model=real_model, base_url=f"{url}/v1", api_key="x", temperature=0, max_tokens=20
        ),
    ):
        assert "Paris" in llm.invoke([HumanMessage(QUESTION)]).text
        assert "Paris" in "".join(chunk.text for chunk in llm.stream(QUESTION))


def test_langchain_embeds(url: str) -> None:
    vectors = OllamaEmbeddings(model="embedder", base_url=url).embed_documents(["a", "bb"])
    assert len(vectors) == 2
