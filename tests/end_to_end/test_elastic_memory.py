"""What the KV cache costs: nothing at rest, the tokens in use while busy, and chats outlive it.

Slow: run by `scripts/chaos`.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmd.backend.kv_memory import IDLE_S
from llmd.daemon.placement import KV_FLOOR_BYTES
from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

from ..pace import slowness
from .real_daemon import Daemon, running_daemon, wait_until
from .test_first_light import store_model

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(900)]

MARGIN_BYTES = 300 * 10**6  # what an idle model may hold besides its weights
GIVEN_BACK_S = 10.0


@pytest.fixture(scope="module")
def stored(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    models = tmp_path_factory.mktemp("models")
    return models, store_model(models, smollm2_gguf)


@pytest.fixture
def daemon(stored: tuple[Path, str]) -> Iterator[Daemon]:
    with running_daemon(stored[0], LLMD_KEEP_ALIVE="-1") as daemon:
        yield daemon


def question(model: str, number: int, num_words: int, num_predict: int) -> dict[str, Any]:
    text = f"Story {number}. " + " ".join(f"{word % 97}" for word in range(num_words))
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "stream": False,
        "options": {"temperature": 0, "num_predict": num_predict},
    }


def resident_bytes(daemon: Daemon) -> int:
    (worker,) = daemon.workers()
    return int(worker.memory_info().rss)


def test_memory_follows_the_tokens_and_comes_back(daemon: Daemon, stored: tuple[Path, str]) -> None:
    model = stored[1]
    num_chats = 32
    for num_ctx in (2048, 8192):
        body = question(model, 0, 5, 2)
        body["options"]["num_ctx"] = num_ctx
        daemon.post("/api/chat", body)
    weights = daemon.ps()[0]["weights_bytes"]
    wait_until(lambda: daemon.ps()[0]["kv"]["bytes"] == 0, "an idle cache to be given back")
    before = resident_bytes(daemon)
    assert before <= weights + MARGIN_BYTES, (before, weights)
    pid = daemon.workers()[0].pid

    with ThreadPoolExecutor(num_chats) as pool:
        bodies = [question(model, number, 300, 8) for number in range(num_chats)]
        answers = [pool.submit(daemon.post, "/api/chat", body, 300) for body in bodies]
        most = 0
        while not all(answer.done() for answer in answers):
            most = max(most, resident_bytes(daemon))
            time.sleep(0.02)
        tokens = sum(answer.result()["prompt_eval_count"] for answer in answers)
    grown = most - before
    assert grown > 0.5 * tokens * daemon.ps()[0]["kv"]["bytes_per_token"], (grown, tokens)

    ended = time.monotonic()
    wait_until(lambda: resident_bytes(daemon) <= 1.05 * before, "memory to come back", 30)
    took_s = time.monotonic() - ended
    print(f"weights {weights}, at rest {before}, {num_chats} chats {most}, back in {took_s:.1f} s")
    assert took_s < GIVEN_BACK_S * slowness()
    assert daemon.workers()[0].pid == pid


def test_a_second_model_takes_the_idle_prefixes_of_the_first_and_not_its_place(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """The limit is what both were seen to need, and room for half of the first one's prefixes."""
    first = store_model(tmp_path, smollm2_gguf)
    store = ModelStore(tmp_path)
    manifest = store.get(ModelName.parse(first))
    second = store.put(replace(manifest, name=ModelName.parse("second"), params={"num_keep": 5}))
    with running_daemon(tmp_path, LLMD_PREFIX_CACHE="0") as daemon:
        resting, cached = at_rest(daemon, first)
        daemon.post("/api/chat", question("second", 0, 5, 2), 300)
        wait_until(lambda: len(daemon.ps()) == 2, "both")
    remembered = json.loads((tmp_path / "derived" / second.digest / "memory.json").read_text())
    limit = resting + cached // 2 + remembered["auto"] + KV_FLOOR_BYTES
    with running_daemon(tmp_path, LLMD_PREFIX_CACHE="0", LLMD_MEMORY_LIMIT=str(limit)) as daemon:
        again, cached = at_rest(daemon, first, resting + cached // 8)
        (loaded,) = daemon.ps()
        daemon.post("/api/chat", question("second", 0, 5, 2), 300)
        by_name = {model["name"]: model for model in daemon.ps()}
        print(f"limit {limit}; at rest {resting}, then {again}; prefixes {cached}; {remembered}")
        assert by_name[first]["pid"] == loaded["pid"]
        assert by_name[first]["kv"]["bytes"] < cached
        history = httpx.get(f"{daemon.url}/api/history").json()["history"]
        assert [entry["event"] for entry in history] == ["loaded", "loaded"]


def at_rest(daemon: Daemon, model: str, limit: float = math.inf) -> tuple[int, int]:
    """After three long chats: what it holds besides its KV memory, and the prefixes it keeps."""
    for number in range(3):
        daemon.post("/api/chat", question(model, number, 300, 2), 300)
    seen: list[int] = []

    def is_steady() -> bool:
        (found,) = daemon.ps()
        seen.append(found["resident_bytes"] - found["kv"]["bytes"])
        last = seen[-math.ceil(2 * IDLE_S) - 2 :]  # it gives back what it can after so long
        return len(seen) > len(last) and len(set(last)) == 1 and last[0] <= limit

    wait_until(is_steady, "the model to rest", every_s=0.5)
    cached = daemon.ps()[0]["kv"]["bytes"]
    assert cached > 50 * 10**6, "the prefixes of three long chats are kept"
    return seen[-1], cached


def test_a_chat_outlives_its_worker_and_damaged_files_do_not_matter(
    daemon: Daemon, stored: tuple[Path, str]
) -> None:
    models, model = stored
    first = question(model, 77, 800, 4)
    cold = daemon.post("/api/chat", first, 300)
    assert cold["prompt_eval_count"] > 1500
    second = {
        **first,
        "messages": [
            *first["messages"],
            cold["message"],
            {"role": "user", "content": "And then?"},
        ],
    }
    daemon.post("/api/generate", {"model": model, "keep_alive": 0})
    wait_until(lambda: not daemon.workers(), "the worker to end")
    warm = daemon.post("/api/chat", second, 300)
    assert warm["llmd"]["cached_tokens"] > 1400
    assert warm["prompt_eval_duration"] <= 0.25 * cold["prompt_eval_duration"]

    daemon.post("/api/generate", {"model": model, "keep_alive": 0})
    wait_until(lambda: not daemon.workers(), "the worker to end")
    files = [path for path in (models / "derived").rglob("prefixes/*/*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)
    for number, path in enumerate(sorted(files)):
        raw = bytearray(path.read_bytes())
        if number % 2:
            raw[len(raw) // 2] ^= 1
        path.write_bytes(raw if number % 2 else raw[:1000])
    again = daemon.post("/api/chat", second, 300)
    assert again["message"] == warm["message"]
    assert again.get("llmd", {}).get("cached_tokens", 0) == 0


def test_a_worker_that_is_killed_leaves_what_was_saved(
    daemon: Daemon, stored: tuple[Path, str]
) -> None:
    body = question(stored[1], 5, 200, 2)
    daemon.post("/api/chat", body)
    wait_until(lambda: daemon.ps()[0]["kv"]["bytes"] == 0, "an idle cache to be given back")
    daemon.workers()[0].send_signal(signal.SIGKILL)
    wait_until(lambda: not daemon.ps(), "the death to be noticed")
    assert daemon.post("/api/chat", body)["llmd"]["cached_tokens"] > 300
