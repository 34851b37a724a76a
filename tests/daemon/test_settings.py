"""Every knob from the environment: names, words, and one sentence for what cannot be read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llmd.daemon.settings import SettingsInvalid, parse_host, parse_size, read_settings


def test_nothing_set_is_the_default() -> None:
    settings = read_settings({})
    assert (settings.host, settings.port, settings.keep_alive_s) == ("127.0.0.1", 11434, 300.0)
    assert settings.max_queue == 512 and settings.is_loopback and not settings.sources
    assert settings.models.name == "models"


def test_our_own_name_wins_over_the_familiar_one_and_the_source_is_told() -> None:
    settings = read_settings(
        {"LLMD_MODELS": "/a", "OLLAMA_MODELS": "/b", "OLLAMA_MAX_QUEUE": ' "7" '}
    )
    assert settings.models == Path("/a") and settings.max_queue == 7
    assert settings.sources == {"models": "LLMD_MODELS", "max_queue": "OLLAMA_MAX_QUEUE"}


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("OLLAMA_KEEP_ALIVE", "10m", "keep_alive_s", 600.0),
        ("OLLAMA_KEEP_ALIVE", "90", "keep_alive_s", 90.0),
        ("OLLAMA_KEEP_ALIVE", "-1", "keep_alive_s", math.inf),
        ("LLMD_KEEP_ALIVE", "0", "keep_alive_s", 0.0),
        ("OLLAMA_LOAD_TIMEOUT", "-1s", "load_timeout_s", 0.0),
        ("LLMD_MEMORY_LIMIT", "1.5GB", "memory_limit_bytes", 1_500_000_000),
        ("LLMD_DTYPE", "float32", "dtype", "float32"),
        ("LLMD_NUM_THREADS", "3", "num_threads", 3),
        ("OLLAMA_CONTEXT_LENGTH", "8192", "context_length", 8192),
        ("OLLAMA_ORIGINS", "a.test, b.test", "origins", ("a.test", "b.test")),
        (
            "LLMD_WORKER_COMMAND",
            "'my python' worker.py -q",
            "worker_command",
            ("my python", "worker.py", "-q"),
        ),
        ("OLLAMA_API_KEY", "what clients send", "api_keys", ()),
        ("OLLAMA_MAX_QUEUE", "", "max_queue", 512),
    ],
)
def test_a_value_is_read(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(read_settings({name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OLLAMA_MAX_QUEUE", "many"),
        ("LLMD_MAX_QUEUE", "-1"),
        ("OLLAMA_KEEP_ALIVE", "soon"),
        ("LLMD_MEMORY_LIMIT", "lots"),
        ("LLMD_DTYPE", "int3"),
        ("LLMD_HOST", "127.0.0.1:99999"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_in_one_sentence(name: str, text: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{name}='{text}': .*(expected|invalid)") as caught:
        read_settings({name: text})
    assert "\n" not in str(caught.value)


def test_an_open_door_must_be_meant() -> None:
    with pytest.raises(SettingsInvalid, match="LLMD_API_KEY"):
        read_settings({"OLLAMA_HOST": "0.0.0.0"})
    assert not read_settings({"OLLAMA_HOST": "0.0.0.0", "LLMD_API_KEY": "k"}).is_loopback
    assert read_settings({"LLMD_HOST": "0.0.0.0", "LLMD_ALLOW_OPEN": "1"}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", 11434),
        (":8080", "127.0.0.1", 8080),
        ("http://example.test", "example.test", 80),
        ("https://example.test/path", "example.test", 443),
        ("[::1]:99", "::1", 99),
        ("::1", "::1", 11434),
        ("localhost:0", "localhost", 0),
    ],
)
def test_a_host_is_read(text: str, host: str, port: int) -> None:
    assert parse_host(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("1k", 1000), ("1KiB", 1024), ("2 GiB", 2 * 2**30), ("0.5T", 500_000_000_000)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size
