"""A real daemon process with the real model, on a free port, with a models folder of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

DEADLINE_S = 60.0


@dataclass
class Daemon:
    """`python -m llmd.daemon`, started by the test."""

    url: str
    process: subprocess.Popen[bytes]
    ready_after_s: float

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120) -> Any:
        """One JSON answer; asserts that it is no error."""
        response = httpx.post(self.url + path, json=dict(body), timeout=timeout_s)
        assert response.status_code == 200, response.text
        return response.json()

    def lines(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of an NDJSON stream, as they come."""
        with httpx.stream("POST", self.url + path, json=dict(body), timeout=120) as response:
            for line in response.iter_lines():
                yield json.loads(line)

    def ps(self) -> list[dict[str, Any]]:
        """The loaded models."""
        models: list[dict[str, Any]] = httpx.get(self.url + "/api/ps", timeout=10).json()["models"]
        return models

    def family(self) -> list[psutil.Process]:
        """The daemon and its workers."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        return self.family()[1:]


@contextmanager
def running_daemon(models: Path, **environment: str) -> Iterator[Daemon]:
    """Started and ready; killed with its workers at the end, whatever the test did."""
    port = free_port()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmd.daemon"],
        env={
            **os.environ,
            "LLMD_HOST": f"127.0.0.1:{port}",
            "LLMD_MODELS": str(models),
            "OMP_NUM_THREADS": "2",
            "LLMD_SPARE_WORKER": "0",  # who counts workers means those of models
            **environment,
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), f"{url} to answer")
        yield Daemon(url, process, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/version", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(
    is_true: Callable[[], object], what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.02
) -> None:
    """Poll a condition; a test waits for something, never for some time."""
    end = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(every_s)
