"""How long a model takes to open, and in how much memory: python benchmarks/load_time.py M.gguf ...

Each load is a fresh process with the collector off, as a worker is; the first one finds an empty
cache folder. Seconds are from the Load message to ready, without starting Python and importing
torch, which every worker does; those of all cores together are what a busy machine does not change
much. Memory is what the process gained over what it held before the load,
at its peak and when ready, as multiples of the weights that stay.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Parse, load, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="load once with this folder, print JSON")
    args = parser.parse_args()
    if args.cache:
        print(json.dumps(load(args.models[0], args.cache)))
        return
    print(
        "| model | load | s | of all cores | weights, MB | gained when ready | at the peak | by |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(args.rounds):
                command = [sys.executable, __file__, str(model), "--cache", folder]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout)
                print(
                    f"| {model.name} | {'first' if number == 0 else 'later'} "
                    f"| {found['seconds']:.2f} | {found['cpu']:.2f} "
                    f"| {found['weights'] / 1e6:.0f} "
                    f"| {found['ready'] / found['weights']:.2f} × "
                    f"| {found['peak'] / found['weights']:.2f} × | {found['kernels']} |",
                    flush=True,
                )


def load(model: Path, cache: Path) -> dict[str, float | str]:
    """Seconds, and bytes: the weights, what was gained by the load, and that at the peak."""
    gc.disable()
    import resource

    import psutil

    from llmd.backend.assembly import load_model
    from llmd.backend.protocol import Load, ModelFile

    process = psutil.Process()
    before = process.memory_info().rss
    files = [ModelFile("model.gguf", "weights", str(model))]
    message = Load(name="m", digest="d", files=files, cache_dir=str(cache), context_length=4096)
    began, busy = time.perf_counter(), time.process_time()
    loaded = load_model(message, lambda share, stage: None)
    seconds, cpu = time.perf_counter() - began, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    return {
        "seconds": seconds,
        "cpu": cpu,
        "weights": loaded.ready.weights_bytes,
        "ready": process.memory_info().rss - before,
        "peak": peak - before,
        "kernels": str(loaded.ready.details["kernels"]),
    }


if __name__ == "__main__":
    main()
