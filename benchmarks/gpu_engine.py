"""The whole engine on a randomly initialised model: decode, prefill, prefix hits, and the peer.

The same Engine, Scheduler and GpuRunner as in a worker; prompts are random ids, so no two share a
prefix unless they are meant to. The peer is transformers' continuous batching on a model of the
same shape with weights of the same distribution, in the same process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..backend.engine.engine import Engine, EngineRequest
from ..backend.engine.scheduler import Scheduler, SchedulerConfig
from ..backend.kernels import select
from ..backend.protocol import SamplingParams
from ..backend.runner.gpu_cache import GpuCache
from ..backend.runner.gpu_graphs import Capture, CudaCapture
from ..backend.runner.gpu_model import GpuDecoder
from ..backend.runner.gpu_open import BLOCK_SIZE
from ..backend.runner.gpu_runner import GpuRunner
from .gpu_shapes import RandomCheckpoint, Shape


@dataclass(frozen=True)
class Plan:
    """How much of each is run."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 128
    steps: int = 48  # decode steps that are timed
    long_prompt: int = 4096
    shared_prompt: int = 2048
    peer_streams: int = 64
    peer_prompt: int = 128
    peer_outputs: int = 64


DRY = Plan((1, 2), 10, 3, 40, 33, 2, 6, 4)


@dataclass(frozen=True)
class Decode:
    """Of one batch size."""

    streams: int
    tokens_per_s: float
    step_s: float
    read_bytes: int  # that a step cannot do without: weights, and keys and values

    def floor_share(self, copy_rate: float) -> float:
        """The time that reading takes at the measured copy bandwidth, of the step's."""
        return self.read_bytes / copy_rate / self.step_s


class Bench:
    """One model on one device."""

    def __init__(self, shape: Shape, bits: int, device: torch.device, max_num_seqs: int) -> None:
        self.shape = shape
        self.device = device
        self._checkpoint = RandomCheckpoint(shape, bits, device)
        is_gpu = device.type == "cuda"
        self._dtype = torch.bfloat16 if is_gpu else torch.float32
        config = self._checkpoint.config
        devices = [device] * config.num_layers
        self.choice = select.choose(device)
        self._decoder = GpuDecoder(
            self._checkpoint, self._dtype, devices, choice=self.choice, keeps_packed=True
        )
        self._devices = devices
        self._max_num_seqs = max_num_seqs
        self._chance = random.Random(7)
        self.weights_bytes = self._decoder.weights_bytes

    def engine(self, num_tokens: int, capture: Capture | None, context: int) -> Engine:
        """A fresh engine whose cache holds so many tokens."""
        config = self._checkpoint.config
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 8
        cache = GpuCache(config.layers, self._devices, self._dtype, num_blocks, BLOCK_SIZE)
        runner = GpuRunner(
            self._decoder,
            cache,
            max_num_seqs=self._max_num_seqs,
            context_length=context,
            capture=capture,
        )
        limits = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self._max_num_seqs,
            max_batch_tokens=8192,
            max_gap_ratio=0.0,
        )
        return Engine(Scheduler(limits), runner)

    def capture(self) -> Capture | None:
        """Graphs, where there are any."""
        can_capture = self.device.type == "cuda" and self.choice.name == "triton"
        return CudaCapture() if can_capture else None

    def requests(self, count: int, prompt: int, outputs: int) -> list[EngineRequest]:
        """Greedy, and none ends before its last token."""
        vocab = self.shape.vocab_size
        return [
            EngineRequest(
                id=f"{index}/{self._chance.random()}",
                token_ids=tuple(self._chance.randrange(vocab) for _ in range(prompt)),
                num_prompt_tokens=prompt,
                max_tokens=outputs,
                sampling=SamplingParams(temperature=0.0),
            )
            for index in range(count)
        ]

    def decode(self, streams: int, plan: Plan, *, graphs: bool = True) -> Decode:
        """Time of the steps in which all streams decode."""
        warm = 4
        length = plan.prompt + warm + plan.steps + 8  # none ends before the clock is read
        padded = -(-length // BLOCK_SIZE) * BLOCK_SIZE
        engine = self.engine(streams * padded, self.capture() if graphs else None, padded)
        for request in self.requests(streams, plan.prompt, length - plan.prompt):
            engine.add(request)
        seen: dict[str, int] = {}
        while len(seen) < streams or min(seen.values()) < warm:
            for output in engine.step():
                seen[output.id] = seen.get(output.id, 0) + len(output.token_ids)
        self._wait()
        began, tokens = time.perf_counter(), 0
        for _ in range(plan.steps):
            tokens += sum(len(output.token_ids) for output in engine.step())
        self._wait()
        taken = time.perf_counter() - began
        layers = self._checkpoint.config.layers
        kv = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        read = self.read_weights + streams * length * kv * self._dtype.itemsize
        return Decode(streams, tokens / taken, taken / plan.steps, read)

    @property
    def read_weights(self) -> int:
        """Bytes of weights that a step reads: all but an embedding that is not the head too."""
        table = self.shape.vocab_size * self.shape.hidden_size * self._dtype.itemsize
        return self.weights_bytes - (0 if self.shape.tied else table)

    def prefill(self, plan: Plan) -> tuple[float, float]:
        """Tokens per second, and operations per second, of one long prompt; the second of two."""
        length = plan.long_prompt
        engine = self.engine(2 * length + 64, None, length + 16)
        taken = [self._first_token(engine, request) for request in self.requests(2, length, 1)]
        shape = self.shape
        products = 2 * shape.matrix_elements * length
        products -= 2 * shape.vocab_size * shape.hidden_size * (length - 1)  # one row has logits
        scores = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length**2
        return length / taken[1], (products + scores) / taken[1]

    def prefix_hit(self, plan: Plan) -> tuple[float, float]:
        """Seconds to the first token of a prompt that is new, and of the same again."""
        engine = self.engine(4 * plan.shared_prompt + 64, self.capture(), plan.shared_prompt + 16)
        warm, first = self.requests(2, plan.shared_prompt, 1)
        self._first_token(engine, warm)
        self._first_token(engine, warm)
        return self._first_token(engine, first), self._first_token(engine, first)

    def throughput(self, plan: Plan) -> float:
        """Output tokens per second of the peer's load, from the first prompt to the last token."""
        padded = -(-(plan.peer_prompt + plan.peer_outputs + 2) // BLOCK_SIZE) * BLOCK_SIZE
        engine = self.engine(plan.peer_streams * padded, self.capture(), padded)
        taken = []
        for _ in range(2):  # the first captures graphs
            wanted = self.requests(plan.peer_streams, plan.peer_prompt, plan.peer_outputs)
            began = time.perf_counter()
            for request in wanted:
                engine.add(request)
            while engine.has_work:
                engine.step()
            self._wait()
            taken.append(time.perf_counter() - began)
        return plan.peer_streams * plan.peer_outputs / taken[1]

    def _first_token(self, engine: Engine, request: EngineRequest) -> float:
        self._wait()
        began = time.perf_counter()
        engine.add(request)
        while engine.has_work:
            engine.step()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peer_throughput(
    shape: Shape, plan: Plan, device: torch.device, tell: Callable[[str], None]
) -> float:
    """Output tokens per second of transformers' continuous batching. Raises whatever it raises."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.generation import GenerationConfig

    raw: dict[str, Any] = shape.raw()
    raw.pop("model_type")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**raw)).to(dtype).eval()
    model.set_attn_implementation("sdpa")
    chance = random.Random(7)
    prompts = [
        [chance.randrange(shape.vocab_size) for _ in range(plan.peer_prompt)]
        for _ in range(plan.peer_streams)
    ]
    settings = GenerationConfig(
        max_new_tokens=plan.peer_outputs, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    best = 0.0
    for turn in range(2):
        began = time.perf_counter()
        answers = model.generate_batch(inputs=prompts, generation_config=settings)
        taken = time.perf_counter() - began
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        tell(f"peer, turn {turn}: {tokens} tokens in {taken:.1f} s, its own warm-up included")
        best = max(best, tokens / taken)
    return best
