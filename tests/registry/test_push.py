"""A model goes to a registry whole or not at all, and comes back as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmd.registry import push as push_module
from llmd.registry.errors import (
    AccessDenied,
    BadModelFile,
    ModelNotFound,
    RegistryError,
    SourceUnavailable,
    Unsupported,
)
from llmd.registry.names import ModelName
from llmd.registry.pull import pull
from llmd.registry.push import Stopped, push
from llmd.registry.settings import PullSettings
from llmd.registry.sources.base import PullProgress
from llmd.registry.store import ModelStore

from .model_makers import stored_model
from .ollama_fixture import OllamaRegistry, digest_of, running_registry, usual_layers

MINE = ModelName.parse("me/mine:1")


@pytest.fixture
def registry() -> Iterator[OllamaRegistry]:
    with running_registry(usual_layers()) as running:
        yield running


@pytest.fixture
def settings(registry: OllamaRegistry) -> PullSettings:
    return PullSettings(
        registry_url=registry.endpoint, give_up_s=60, backoff_s=0.001, reserve_bytes=0
    )


@pytest.fixture
def store(tmp_path: Path, settings: PullSettings) -> ModelStore:
    """With the usual model as me/mine:1. The registry then forgets that it ever had it."""
    store = ModelStore(tmp_path / "models")
    asyncio.run(pull(store, "tiny", settings=settings))
    store.copy(ModelName.parse("tiny"), MINE)
    return store


def pushed(store: ModelStore, settings: PullSettings, name: ModelName = MINE) -> list[PullProgress]:
    told: list[PullProgress] = []
    push(store, name, settings, told.append)
    return told


def test_a_pushed_model_comes_back_as_it_was(
    store: ModelStore, registry: OllamaRegistry, settings: PullSettings
) -> None:
    registry.files.clear()
    told = pushed(store, settings)
    assert told[0].status == "retrieving manifest"
    assert told[-1].status == "pushing manifest"
    sums = [line.overall_completed for line in told if line.overall_total]
    assert sums == sorted(sums, key=lambda size: size or 0)
    assert sums[-1] == told[-2].overall_total
    before = store.delete(MINE)
    assert before is not None
    after = asyncio.run(pull(store, "me/mine:1", settings=settings))
    assert replace(after, modified=before.modified, source=before.source) == before


def test_what_the_registry_has_is_not_sent_again(
    store: ModelStore, registry: OllamaRegistry, settings: PullSettings
) -> None:
    pushed(store, settings)
    first = len(registry.uploads)
    pushed(store, settings)
    assert len(registry.uploads) == first
    weights = store.get(MINE).files[0].digest
    assert digest_of(registry.files[weights]) == weights


def test_a_part_that_fails_is_sent_again(
    store: ModelStore,
    registry: OllamaRegistry,
    settings: PullSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry.files.clear()
    registry.faults.unavailable = 2
    monkeypatch.setattr(push_module, "PART_BYTES", 100_000)
    pushed(store, settings)
    assert "me/mine:1" in registry.models
    registry.models.clear()
    registry.files.clear()
    registry.faults.unavailable = 10**9
    with pytest.raises(SourceUnavailable, match="status 503"):
        pushed(store, settings)
    assert registry.models == {}


def test_a_token_is_fetched_where_one_is_wanted(
    store: ModelStore, registry: OllamaRegistry, settings: PullSettings
) -> None:
    registry.token = "secret"
    pushed(store, settings)
    assert "me/mine:1" in registry.models
    registry.realm = "https://elsewhere.example/token"
    with pytest.raises(AccessDenied, match="another host"):
        pushed(store, settings)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (403, AccessDenied, "wants an account"),
        (404, BadModelFile, "refuses model with status 404"),
        (500, SourceUnavailable, "status 500"),
    ],
)
def test_a_refusal_is_told_and_nothing_is_visible_there(
    store: ModelStore,
    registry: OllamaRegistry,
    settings: PullSettings,
    status: int,
    error: type[RegistryError],
    text: str,
) -> None:
    registry.files.clear()
    registry.models.clear()
    registry.refuse_push = status
    with pytest.raises(error, match=text):
        pushed(store, settings)
    assert registry.models == {}


def test_who_stops_a_push_leaves_no_model_there(
    store: ModelStore, registry: OllamaRegistry, settings: PullSettings
) -> None:
    registry.files.clear()
    registry.models.clear()
    with pytest.raises(Stopped):
        push(store, MINE, settings, lambda line: None, lambda: True)
    assert registry.models == {}


def test_what_the_format_cannot_hold_is_refused_by_name(
    store: ModelStore, settings: PullSettings
) -> None:
    with pytest.raises(ModelNotFound):
        pushed(store, settings, ModelName.parse("nope"))
    odd = replace(stored_model(store, "odd"), format="safetensors")
    store.put(odd)
    with pytest.raises(Unsupported, match="only GGUF models can be pushed"):
        pushed(store, settings, odd.name)
    store.put(replace(odd, format="gguf", template="{{ messages }}"))
    with pytest.raises(Unsupported, match="a prompt template in Jinja"):
        pushed(store, settings, odd.name)


def test_a_private_host_is_refused_unless_allowed(
    store: ModelStore, registry: OllamaRegistry, settings: PullSettings
) -> None:
    name = ModelName.parse(f"{registry.endpoint.removeprefix('http://')}/me/mine:1")
    store.copy(MINE, name)
    requests = len(registry.requests)
    with pytest.raises(SourceUnavailable):
        pushed(store, replace(settings, registry_url=""), name)
    assert len(registry.requests) == requests
    pushed(store, replace(settings, registry_url="", insecure=True), name)
