"""The whole path with the real model: HTTP in, tokens from the engine, HTTP out."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmd.registry.pull import pull
from llmd.registry.store import ModelStore

from ..pace import slowness
from .real_daemon import Daemon, running_daemon, wait_until

pytestmark = pytest.mark.alone

QUESTION = "What is the capital of France? Answer in one sentence."
GREEDY = {"temperature": 0, "num_predict": 24}
TOPICS = ("foxes", "rain", "bread", "the moon", "ships", "snow", "music", "stones")


@pytest.fixture(scope="module")
def daemon(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, str]]:
    """A daemon whose store has the real model, and the name it has there."""
    models = tmp_path_factory.mktemp("models")
    name = store_model(models, smollm2_gguf)
    with running_daemon(models) as daemon:
        yield daemon, name


def store_model(models: Path, gguf: Path) -> str:
    """Take a local file into the store, as `pull` does with a path, and return its name."""
    return asyncio.run(pull(ModelStore(models), str(gguf))).name.display


def chat(model: str, content: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"model": model, "messages": [message], "options": GREEDY, **fields}


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(line["message"]["content"] for line in lines)


def test_a_real_model_answers_sensibly(daemon: tuple[Daemon, str]) -> None:
    server, model = daemon
    answer = server.post("/api/chat", chat(model, QUESTION, stream=False))
    assert "Paris" in answer["message"]["content"]
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert answer["eval_count"] > 0 and answer["eval_duration"] > 0


def test_eight_chats_advance_together_and_say_what_they_say_alone(
    daemon: tuple[Daemon, str],
) -> None:
    server, model = daemon
    bodies = [chat(model, f"Tell me one thing about {topic}.") for topic in TOPICS]
    weights = server.ps() and server.ps()[0]["size"]
    alone = [text_of(list(server.lines("/api/chat", body))) for body in bodies]
    lines: list[list[dict[str, Any]]] = [[] for _ in bodies]
    times: list[list[float]] = [[] for _ in bodies]
    busy: list[int] = []

    def follow(index: int) -> None:
        for line in server.lines("/api/chat", bodies[index]):
            lines[index].append(line)
            times[index].append(time.monotonic())
            if index == 0:
                busy.append(server.ps()[0]["kv"]["blocks_in_use"])

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [text_of(stream) for stream in lines] == alone
    last_start = max(stamps[0] for stamps in times)
    first_end = min(stamps[-1] for stamps in times)
    assert last_start < first_end, "every stream has begun before any has ended"
    assert max(busy) >= len(bodies), "each stream holds a block of its own"
    wait_until(lambda: server.ps()[0]["kv"]["blocks_in_use"] == 0, "the blocks to be given back")
    kv_bytes = server.ps()[0]["kv"]["bytes"]
    assert server.ps()[0]["size"] - kv_bytes <= weights, "the weights are there once"


def test_a_known_prefix_is_not_computed_again(daemon: tuple[Daemon, str]) -> None:
    server, model = daemon
    story = " ".join(f"Item {index} is on shelf {index * 7 % 90}." for index in range(110))
    body = {"model": model, "raw": True, "stream": False, "options": GREEDY | {"num_predict": 2}}
    cold = server.post("/api/generate", {**body, "prompt": story + " So"})
    warm = server.post("/api/generate", {**body, "prompt": story + " Now"})
    assert cold["prompt_eval_count"] > 1000
    assert warm["prompt_eval_count"] > 1000, "cached tokens count too"
    assert warm["prompt_eval_duration"] <= 0.2 * cold["prompt_eval_duration"]


def test_a_client_that_leaves_takes_its_sequence_along(daemon: tuple[Daemon, str]) -> None:
    server, model = daemon
    endless = {"type": "array", "items": {"type": "integer"}, "minItems": 4000}
    body = chat(model, "Count.", options={"temperature": 0, "num_predict": 4000}, format=endless)
    stream = server.lines("/api/chat", body)
    next(stream)
    wait_until(lambda: server.ps()[0]["running"] == 1, "the figures of the first step")
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: server.ps()[0]["running"] == 0, "the sequence to go", deadline_s=2)
    assert server.ps()[0]["kv"]["blocks_in_use"] == 0


def test_a_killed_worker_loses_no_stream(daemon: tuple[Daemon, str]) -> None:
    server, model = daemon
    body = chat(model, "Tell me about the sea.", options=GREEDY | {"num_predict": 60})
    undisturbed = text_of(list(server.lines("/api/chat", body)))
    lines: list[dict[str, Any]] = []
    for line in server.lines("/api/chat", body):
        lines.append(line)
        if len(lines) == 10:
            server.workers()[0].send_signal(signal.SIGKILL)
    assert text_of(lines) == undisturbed
    assert lines[-1]["done"] is True


def test_the_daemon_is_light_and_sleeps(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as server:
        assert server.ready_after_s < 1.5 * slowness()
        own = psutil.Process(server.process.pid)
        assert own.memory_info().rss < 120e6
        before = sum(own.cpu_times()[:2])
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 4, "four idle seconds", every_s=0.5)
        share = (sum(own.cpu_times()[:2]) - before) / (time.monotonic() - began)
        assert share < 0.005


def test_a_killed_daemon_leaves_no_process(smollm2_gguf: Path, tmp_path: Path) -> None:
    name = store_model(tmp_path, smollm2_gguf)
    with running_daemon(tmp_path) as server:
        server.post("/api/generate", {"model": name, "stream": False})
        family = server.family()
        assert len(family) >= 2
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert alive == []
