"""How fast GGUF types become floats, beside the `gguf` package: python benchmarks/dequantize.py

For every type that both know: the same random blocks, equal to the bit, and the best time of a few
rounds of each. Prints a table; ends with 1 if a type is unequal or less than 4 times as fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from llmd.backend.models.dequantize import BLOCK_BYTES, BLOCK_SIZES, SUPPORTED_TYPES, dequantize
from llmd.backend.runner.model_runner import usable_cores

WANTED = 4.0  # times the package's speed
PLAIN = ("F32", "F16", "BF16")  # nothing to dequantise
# Where the float16 numbers of a block are: random bytes there would be NaN now and then.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "MXFP4": (),
}


def main() -> int:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(usable_cores())
    print(f"{args.weights} weights of a type, best of {args.rounds}, {usable_cores()} threads\n")
    print("| type | llmd, 10⁶ weights/s | gguf | times | equal bits |\n|---|---|---|---|---|")
    is_good = True
    for kind in SUPPORTED_TYPES:
        if kind in PLAIN:
            continue
        raw = blocks_of(kind, args.weights // BLOCK_SIZES[kind])
        number = gguf.GGMLQuantizationType[kind]
        theirs, wanted = timed(lambda raw=raw, n=number: gguf.dequantize(raw, n), args.rounds)
        flat = torch.from_numpy(raw).view(-1)
        ours, found = timed(
            lambda flat=flat, kind=kind: dequantize(flat, kind, torch.float32), args.rounds
        )
        is_equal = np.array_equal(found.numpy().view(np.int32), wanted.reshape(-1).view(np.int32))
        is_good &= is_equal and theirs / ours >= WANTED
        speeds = [f"{args.weights / seconds / 1e6:.0f}" for seconds in (ours, theirs)]
        answer = "yes" if is_equal else "NO"
        print(
            f"| {kind} | {speeds[0]} | {speeds[1]} | {theirs / ours:.1f} | {answer} |", flush=True
        )
    return 0 if is_good else 1


def blocks_of(kind: str, num_blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks [num_blocks, bytes] whose scales are numbers."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(108, 135, num_blocks)  # its scale is an exponent
    for place in HALVES.get(kind, (0,)):
        half = rng.uniform(1e-3, 1e-2, num_blocks).astype(np.float16)
        raw[:, place : place + 2] = half[:, None].view(np.uint8)
    return raw


def timed(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The best seconds, and what came out."""
    best, result = float("inf"), None
    for _ in range(rounds):
        began = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - began)
    return best, result


if __name__ == "__main__":
    sys.exit(main())
