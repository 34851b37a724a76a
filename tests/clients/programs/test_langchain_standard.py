"""LangChain's standard chat-model integration tests, through its Ollama and its OpenAI class."""

from __future__ import annotations

import os

from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["LLMD_URL"]
MODEL = "obliging"


class TestChatOllama(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": MODEL, "base_url": URL}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return False  # ChatOllama has none to send


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        # It asks other servers than OpenAI's for usage only if told to.
        base = {"base_url": f"{URL}/v1", "api_key": "anything"}
        return {"model": MODEL, **base, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True
