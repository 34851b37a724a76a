"""Eight streams of the real model, and their worker killed or stopped at random moments.

Slow: run by `scripts/chaos`. Every text must equal the undisturbed run's, and no client may see an
error; half of the streams are greedy, half are drawn with a seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
