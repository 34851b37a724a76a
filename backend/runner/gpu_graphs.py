"""Decode steps as captured graphs at a few padded batch sizes.

A small model's step is some hundred launches of a few microseconds each; a captured graph is one.
It runs at the size it was captured at, on tensors that stay where they are: inputs are copied into
them, and rows beyond the batch are padding (slot -1, an empty sequence).

    size = bucket_for(num_seqs) ──None──▶ run eagerly
                                ──size──▶ StepGraphs.run: capture if new, copy in, replay

The sizes grow geometrically: at most a third of a captured batch is padding, above 4 rows, with 14
graphs. A graph also has a length: attention launches a program for each segment of the longest
sequence that it could meet, and the tables are as wide; so lengths grow by fours, and short
sequences do not pay for a long context. A few graphs are captured before the worker is ready, the
others when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .gpu_inputs import StepTensors

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
EAGER_SIZES = (8, 4, 2, 1)  # captured before ready, the largest first: the smaller reuse its memory
SHORTEST = 2048  # tokens; every length after it is four times the one before

Forward = Callable[[StepTensors], Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def bucket_for(num_seqs: int, sizes: tuple[int, ...] = SIZES) -> int | None:
    """The smallest captured size that holds the batch; None if none does."""
    return next((size for size in sizes if size >= num_seqs), None)


def length_for(max_seq_len: int, longest: int) -> int:
    """The captured length that holds the sequences of a batch; `longest` is the last one."""
    length = SHORTEST
    while length < max_seq_len:
        length *= 4
    return min(length, longest)


class CudaCapture:
    """Captures what a step launches. All graphs share one pool: only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch's

    def __call__(self, step: Callable[[], None]) -> Replay:
        """`step` runs three times first: libraries and tuning settle then."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        return graph.replay


def rerun(step: Callable[[], None]) -> Replay:
    """The stand-in where nothing can be captured: replaying is running again. For tests."""
    return step


class StepGraphs:
    """The captured decode steps of one model. Owner: the runner, on the engine thread."""

    def __init__(
        self, forward: Forward, capture: Capture, max_blocks: int, block_size: int
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._max_blocks = max_blocks
        self._block_size = block_size
        # By size and length: the tensors a graph reads, the tensor it writes, and how to run it.
        self._graphs: dict[tuple[int, int], tuple[StepTensors, list[Tensor], Replay]] = {}

    def __repr__(self) -> str:
        return f"<StepGraphs {sorted(self._graphs)}>"

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """What has been captured: sequences, and tokens of the longest."""
        return tuple(sorted(self._graphs))

    def prepare(self, device: torch.device) -> None:
        """Capture what a first request is likely to need."""
        for size in EAGER_SIZES:
            self._graph(size, self._length_for(1), device)

    def run(self, inputs: StepTensors) -> Tensor | None:
        """Logits [num_seqs, vocab_size] of a pure decode batch; None if no size holds it.

        The logits are overwritten by the next run of that size.
        """
        num_seqs = inputs.num_seqs
        size = bucket_for(num_seqs)
        if size is None:
            return None
        length = self._length_for(inputs.max_seq_len)
        static, logits, replay = self._graph(size, length, inputs.token_ids.device)
        static.fill_padded(inputs)
        replay()
        return logits[0][:num_seqs]

    def _length_for(self, max_seq_len: int) -> int:
        return length_for(max_seq_len, self._max_blocks * self._block_size)

    def _graph(
        self, size: int, length: int, device: torch.device
    ) -> tuple[StepTensors, list[Tensor], Replay]:
        if (size, length) not in self._graphs:
            blocks = -(-length // self._block_size)
            static = StepTensors.blank(size, blocks, self._block_size, device)
            out: list[Tensor] = []

            def step() -> None:
                out[:] = [self._forward(static)]

            step()
            self._graphs[size, length] = (static, out, self._capture(step))
        return self._graphs[size, length]
