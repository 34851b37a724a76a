"""Three models, memory for two: sixty random requests of the real model, and one during a load.

Slow: run by `scripts/chaos`. The three are one file under three settings, so three workers.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

from ..pace import slowness
from .real_daemon import Daemon, running_daemon
from .test_first_light import store_model

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(600)]

NAMES = ("one", "two", "three")
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def daemon(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    original = store_model(models, smollm2_gguf)
    store = ModelStore(models)
    manifest = store.get(ModelName.parse(original))
    for number, name in enumerate(NAMES):
        params = {"num_keep": number + 1}
        store.put(replace(manifest, name=ModelName.parse(name), params=params))
    with running_daemon(models, LLMD_MAX_LOADED_MODELS="2", LLMD_KEEP_ALIVE="-1") as running:
        yield running


def body(name: str, question: str) -> dict[str, Any]:
    return {
        "model": name,
        "messages": [{"role": "user", "content": question}],
        "options": {"temperature": 0, "num_predict": 8},
    }


def first_token_s(daemon: Daemon, name: str, question: str) -> float:
    began = time.monotonic()
    stream = daemon.lines("/api/chat", body(name, question))
    next(stream)
    took_s = time.monotonic() - began
    assert all("error" not in line for line in stream)
    return took_s


def test_sixty_random_requests_load_as_rarely_as_lru_allows(daemon: Daemon) -> None:
    draw = random.Random(60)
    cached: OrderedDict[str, None] = OrderedDict()
    misses = 0
    for number in range(NUM_REQUESTS):
        name = draw.choice(("one", "one", "one", "two", "two", "three"))
        misses += name not in cached
        cached[name] = None
        cached.move_to_end(name)
        if len(cached) > 2:
            cached.popitem(last=False)
        first_token_s(daemon, name, f"What is {number} plus one?")
        assert {model["name"].partition(":")[0] for model in daemon.ps()} == set(cached)
    history = httpx.get(f"{daemon.url}/api/history").json()["history"]
    assert [entry["event"] for entry in history].count("loaded") == misses
    assert not [entry for entry in history if entry["event"] in ("failed", "died")]


def test_a_request_for_a_ready_model_does_not_wait_for_a_load(daemon: Daemon) -> None:
    for name in ("two", "one"):
        first_token_s(daemon, name, "Hello?")
    idle = [first_token_s(daemon, "one", f"Say {number}.") for number in range(10)]
    loading = threading.Thread(target=first_token_s, args=(daemon, "three", "Hello?"))
    loading.start()
    during: list[float] = []
    while loading.is_alive():
        during.append(first_token_s(daemon, "one", f"Tell {len(during)}."))
    loading.join()
    assert len(during) >= 2, "the load was over before it could disturb anyone"
    limit_s = 2 * statistics.median(idle) + 0.1
    assert statistics.median(during) <= limit_s * slowness(), (idle, during)


def test_ten_calls_of_other_contexts_and_batches_are_answered_by_one_load(daemon: Daemon) -> None:
    def loads() -> int:
        history = httpx.get(f"{daemon.url}/api/history").json()["history"]
        return [entry["event"] for entry in history].count("loaded")

    first_token_s(daemon, "one", "Hello?")
    (loaded,) = (model for model in daemon.ps() if model["name"] == "one:latest")
    before = loads()
    for number in range(10):
        request = body("one", f"What is {number}?")
        options = {"num_ctx": (2048, 4096)[number % 2], "num_batch": (64, 512)[number % 2]}
        request["options"].update(options)
        answer = daemon.post("/api/chat", {**request, "shift": number % 2 == 0, "stream": False})
        assert answer["done"]
    (found,) = (model for model in daemon.ps() if model["name"] == "one:latest")
    assert (loads(), found["pid"]) == (before, loaded["pid"])
