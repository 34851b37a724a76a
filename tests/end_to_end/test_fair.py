"""Two clients of one model, one with two hundred requests, one with a question now and then.

Slow: run by `scripts/chaos`. Clients are told apart by the program that calls (the header
User-Agent), since both come from this machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .real_daemon import Daemon, running_daemon
from .test_first_light import TOPICS, store_model

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.alone]

CROWD = 200
NUM_QUESTIONS = 11
MOST = 3.0  # times what the one waits for its first token on an idle machine


@pytest.fixture
def daemon(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Daemon]:
    store_model(tmp_path, smollm2_gguf)
    with running_daemon(tmp_path) as daemon:
        yield daemon


async def first_token_s(
    client: httpx.AsyncClient, model: str, text: str, num_predict: int, agent: str
) -> float:
    """How long the first piece took; the answer is read to its end."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "options": {"temperature": 0, "num_predict": num_predict},
    }
    began, took_s, last = time.monotonic(), 0.0, {}
    headers = {"User-Agent": agent}
    async with client.stream("POST", "/api/chat", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            took_s = took_s or time.monotonic() - began
            last = json.loads(line)
    assert last.get("done_reason") in ("stop", "length"), last
    return took_s


async def questions(client: httpx.AsyncClient, model: str, start: int) -> list[float]:
    """One after the other; nothing of them is known but what stands before every question."""
    texts = [unheard(start + number) for number in range(NUM_QUESTIONS)]
    return [await first_token_s(client, model, text, 8, "one") for text in texts]


def unheard(seed: int) -> str:
    """About eighty tokens: a question that a person types, with what it is about."""
    rng = random.Random(seed)
    return f"Which of these comes first? {' '.join(rng.choices(TOPICS, k=40))} {seed}"


async def both(url: str, model: str) -> tuple[list[float], list[float], list[float]]:
    """What the one waited when it was alone and beside the crowd, and what the crowd waited."""
    limits = httpx.Limits(max_connections=CROWD + 10)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await first_token_s(client, model, "Hello.", 4, "one")
        alone = await questions(client, model, 10)
        crowd = [
            asyncio.create_task(
                first_token_s(
                    client, model, f"Story {n} of {TOPICS[n % len(TOPICS)]}.", 64, "crowd"
                )
            )
            for n in range(CROWD)
        ]
        while not any(task.done() for task in crowd):  # noqa: ASYNC110 - until it is under way
            await asyncio.sleep(0.05)
        beside = await questions(client, model, 50)
        assert sum(task.done() for task in crowd) < CROWD * 0.8, "the crowd was over too soon"
        return alone, beside, list(await asyncio.gather(*crowd))


def test_one_beside_two_hundred_waits_at_most_three_times_as_long_as_alone(daemon: Daemon) -> None:
    (model,) = (m["name"] for m in httpx.get(f"{daemon.url}/api/tags").json()["models"])
    alone, beside, crowd = asyncio.run(both(daemon.url, model))
    medians = [statistics.median(times) for times in (alone, beside, crowd)]
    print("first token: alone {:.3f} s, beside {:.3f} s, the crowd {:.3f} s".format(*medians))
    assert medians[1] <= MOST * medians[0], (alone, beside)
