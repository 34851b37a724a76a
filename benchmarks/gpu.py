"""What the Triton kernels reach on this machine's GPU, beside what the machine can do at all.

    python benchmarks/gpu.py [--out FILE.json]

Measured in one run: the copy bandwidth and the bf16 matmul rate of the card; decode attention over
64 sequences of 4096 tokens, in bytes of keys and values per second; prefill attention in operations
per second; quantised products against the bandwidth. The kernels' correctness on the device is
`scripts/kernels`. Without a GPU it says so and ends with status 2; no figure is made up.

Not measured yet: the whole engine, graphs against eager steps, and a peer.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmd.backend.kernels import packed

WARMUP, REPEATS = 5, 30


def seconds(run: Callable[[], object]) -> float:
    """The median of REPEATS runs, by the device's own events."""
    for _ in range(WARMUP):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def copy_rate() -> float:
    """Bytes per second, read and written, of a 1 GiB copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    """Operations per second of an 8192-cubed bf16 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds(lambda: a @ a)


def decode_attention_rate(num_seqs: int = 64, length: int = 4096) -> float:
    """Bytes of keys and values per second: 32 query heads, 8 kv heads of 128."""
    from llmd.backend.kernels.paged_attention import paged_attention

    blocks = num_seqs * length // 16
    keys = torch.randn(blocks, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    values = torch.randn_like(keys)
    tables = torch.randperm(blocks, device="cuda").to(torch.int32).view(num_seqs, -1)
    query = torch.randn(num_seqs, 32, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32)
    lens = torch.full((num_seqs,), length, device="cuda", dtype=torch.int32)

    def run() -> None:
        paged_attention(
            query,
            keys,
            values,
            tables,
            starts,
            lens,
            0.09,
            max_query_len=1,
            max_seq_len=length,
        )

    return 2 * keys.numel() * 2 / seconds(run)


def prefill_attention_rate(length: int = 4096) -> float:
    """Operations per second of one causal prompt: half of the square is computed."""
    from llmd.backend.kernels.paged_attention import paged_attention

    keys = torch.randn(length // 16, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    tables = torch.arange(length // 16, device="cuda", dtype=torch.int32)[None]
    query = torch.randn(length, 32, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, length], device="cuda", dtype=torch.int32)
    lens = torch.tensor([length], device="cuda", dtype=torch.int32)

    def run() -> None:
        paged_attention(
            query,
            keys,
            keys,
            tables,
            starts,
            lens,
            0.09,
            max_query_len=length,
            max_seq_len=length,
        )

    return 4 * 32 * 128 * length**2 / 2 / seconds(run)


def product_rate(bits: int, num_rows: int = 1) -> float:
    """Bytes of packed weight per second, 4096 columns and 14336 outputs."""
    from llmd.backend.kernels.matmul import quantized_matmul

    kind = torch.int8 if bits == 8 else torch.uint8
    q = torch.randint(0, 16, (14336, 4096), dtype=kind)
    weight = packed.pack(q, torch.rand(14336, 128), None, bits=bits, group=32).to("cuda")
    x = torch.randn(num_rows, 4096, device="cuda", dtype=torch.bfloat16)
    return weight.size_bytes / seconds(lambda: quantized_matmul(x, weight))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the Triton kernels on this GPU.")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured", file=sys.stderr)
        return 2
    import triton

    copied, multiplied = copy_rate(), matmul_rate()
    table = [
        ("copy, bytes/s", copied, copied),
        ("bf16 matmul, op/s", multiplied, multiplied),
        ("decode attention, 64 x 4096, bytes/s", decode_attention_rate(), copied),
        ("prefill attention, 4096, op/s", prefill_attention_rate(), multiplied),
        ("4-bit product, 1 row, bytes/s", product_rate(4), copied),
        ("8-bit product, 1 row, bytes/s", product_rate(8), copied),
        ("4-bit product, 16 rows, bytes/s", product_rate(4, 16), copied),
    ]
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    for name, rate, limit in table:
        print(f"{name:40} {rate:10.3e}  {rate / limit:6.1%} of the measured limit")
    if arguments.out:
        figures = {
            "date": time.strftime("%Y-%m-%d"),
            "card": card,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "rates": {name: {"rate": rate, "limit": limit} for name, rate, limit in table},
        }
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
