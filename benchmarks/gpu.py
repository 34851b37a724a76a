"""What this machine's GPU reaches with the Triton kernels, beside what it can do at all.

    python -m llmd.benchmarks.gpu [--out FILE.json] [--minutes 6]
    python -m llmd.benchmarks.gpu --dry-run        no GPU: every part runs once, at toy sizes

In one run, without a network: every kernel against its twin; the card's copy bandwidth and bf16
matmul rate, and the kernels' rates beside them; then the whole engine on randomly initialised
models of Llama's 1B and 8B shapes, in bf16 and in 4 bits: tokens per second at 1, 8, 64 and 256
streams and the share of the bandwidth floor that this is, prefill, the first token of a known
prefix, captured graphs against eager steps; and transformers' continuous batching on the same shape
as a peer. A part that does not fit the time or the memory is left out, and the table says so.

Without a GPU it ends with status 2; the figures of a dry run mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..backend.kernels import select
from . import gpu_rates
from .gpu_clock import Clock, Deadline
from .gpu_engine import DRY as DRY_PLAN
from .gpu_engine import Bench, Plan, peer_throughput
from .gpu_shapes import LLAMA_1B, LLAMA_8B, TINY, Shape

TOLERANCE = 2e-2  # of a kernel in bf16, relative to the largest value


@dataclass
class Report:
    """Lines for people and figures for files, as they come in."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, name: str, value: float, unit: str, share: float | None = None, of: str = ""
    ) -> None:
        """A figure, and what share of a bound it is."""
        row: dict[str, Any] = {"name": name, "value": value, "unit": unit}
        if share is not None:
            row |= {"share": share, "of": of}
        self.rows.append(row)
        beside = "" if share is None else f"{share:7.1%} of {of}"
        print(f"{name:58} {value:11.4g} {unit:9} {beside}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        """A part that was left out."""
        self.rows.append({"name": name, "skipped": reason})
        print(f"{name:58} left out: {reason}", flush=True)


class Run:
    """All parts, in the order of their worth."""

    def __init__(self, device: torch.device, minutes: float, is_dry: bool) -> None:
        self.device = device
        self.report = Report()
        self.failures: list[str] = []
        self._deadline = Deadline(60 * minutes)
        self._sizes = gpu_rates.DRY if is_dry else gpu_rates.Sizes()
        self._plan = DRY_PLAN if is_dry else Plan()
        self._clock = Clock(device, 0, 1) if is_dry else Clock(device)
        self._models = [(TINY, 16), (TINY, 4)]
        if not is_dry:
            self._models = [(LLAMA_8B, 16), (LLAMA_8B, 4), (LLAMA_1B, 16), (LLAMA_1B, 4)]
        self.choice = select.choose(device)
        self._kernels = select.load(self.choice)
        self._copied = self._multiplied = 1.0

    def all(self) -> None:
        """Run what fits."""
        self._part("kernels equal their twins", self._check)
        self._part("rates", self._rates)
        for shape, bits in self._models:
            name = f"{shape.name} {'bf16' if bits == 16 else '4-bit'}"
            self._part(name, partial(self._model, shape, bits, name))

    def _part(self, name: str, run: Callable[[], None]) -> None:
        if self._deadline.left_s < 5:
            self.report.skip(name, "the time is up")
            return
        try:
            run()
        except torch.OutOfMemoryError as error:
            self.report.skip(name, f"out of memory: {str(error)[:80]}")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self) -> None:
        worst = 0.0
        for name, off in gpu_rates.checks(self._kernels, self.device):
            worst = max(worst, off)
            if not off <= TOLERANCE:  # NaN fails too
                self.failures.append(f"{name} is off by {off:.3g}")
        self.report.add("worst difference of a kernel to its twin", worst, "relative")

    def _rates(self) -> None:
        clock, kernels, sizes, add = self._clock, self._kernels, self._sizes, self.report.add
        self._copied = gpu_rates.copy_rate(clock, sizes)
        self._multiplied = gpu_rates.matmul_rate(clock, sizes)
        add("copy", self._copied, "B/s")
        add("bf16 matmul", self._multiplied, "op/s")
        rate = gpu_rates.decode_attention_rate(clock, kernels, sizes)
        name = f"decode attention, {sizes.decode_seqs} x {sizes.decode_length}"
        add(name, rate, "B/s", rate / self._copied, "copy")
        rate = gpu_rates.prefill_attention_rate(clock, kernels, sizes)
        name = f"prefill attention, {sizes.prefill_length}"
        add(name, rate, "op/s", rate / self._multiplied, "matmul")
        for bits in (4, 6, 8):
            for rows in (1, 16):
                rate, _ = gpu_rates.product_rate(clock, kernels, sizes, bits, rows)
                add(f"{bits}-bit product, {rows} rows", rate, "B/s", rate / self._copied, "copy")
        _, rate = gpu_rates.product_rate(clock, kernels, sizes, 4, sizes.prefill_length)
        name = f"4-bit product, {sizes.prefill_length} rows"
        add(name, rate, "op/s", rate / self._multiplied, "matmul")
        for rows in (1, 64):
            taken = gpu_rates.sampling_seconds(clock, kernels, sizes, rows)
            add(f"a draw with top_k and top_p, {rows} rows", taken, "s")

    def _model(self, shape: Shape, bits: int, name: str) -> None:
        plan, add = self._plan, self.report.add
        bench = Bench(shape, bits, self.device, max(*plan.batches, plan.peer_streams))
        add(f"{name}: weights", bench.weights_bytes, "B")
        for streams in plan.batches:
            if self._deadline.left_s < 10:
                self.report.skip(f"{name}: decode, {streams} streams", "the time is up")
                continue
            found = bench.decode(streams, plan)
            share = found.floor_share(self._copied)
            title = f"{name}: decode, {streams} streams"
            add(title, found.tokens_per_s, "tokens/s", share, "floor")
            if streams in (plan.batches[0], plan.batches[1]):
                eager = bench.decode(streams, plan, graphs=False)
                gain = found.tokens_per_s / eager.tokens_per_s
                add(f"{title}, eager", eager.tokens_per_s, "tokens/s")
                add(f"{name}: graphs against eager, {streams} streams", gain, "times")
        tokens, rate = bench.prefill(plan)
        add(f"{name}: prefill", tokens, "tokens/s", rate / self._multiplied, "matmul")
        cold, warm = bench.prefix_hit(plan)
        add(f"{name}: first token, {plan.shared_prompt} tokens, new", cold, "s")
        add(
            f"{name}: first token, {plan.shared_prompt} tokens, known",
            warm,
            "s",
            warm / cold,
            "new",
        )
        if bits == 16:
            self._peer(bench, shape, name)

    def _peer(self, bench: Bench, shape: Shape, name: str) -> None:
        title = f"{name}: transformers' continuous batching, {self._plan.peer_streams} streams"
        ours = bench.throughput(self._plan)
        self.report.add(f"{name}: the peer's load on this engine", ours, "tokens/s")
        if importlib.util.find_spec("transformers") is None:
            self.report.skip(title, "transformers is not installed")
            return
        if self._deadline.left_s < 30:
            self.report.skip(title, "the time is up")
            return
        try:
            theirs = peer_throughput(shape, self._plan, self.device, print)
        except Exception as error:  # a foreign engine; what it cannot do is told, not hidden
            self.report.skip(title, f"{type(error).__name__}: {str(error)[:120]}")
            return
        self.report.add(title, theirs, "tokens/s")
        self.report.add(f"{name}: this engine against the peer", ours / theirs, "times")


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures belong to."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the Triton kernels on this GPU.")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--minutes", type=float, default=6.0, help="what does not fit is left out")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    arguments = parser.parse_args()
    is_dry = arguments.dry_run
    if not is_dry and not torch.cuda.is_available():
        print("no GPU here: nothing is measured (--dry-run tries the parts)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if is_dry else torch.device("cuda", torch.cuda.current_device())
    found = machine(device)
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    run = Run(device, arguments.minutes - 0.3, is_dry)
    print(run.choice)
    run.all()
    for failure in run.failures:
        print(f"WRONG: {failure}")
    if arguments.out and not is_dry:
        figures = {**found, "failures": run.failures, "rows": run.report.rows}
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
