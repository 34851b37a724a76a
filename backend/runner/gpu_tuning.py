"""Measuring at the first start: the fastest tile of each product, and a step's working memory.

Both are data that gpu_profile keeps; with a stored profile nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ..engine.batch import Batch, Chunk, RowStart
from ..kernels.packed import PackedWeight
from ..kernels.tiles import Tuned, candidates, fastest
from ..protocol import SamplingParams
from .gpu_model import current
from .gpu_runner import GpuRunner
from .gpu_weights import Projection

FEW, MANY = 1, 256  # rows that stand for decode and for prefill
REPEATS = 7

Seconds = Callable[[Callable[[], object]], float]


def tune(
    products: Sequence[Projection], dtype: torch.dtype, known: Mapping[str, int], seconds: Seconds
) -> dict[str, int]:
    """Give every weight the fastest tile of its kind; what is in `known` is not measured again."""
    found: dict[str, int] = {}
    for product in products:
        weight = product.weight
        if not isinstance(weight, PackedWeight):
            continue
        for rows in (FEW, MANY):
            name = f"{weight.kind}, {rows} rows"
            if name not in found:
                stored = known.get(name)
                found[name] = _measured(product, rows, dtype, seconds) if stored is None else stored
        few, many = (found[f"{weight.kind}, {rows} rows"] for rows in (FEW, MANY))
        product.weight = replace(weight, tuned=Tuned(few, many))
    return found


def _measured(product: Projection, rows: int, dtype: torch.dtype, seconds: Seconds) -> int:
    weight = product.weight
    assert isinstance(weight, PackedWeight)
    x = torch.randn(rows, weight.num_columns, dtype=dtype, device=weight.low.device)

    def time_of(place: int) -> float:
        product.weight = replace(weight, tuned=Tuned(place, place))
        with current(x.device):
            return seconds(lambda: product(x))

    return fastest(len(candidates(rows, dtype.itemsize)), time_of)


def device_seconds(run: Callable[[], object]) -> float:
    """The median of a few runs, by the device's own events."""
    run()
    times = []
    for _ in range(REPEATS):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return sorted(times)[len(times) // 2]


def widest_step(runner: GpuRunner, num_tokens: int) -> None:
    """Run the step that allocates most: as many tokens as a step may have, of one prompt."""
    count = min(num_tokens, runner.num_blocks * runner.block_size, runner.context_length)
    blocks = tuple(range(-(-count // runner.block_size)))
    start = RowStart(
        row=0,
        token_ids=(0,) * count,
        num_prompt_tokens=count,
        sampling=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
    )
    chunk = Chunk(row=0, start=0, num_tokens=count, new_blocks=blocks, samples=True)
    runner.execute(Batch(step=0, chunks=(chunk,), starts=(start,)))
    runner.execute(Batch(step=0, chunks=(), releases=(0,)))
