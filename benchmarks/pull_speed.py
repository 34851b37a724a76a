"""How fast a pull is beside curl, and what the daemon is like meanwhile.

    python -m benchmarks.pull_speed [GIGABYTES] [ROUNDS]

A server on the loopback hands out one GGUF file by sendfile; curl fetches it to the disk and syncs,
then a real daemon pulls it from the same address: fetched, hashed, synced, renamed, its header
read. Curl and the daemon take turns, and the best of each counts: what disturbs them comes from
outside. While a pull runs, /api/version is asked every 10 ms and the daemon's resident memory read.

Writes a table to standard output. Wants curl, and twice the file's size on the disk.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.registry import model_makers

SERVER = """
import os, re, socket, sys, threading
path = sys.argv[1]
size = os.path.getsize(path)
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(listener.getsockname()[1], flush=True)

def answer(connection):
    pending = b""
    with connection, open(path, "rb") as file:
        while True:
            while b"\\r\\n\\r\\n" not in pending:
                more = connection.recv(65536)
                if not more:
                    return
                pending += more
            head, _, pending = pending.partition(b"\\r\\n\\r\\n")
            found = re.search(rb"(?i)range: bytes=(\\d+)-(\\d*)", head)
            start = int(found[1]) if found else 0
            end = int(found[2]) if found and found[2] else size - 1
            status = "206 Partial Content" if found else "200 OK"
            shown = f"Content-Range: bytes {start}-{end}/{size}\\r\\n" if found else ""
            connection.sendall(
                f"HTTP/1.1 {status}\\r\\nETag: \\"v1\\"\\r\\nAccept-Ranges: bytes\\r\\n{shown}"
                f"Content-Length: {end - start + 1}\\r\\n\\r\\n".encode()
            )
            while start <= end:
                start += os.sendfile(connection.fileno(), file.fileno(), start, end - start + 1)

while True:
    connection, _ = listener.accept()
    threading.Thread(target=answer, args=(connection,), daemon=True).start()
"""


@dataclass(frozen=True)
class Pulled:
    """What one pull cost. Seconds and bytes."""

    seconds: float
    slowest_answer_s: float
    late_answers: int  # over 50 ms
    answers: int
    growth: int


def main() -> None:
    size = int(float(sys.argv[1]) * 1e9) if len(sys.argv) > 1 else 1_000_000_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory(prefix="llmd-pull-speed-") as text:
        folder = Path(text)
        source = write_model(folder / "m.gguf", size)
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, str(source)], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/m.gguf"
            try:
                report(size, *measure(folder, url, rounds))
            finally:
                server.kill()


def write_model(path: Path, size: int) -> Path:
    block = os.urandom(16 << 20)
    with path.open("wb") as file:
        file.write(model_makers.tiny_gguf())
        while file.tell() < size:
            file.write(block[: size - file.tell()])
    return path


def measure(folder: Path, url: str, rounds: int) -> tuple[list[float], list[Pulled]]:
    curls, pulls = [], []
    with Daemon(folder) as (port, process):
        for number in range(rounds):
            curls.append(curl(url, folder / "curled"))
            pulls.append(pull(port, process, url, number))
    return curls, pulls


def curl(url: str, target: Path) -> float:
    program = shutil.which("curl")
    assert program is not None, "needs curl"
    begun = time.monotonic()
    subprocess.run([program, "-sf", "-o", str(target), url], check=True)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    taken = time.monotonic() - begun
    target.unlink()
    return taken


class Daemon:
    """A real daemon with a models folder of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._environ = {
            **os.environ,
            "LLMD_HOST": f"127.0.0.1:{self.port}",
            "LLMD_MODELS": str(folder / "models"),
        }

    def __enter__(self) -> tuple[int, psutil.Process]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmd.daemon"], env=self._environ, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                ask(self.port, "GET", "/api/version")
                return self.port, psutil.Process(self._process.pid)
            except OSError:
                time.sleep(0.1)

    def __exit__(self, *args: object) -> None:
        self._process.terminate()
        self._process.wait()


def ask(port: int, method: str, path: str, body: object = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, None if body is None else json.dumps(body))
    content = connection.getresponse().read()
    connection.close()
    return content


def pull(port: int, process: psutil.Process, url: str, number: int) -> Pulled:
    before = process.memory_info().rss
    most, answers = before, []
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.01):
            asked = time.monotonic()
            ask(port, "GET", "/api/version")
            answers.append(time.monotonic() - asked)
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.monotonic()
    body = {"model": url, "as": f"speed:{number}", "insecure": True}
    last = ask(port, "POST", "/api/pull", body).splitlines()[-1]
    seconds = time.monotonic() - begun
    is_over.set()
    watcher.join()
    assert b"success" in last, last
    ask(port, "DELETE", "/api/delete", {"model": f"speed:{number}"})
    late = sum(1 for answer in answers if answer > 0.05)
    return Pulled(seconds, max(answers, default=0), late, len(answers), most - before)


def report(size: int, curls: list[float], pulls: list[Pulled]) -> None:
    best = min(pulls, key=lambda pulled: pulled.seconds)
    print("| | seconds, each round | MB/s, best |\n|---|---|---|")
    for name, times in (("curl", curls), ("llmd", [pulled.seconds for pulled in pulls])):
        shown = ", ".join(f"{seconds:.2f}" for seconds in times)
        print(f"| {name} | {shown} | {size / min(times) / 1e6:.0f} |")
    print(f"\nllmd reaches {min(curls) / best.seconds:.0%} of curl, for {size / 1e9:g} GB.")
    answers = sum(pulled.answers for pulled in pulls)
    late = sum(pulled.late_answers for pulled in pulls)
    slowest = max(pulled.slowest_answer_s for pulled in pulls)
    print(
        f"{answers} answers meanwhile, {late} later than 50 ms, the slowest {slowest * 1e3:.0f} ms."
    )
    print(f"Memory grew by at most {max(pulled.growth for pulled in pulls) / 2**20:.0f} MiB.")


if __name__ == "__main__":
    main()
