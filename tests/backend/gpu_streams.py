"""Run a set of requests through an engine on a GpuRunner, undisturbed or roughly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.kernels.select import Choice
from llmd.backend.models.checkpoint import Checkpoint
from llmd.backend.protocol import DevicePart, SamplingParams
from llmd.backend.runner.gpu_cache import GpuCache
from llmd.backend.runner.gpu_graphs import Capture
from llmd.backend.runner.gpu_layer_map import layer_map
from llmd.backend.runner.gpu_model import GpuDecoder
from llmd.backend.runner.gpu_open import BLOCK_SIZE
from llmd.backend.runner.gpu_runner import GpuRunner
from llmd.backend.text.grammar import Format, GrammarCompiler
from llmd.backend.text.tokenizer import Tokenizer

TORCH = Choice("torch", "the test says so")
TRITON = Choice("triton", "the test says so")


def make_runner(
    checkpoint: Checkpoint,
    choice: Choice = TORCH,
    parts: Sequence[DevicePart] = (DevicePart("cpu", -1),),
    capture: Capture | None = None,
    num_blocks: int = 40,
) -> GpuRunner:
    config = checkpoint.config
    devices = layer_map(parts, config.num_layers)
    decoder = GpuDecoder(checkpoint, torch.float32, devices, choice=choice, keeps_packed=True)
    cache = GpuCache(config.layers, devices, torch.float32, num_blocks, BLOCK_SIZE)
    return GpuRunner(decoder, cache, max_num_seqs=8, capture=capture)


def make_engine(runner: GpuRunner, prefill_chunk: int = 0, depth: int = 2) -> Engine:
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_batch_tokens=64,
        prefill_chunk=prefill_chunk,
    )
    return Engine(Scheduler(config), runner, depth=depth)


def requests(
    count: int = 4, max_tokens: int = 6, lengths: Sequence[int] = (40, 3, 17, 33)
) -> list[EngineRequest]:
    """Prompts that share a beginning; greedy and warm ones."""
    made = []
    for index in range(count):
        prompt = tuple((7 * i) % 97 for i in range(20)) + tuple(
            (i * i + index) % 97 for i in range(20)
        )
        length = lengths[index % len(lengths)]
        warm = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, min_p=0.01)
        made.append(
            EngineRequest(
                id=str(index),
                token_ids=prompt[:length],
                num_prompt_tokens=length,
                max_tokens=max_tokens,
                sampling=warm if index % 2 else SamplingParams(temperature=0.0),
                seed=index * 2**62 + 5,
            )
        )
    return made


FORMS: list[Format] = [{"regex": "(ab|cd){2}[0-9]"}, {"enum": ["red", "green", 7]}]


def formed(tokenizer: Tokenizer, count: int = 4) -> list[EngineRequest]:
    """As `requests`, for a model of this vocabulary: two of them owe a form, warm as they are."""
    compiler = GrammarCompiler(tokenizer)
    made = []
    for index, request in enumerate(requests(count, 12, (17, 2, 5, 33))):
        form = compiler.compile(FORMS[index % 2]) if index < 2 else None
        warm = SamplingParams(temperature=1.0)
        stop_ids = frozenset(tokenizer.eos_ids) if form is not None else frozenset[int]()
        made.append(replace(request, sampling=warm, grammar=form, stop_ids=stop_ids))
    return made


def assert_formed(tokenizer: Tokenizer, streams: dict[str, tuple[int, ...]]) -> None:
    """The two answers are of their forms, to the end."""
    assert all(streams[name][-1] in tokenizer.eos_ids for name in ("0", "1"))
    regex, choice = (tokenizer.decode([*streams[name][:-1]]) for name in ("0", "1"))
    assert re.fullmatch("(ab|cd){2}[0-9]", regex), regex
    assert json.loads(choice) in ("red", "green", 7), choice


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
