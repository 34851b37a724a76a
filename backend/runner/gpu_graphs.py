"""Decode steps as captured graphs at a few padded batch sizes.

A small model's step is some hundred launches of a few microseconds each; a captured graph is one.
It runs at the size it was captured at, on tensors that stay where they are: inputs are copied into
them, and rows beyond the batch are padding (slot -1, an empty sequence).

    size = bucket_for(num_seqs) ──None──▶ run eagerly
                                ──size──▶ StepGraphs.run: capture if new, copy in, replay

The sizes grow geometrically: at most a third of a captured batch is padding, above 4 rows, with 14
graphs. A few are captured before the worker is ready, the others when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gpu_inputs import StepTensors

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
EAGER_SIZES = (8, 4, 2, 1)  # captured before ready, the largest first: the smaller reuse its memory

Forward = Callable[[StepTensors], Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def bucket_for(num_seqs: int, sizes: tuple[int, ...] = SIZES) -> int | None:
    """The smallest captured size that holds the batch; None if none does."""
    return next((size for size in sizes if size >= num_seqs), None)


def capture_cuda(step: Callable[[], None]) -> Replay:
    """Capture what `step` launches. It runs three times first: libraries and tuning settle then."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
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
        # By size: the tensors a graph reads, the tensor it writes, and how to run it.
        self._graphs: dict[int, tuple[StepTensors, list[Tensor], Replay]] = {}

    def __repr__(self) -> str:
        return f"<StepGraphs {sorted(self._graphs)}>"

    @property
    def sizes(self) -> tuple[int, ...]:
        """What has been captured."""
        return tuple(sorted(self._graphs))

    def prepare(self, device: torch.device) -> None:
        """Capture what a first request is likely to need."""
        for size in EAGER_SIZES:
            self._graph(size, device)

    def run(self, inputs: StepTensors) -> Tensor | None:
        """Logits [num_seqs, vocab_size] of a pure decode batch; None if no size holds it.

        The logits are overwritten by the next run of that size.
        """
        num_seqs = inputs.num_seqs
        size = bucket_for(num_seqs)
        if size is None:
            return None
        static, logits, replay = self._graph(size, inputs.token_ids.device)
        static.fill_padded(inputs)
        replay()
        return logits[0][:num_seqs]

    def _graph(self, size: int, device: torch.device) -> tuple[StepTensors, list[Tensor], Replay]:
        if size not in self._graphs:
            static = StepTensors.blank(size, self._max_blocks, self._block_size, device)
            out: list[Tensor] = []

            def step() -> None:
                out[:] = [self._forward(static)]

            step()
            self._graphs[size] = (static, out, self._capture(step))
        return self._graphs[size]
