"""A crowd of requests at a real daemon: the overflow is refused at once, nobody else is lost."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..pace import slowness
from .test_lifecycle import Daemon

pytestmark = pytest.mark.alone

CROWD = 600
MAX_QUEUE = 512
LOAD_S = 6.0
REFUSED_S = 0.2  # the promise, on an idle machine
BODY = json.dumps({"model": "plain", "prompt": "LONG 4", "stream": False})
REQUEST = (
    "POST /api/generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()


@dataclass
class Answer:
    status: int
    head: str
    body: dict[str, Any]
    took_s: float


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path, FAKE_WORKER=json.dumps({"plain": {"load_s": LOAD_S}}))
    yield running
    running.close()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    """Bare sockets: six hundred clients of a library would take longer than the daemon."""
    began = time.monotonic()
    writer.write(REQUEST)
    first = await reader.readline()
    took_s = time.monotonic() - began
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return Answer(int(first.split()[1]), head.decode().lower(), json.loads(body), took_s)


async def crush(port: int) -> list[Answer]:
    """All of them in the same moment."""
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CROWD)]
    return await asyncio.gather(*(answer(*end) for end in ends))


async def overflow(port: int) -> list[Answer]:
    """What those get who come, together, when the queue is full."""
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CROWD)]
    crowd = asyncio.gather(*(answer(*end) for end in ends[:MAX_QUEUE]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while not any(
            model.get("waiting") == MAX_QUEUE
            for model in (await client.get("/api/ps")).json()["models"]
        ):
            assert not crowd.done()
    late = await asyncio.gather(*(answer(*end) for end in ends[MAX_QUEUE:]))
    await crowd
    return late


def test_exactly_the_overflow_is_refused_and_all_others_complete(daemon: Daemon) -> None:
    answers = asyncio.run(crush(daemon.port))
    refused = [answer for answer in answers if answer.status == 503]
    served = [answer for answer in answers if answer.status == 200]
    assert (len(served), len(refused)) == (MAX_QUEUE, CROWD - MAX_QUEUE)
    for answer in refused:
        assert "\r\nretry-after: 1" in f"\r\n{answer.head}"
        assert answer.body == {
            "error": "server busy, please try again.  maximum pending requests exceeded"
        }
    assert all(answer.body["eval_count"] == 4 for answer in served)
    slowest_s = max(answer.took_s for answer in refused)
    assert slowest_s < LOAD_S, "nobody is refused only after the load"
    assert daemon.client.get("/api/requests").json() == {"requests": []}


def test_who_comes_to_a_full_queue_is_refused_soon(daemon: Daemon) -> None:
    late = asyncio.run(overflow(daemon.port))
    assert {answer.status for answer in late} == {503}
    assert statistics.median(answer.took_s for answer in late) < REFUSED_S * slowness()
