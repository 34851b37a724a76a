"""What the daemon costs: 200 streams through it, from a worker that only counts.

    worker (a clock) ──lines──▶ daemon ──200 × NDJSON──▶ client (this process)

The worker writes one line per step with a token for every stream, `--rate` tokens a second in all;
each token's text is the time at which it was made. The client compares that with the time at which
it has read it. Told: the delay from worker to client, and the daemon's share of one core.

    python benchmarks/daemon_overhead.py --streams 200 --rate 20000 --seconds 10

Results are kept in benchmarks/results/daemon_overhead.csv, with the machine's load: on a busy
machine the delay is mostly the wait for a core. What the daemon cannot avoid is one write for each
token of each stream: on the virtual machine of the kept figures (1.8 us for the cheapest system
call) a loop that does nothing else takes 12 us of processor time for it, and uvloop 14.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

RESULTS = Path(__file__).parent / "results" / "daemon_overhead.csv"
T = TypeVar("T")
NAP_S = 0.001
STAMP = re.compile(rb"(\d{19}) ")


# --------------------------------------------------------------------------- worker


async def work(rate: float, streams: int) -> None:
    """A worker process that gives every stream a token per step, `rate` a second in all.

    From when `streams` of them are there, so that what it costs to begin them is not counted.
    """
    from llmd.backend import protocol
    from llmd.backend.protocol import Cancel, Delta, Finished, Generate, Load, Ready, Started, Step

    left: dict[str, int] = {}

    def send(event: protocol.Event) -> None:
        sys.stdout.buffer.write(protocol.encode(event))
        sys.stdout.buffer.flush()

    async def step() -> None:
        due = time.monotonic()
        is_full = False
        while True:
            due += max(1, len(left)) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(left) < streams and not is_full:
                continue
            is_full = bool(left)
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


async def serve(rate: float, streams: int, port_file: Path) -> None:
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
        command += ["--streams", str(streams)]
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


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """On the daemon's event loop."""
    from llmd.daemon.http_server import run

    return run(main)


class Measured(NamedTuple):
    """In seconds; `used` of all cores, by each process that was asked about."""

    delays: list[float]
    took: float
    used: list[float]
    num_reads: int  # less than there are tokens, where the daemon or the client was late


def load(port: int) -> None:
    """The model, before anything is measured."""
    body = json.dumps({"model": "clock", "stream": False}).encode()
    url = f"http://127.0.0.1:{port}/api/generate"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        answer.read()


def measure(port: int, streams: int, tokens: int, everyone: Sequence[psutil.Process]) -> Measured:
    """All streams from their first token to their last.

    What the client does takes from the cores that it measures. So it looks at all sockets once in
    a while (its nap counts as delay: to be woken for each piece would cost the daemon that wakes it
    more than the piece), notes what came and when, and reads it when all is over.
    """
    body = json.dumps(
        {"model": "clock", "prompt": "go", "options": {"num_predict": tokens}, "raw": True}
    ).encode()
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    sockets = {}
    for _ in range(streams):
        stream = socket.create_connection(("127.0.0.1", port))
        sockets[stream.fileno()] = stream
        stream.sendall(head.encode() + b"\r\n\r\n" + body)
    came: list[tuple[int, bytes]] = []
    before: list[float] = []
    began = 0.0
    with selectors.DefaultSelector() as selector:
        for stream in sockets.values():
            selector.register(stream, selectors.EVENT_READ, stream.recv)
        while sockets:
            time.sleep(NAP_S)
            ready = selector.select(0)
            if ready and not before:
                before, began = [cpu_s(one) for one in everyone], time.monotonic()
            for key, _ in ready:
                data = key.data(16384)
                came.append((time.time_ns(), data))
                if not data or data.endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fd)
                    sockets.pop(key.fd).close()
    took = time.monotonic() - began
    used = [cpu_s(one) - past for one, past in zip(everyone, before, strict=True)]
    delays = [(now - int(stamp)) / 1e9 for now, data in came for stamp in STAMP.findall(data)]
    assert len(delays) == streams * tokens, "a stream ended early"
    return Measured(delays, took, used, len(came))


def cpu_s(process: psutil.Process) -> float:
    """What it has used of all cores, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run(streams: int, rate: float, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, __file__, "--role", "daemon", "--rate", str(rate)]
        command += ["--streams", str(streams)]
        daemon = subprocess.Popen([*command, "--port-file", str(port_file)])
        try:
            deadline = time.monotonic() + 30
            while not port_file.exists() or not port_file.read_text():
                assert time.monotonic() < deadline, "the daemon did not start"
                time.sleep(0.05)
            port = int(port_file.read_text())
            load(port)
            process = psutil.Process(daemon.pid)
            worker = process.children()[0]
            everyone = (process, worker, psutil.Process())
            seen = measure(port, streams, int(rate * seconds / streams), everyone)
            rss = process.memory_info().rss
        finally:
            daemon.terminate()
            daemon.wait()
    delays, took = sorted(seen.delays), seen.took
    daemon_s, worker_s, client_s = seen.used
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "streams": streams,
        "tokens_per_s": round(len(delays) / took),
        "median_ms": round(statistics.median(delays) * 1e3, 2),
        "p95_ms": round(delays[int(len(delays) * 0.95)] * 1e3, 2),
        "p99_ms": round(delays[int(len(delays) * 0.99)] * 1e3, 2),
        "daemon_core_share": round(daemon_s / took, 3),
        "us_per_token": round(daemon_s / max(1, len(delays)) * 1e6, 1),
        "reads_per_token": round(seen.num_reads / len(delays), 2),
        "worker_core_share": round(worker_s / took, 3),
        "client_core_share": round(client_s / took, 3),
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
        run_loop(work(options.rate, options.streams))
    elif options.role == "daemon":
        from llmd.daemon.http_server import calm_collector

        calm_collector()
        run_loop(serve(options.rate, options.streams, options.port_file))
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
