"""From `llmd serve` to the first answer: python benchmarks/start_time.py M.gguf [--rounds N]

Each round starts the daemon afresh, on a free port: with its spare worker, then without. Seconds
are from starting the process to the answer of /api/version, and to that of /api/generate for one
token, which is asked for as soon as the first is there. The files are in the system's cache, the
kernels are compiled. `--beside FOLDER` takes turns with another version, whose package `llmd` is in
that folder: a machine's speed changes from one minute to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from llmd.registry.pull import pull
from llmd.registry.store import ModelStore


def main() -> None:
    """Parse, take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="a folder with another llmd in it")
    args = parser.parse_args()
    ways: dict[str, dict[str, str]] = {
        "with the spare worker": {},
        "LLMD_SPARE_WORKER=0": {"LLMD_SPARE_WORKER": "0"},
    }
    if args.beside:
        ways[f"llmd of {args.beside.name}"] = {"PYTHONPATH": str(args.beside)}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        name = asyncio.run(pull(ModelStore(Path(folder)), str(args.model.resolve()))).name.display
        for environ in ways.values():
            start(Path(folder), name, environ)  # kernels and files of each version
        for _ in range(args.rounds):
            for way, environ in ways.items():
                found[way].append(start(Path(folder), name, environ))
    print("| start | daemon answers, s | first token, s | the first tokens of all rounds |")
    print("|---|---|---|---|")
    for way, times in found.items():
        answers, tokens = zip(*times, strict=True)
        each = " ".join(f"{seconds:.2f}" for seconds in sorted(tokens))
        medians = f"{statistics.median(answers):.2f} | {statistics.median(tokens):.2f}"
        print(f"| {way} | {medians} | {each} |")


def start(models: Path, name: str, environ: dict[str, str]) -> tuple[float, float]:
    """Seconds until the daemon answers, and until the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmd", "serve"],
        env={**os.environ, "LLMD_HOST": address, "LLMD_MODELS": str(models), **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=models,
    )
    try:
        while not _answers(f"http://{address}/api/version"):
            assert process.poll() is None, "the daemon has ended"
            time.sleep(0.01)
        answered_s = time.perf_counter() - began
        body = {"model": name, "prompt": "hi", "options": {"num_predict": 1}}
        request = urllib.request.Request(
            f"http://{address}/api/generate", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request) as response:
            response.read()
        return answered_s, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
