"""What the daemon costs: 200 streams through it, from a worker that only counts.

    worker (a clock) ──lines──▶ daemon ──200 × NDJSON──▶ client (this process)

The worker writes one line per step with a token for every stream, `--rate` tokens a second in all;
each token's text is the time at which it was made. The client compares that with the time at which
it has read it. Told: the delay from worker to client, and the daemon's share of one core.

    python benchmarks/daemon_overhead.py --streams 200 --rate 20000 --seconds 10

Results are kept in benchmarks/results/daemon_overhead.csv, with the machine's load: on a busy
machine the delay is mostly the wait for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

RESULTS = Path(__file__).parent / "results" / "daemon_overhead.csv"
T = TypeVar("T")
STAMP = re.compile(rb"(\d{19}) ")


# --------------------------------------------------------------------------- worker


async def work(rate: float) -> None:
    """A worker process that gives every stream a token per step, `rate` a second in all."""
    from llmd.backend import protocol
    from llmd.backend.protocol import Cancel, Delta, Finished, Generate, Load, Ready, Started, Step

    left: dict[str, int] = {}

    def send(event: protocol.Event) -> None:
        sys.stdout.buffer.write(protocol.encode(event))
        sys.stdout.buffer.flush()

    async def step() -> None:
        due = time.monotonic()
        while True:
            due += max(1, len(left)) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            stamp = f"{time.time_ns()} "
            deltas = []
            for id in list(left):
                left[id] -= 1
                if left[id] >= 0:
                    deltas.append(Delta(id, stamp, token_ids=[7]))
                else:
                    del left[id]
                    finished = Finished("stop", None, 5, 0, 10, decode_s=1.0)
                    deltas.append(Delta(id, finished=finished))
            send(Step(deltas, protocol.Stats(running=len(left))))

    reader = asyncio.StreamReader(limit=2**28)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    stepping = asyncio.create_task(step())
    async for line in reader:
        request = protocol.decode_request(line)
        if isinstance(request, Load):
            send(Ready(4096, 4096, 16, 100, 1, 1_000_000))
        elif isinstance(request, Generate):
            send(Started(request.id, [1, 2, 3], 1, request.max_tokens or 1, 4096))
            left[request.id] = request.max_tokens or 1
        elif isinstance(request, Cancel):
            left.pop(request.id, None)
    stepping.cancel()


# --------------------------------------------------------------------------- daemon


async def serve(rate: float, port_file: Path) -> None:
    """The daemon's application on a free port, with that worker behind it."""
    from llmd.backend.protocol import Load
    from llmd.daemon.app import make_app
    from llmd.daemon.downloads import Downloads
    from llmd.daemon.http_server import make_server
    from llmd.daemon.manager import ModelManager
    from llmd.daemon.metrics import Metrics
    from llmd.daemon.routes.services import Services
    from llmd.daemon.settings import Settings
    from llmd.daemon.worker_process import Progress, WorkerProcess
    from llmd.registry.manifest import Manifest, ManifestFile
    from llmd.registry.names import ModelName
    from llmd.registry.pull import PullSettings
    from llmd.registry.store import ModelStore

    async def spawn(load: Load, on_loading: Progress | None) -> WorkerProcess:
        command = [sys.executable, __file__, "--role", "worker", "--rate", str(rate)]
        return await WorkerProcess.start(load, command, on_loading)

    store = ModelStore(port_file.parent / "models")
    digest = store.add_bytes(b"weights")
    store.put(
        Manifest(
            name=ModelName.parse("clock"),
            modified=datetime.now(UTC),
            format="gguf",
            architecture="llama",
            family="llama",
            parameter_count=1,
            quantization="F32",
            context_length=4096,
            embedding_length=1,
            capabilities=("completion",),
            files=(ManifestFile("clock.gguf", "weights", digest, 7),),
        )
    )
    manager = ModelManager(Settings(), store, spawn)
    downloads = Downloads(store, PullSettings())
    services = Services(manager, store, downloads, Metrics(manager.loaded), version="benchmark")
    server = make_server(make_app(services), port=0)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 -- uvicorn has no event for it
        await asyncio.sleep(0.01)
    port_file.write_text(  # noqa: ASYNC240 -- before the first request
        str(server.servers[0].sockets[0].getsockname()[1])
    )
    await serving
    await manager.shutdown()


# --------------------------------------------------------------------------- client


class Reader(asyncio.Protocol):
    """One stream: collects the delays of its tokens, in seconds."""

    def __init__(self, body: bytes, delays: list[float]) -> None:
        self._body = body
        self._delays = delays
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        head = (
            f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self._body)}"
        )
        self._transport.write(head.encode() + b"\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.time_ns()
        self._delays += [(now - int(stamp)) / 1e9 for stamp in STAMP.findall(data)]
        self._tail = (self._tail + data)[-200:]
        if b'"done":true' in data or self._tail.endswith(b"0\r\n\r\n"):
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the daemon closed the stream"))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """On the daemon's event loop: what the client costs is taken from the same cores."""
    from llmd.daemon.http_server import run

    return run(main)


async def measure(port: int, streams: int, tokens: int) -> list[float]:
    loop = asyncio.get_running_loop()
    body = json.dumps(
        {"model": "clock", "prompt": "go", "options": {"num_predict": tokens}, "raw": True}
    ).encode()
    delays: list[float] = []
    readers = []
    for _ in range(streams):
        _, reader = await loop.create_connection(lambda: Reader(body, delays), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return delays


def run(streams: int, rate: float, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, __file__, "--role", "daemon", "--rate", str(rate)]
        daemon = subprocess.Popen([*command, "--port-file", str(port_file)])
        try:
            deadline = time.monotonic() + 30
            while not port_file.exists() or not port_file.read_text():
                assert time.monotonic() < deadline, "the daemon did not start"
                time.sleep(0.05)
            port = int(port_file.read_text())
            run_loop(measure(port, 1, 1))  # load the model
            process = psutil.Process(daemon.pid)
            before, began = process.cpu_times(), time.monotonic()
            delays = run_loop(measure(port, streams, int(rate * seconds / streams)))
            took = time.monotonic() - began
            after = process.cpu_times()
            rss = process.memory_info().rss
        finally:
            daemon.terminate()
            daemon.wait()
    cpu_s = after.user + after.system - before.user - before.system
    delays.sort()
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "streams": streams,
        "tokens_per_s": round(len(delays) / took),
        "median_ms": round(statistics.median(delays) * 1e3, 2),
        "p95_ms": round(delays[int(len(delays) * 0.95)] * 1e3, 2),
        "p99_ms": round(delays[int(len(delays) * 0.99)] * 1e3, 2),
        "daemon_core_share": round(cpu_s / took, 3),
        "us_per_token": round(cpu_s / max(1, len(delays)) * 1e6, 1),
        "rss_mb": round(rss / 1e6),
        "load_1min": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=["bench", "daemon", "worker"], default="bench")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--keep", action="store_true", help="append to the results")
    options = parser.parse_args()
    if options.role == "worker":
        run_loop(work(options.rate))
    elif options.role == "daemon":
        run_loop(serve(options.rate, options.port_file))
    else:
        row = run(options.streams, options.rate, options.seconds)
        print(json.dumps(row, indent=2))
        if options.keep:
            is_new = not RESULTS.exists()
            with RESULTS.open("a", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                if is_new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
