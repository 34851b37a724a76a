"""Eight streams of the real model, and their worker killed or stopped at random moments.

Slow: run by `scripts/chaos`. Every text must equal the undisturbed run's, and no client may see an
error; half of the streams are greedy, half are drawn with a seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

from .real_daemon import Daemon, running_daemon
from .test_first_light import TOPICS, store_model

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

NUM_ROUNDS = int(os.environ.get("LLMD_KILL_ROUNDS", "20"))
NUM_TOKENS = 32


def body(model: str, number: int) -> dict[str, Any]:
    greedy = {"temperature": 0}
    drawn = {"temperature": 1.0, "seed": 40 + number, "top_k": 0, "top_p": 1.0}
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me one thing about {TOPICS[number]}."}],
        "options": {"num_predict": NUM_TOKENS, **(drawn if number % 2 else greedy)},
    }


def answer(daemon: Daemon, request: dict[str, Any], seen: threading.Semaphore) -> str:
    text: str = ""
    for line in daemon.lines("/api/chat", request):
        assert "error" not in line, line
        text += line["message"]["content"]
        seen.release()
        if line["done"]:
            assert line["done_reason"] in ("stop", "length")
            return text
    raise AssertionError("the stream ended without a last object")


def all_answers(daemon: Daemon, model: str, disturb_at: int, number: int) -> list[str]:
    """All eight at once; the worker gets the signal when so many pieces have been seen."""
    seen = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(answer, daemon, body(model, index), seen) for index in range(8)]
        if number:
            for _ in range(disturb_at):
                assert seen.acquire(timeout=120)
            os.kill(daemon.ps()[0]["pid"], number)
        return [future.result(300) for future in asked]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_stream_is_lost(smollm2_gguf: Path, tmp_path: Path, number: signal.Signals) -> None:
    model = store_model(tmp_path, smollm2_gguf)
    draw = random.Random(int(number))
    with running_daemon(tmp_path) as daemon:
        undisturbed = all_answers(daemon, model, 0, 0)
        assert undisturbed == all_answers(daemon, model, 0, 0)
        pids = {daemon.ps()[0]["pid"]}
        for round in range(NUM_ROUNDS):
            at = draw.randrange(8, 8 * (NUM_TOKENS - 8))
            assert all_answers(daemon, model, at, number) == undisturbed, f"round {round} at {at}"
            pids.add(daemon.ps()[0]["pid"])
        assert len(pids) > NUM_ROUNDS // 2, "hardly a worker was replaced"


def test_ten_deaths_in_a_row_are_one_clear_error_and_another_model_serves_on(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Whatever loads the doomed model is killed at once, until ten requests were told so."""
    doomed = store_model(tmp_path, smollm2_gguf)
    store = ModelStore(tmp_path)
    manifest = store.get(ModelName.parse(doomed))
    store.put(replace(manifest, name=ModelName.parse("other"), params={"num_keep": 5}))
    with running_daemon(tmp_path) as daemon:
        calm = daemon.post("/api/chat", {**body("other", 0), "stream": False})["message"]
        (other,) = daemon.workers()
        errors: list[str] = []
        num_kills = 0
        with ThreadPoolExecutor(1) as pool:
            while len(errors) < 10:
                asked = pool.submit(
                    httpx.post,
                    f"{daemon.url}/api/chat",
                    json={**body(doomed, 1), "stream": False},
                    timeout=120,
                )
                while not asked.done():
                    for worker in daemon.workers():
                        if worker.pid != other.pid:
                            with suppress(psutil.NoSuchProcess):
                                worker.kill()
                                num_kills += 1
                    time.sleep(0.02)
                assert asked.result().status_code == 500
                errors.append(asked.result().json()["error"])
                again = daemon.post("/api/chat", {**body("other", 0), "stream": False})
                assert again["message"] == calm
        assert "is held off for" in errors[-1], errors
        assert all("ended unexpectedly" in error or "held off" in error for error in errors)
        assert other.is_running() and [worker.pid for worker in daemon.workers()] == [other.pid]
        assert [model["name"] for model in daemon.ps()] == ["other:latest"]
        print(num_kills, "kills;", errors[0], "|", errors[-1])
