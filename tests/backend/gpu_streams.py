"""Run a set of requests through an engine on a GpuRunner, undisturbed or roughly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.kernels.select import Choice
from llmd.backend.protocol import DevicePart, SamplingParams
from llmd.backend.runner.gpu_runner import BLOCK_SIZE, GpuRunner

from .tiny_checkpoint import TinyCheckpoint

TORCH = Choice("torch", "the test says so")
TRITON = Choice("triton", "the test says so")


def make_runner(checkpoint: TinyCheckpoint, choice: Choice = TORCH, **settings: Any) -> GpuRunner:
    parts = settings.pop("parts", [DevicePart("cpu", -1)])
    return GpuRunner(
        checkpoint,
        parts,
        num_blocks=40,
        dtype=torch.float32,
        max_num_seqs=8,
        choice=choice,
        **settings,
    )


def make_engine(runner: GpuRunner, prefill_chunk: int = 0) -> Engine:
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_batch_tokens=64,
        prefill_chunk=prefill_chunk,
    )
    return Engine(Scheduler(config), runner)


def requests(count: int = 4, max_tokens: int = 6) -> list[EngineRequest]:
    """Prompts of 3 to 40 tokens that share a beginning; greedy and warm ones."""
    made = []
    for index in range(count):
        prompt = tuple((7 * i) % 97 for i in range(20)) + tuple(
            (i * i + index) % 97 for i in range(20)
        )
        warm = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, min_p=0.01)
        made.append(
            EngineRequest(
                id=str(index),
                token_ids=prompt[: (40, 3, 17, 33)[index % 4]],
                num_prompt_tokens=(40, 3, 17, 33)[index % 4],
                max_tokens=max_tokens,
                sampling=warm if index % 2 else SamplingParams(temperature=0.0),
                seed=index * 2**62 + 5,
            )
        )
    return made


def run(
    engine: Engine,
    wanted: list[EngineRequest],
    disturb: Callable[[Engine, int], None] = lambda engine, step: None,
) -> dict[str, tuple[int, ...]]:
    """All tokens of each request."""
    streams: dict[str, tuple[int, ...]] = {}
    for request in wanted:
        engine.add(request)
    step = 0
    while engine.has_work:
        disturb(engine, step)
        for output in engine.step():
            assert not output.error, output.error
            streams[output.id] = streams.get(output.id, ()) + output.token_ids
        engine.check()
        step += 1
        assert step < 500
    return streams
