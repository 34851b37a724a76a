"""A model that makes vectors and no text: what stands in for the engine, the prompts, the cache.

The worker sees the same parts as with a decoder; those that generate refuse in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .embedder import Embedder
from .engine.batch import Batch, StepResult
from .models.container import Container
from .models.encoder import Encoder
from .models.encoder_config import encoder_config
from .models.pooling import read_pooling
from .prompt import Prompt, PromptBuilder, RequestRefused
from .protocol import Generate, Load, Ready
from .runner.model_runner import choose_dtype, usable_cores
from .text.tokenizer import Tokenizer


def load_embedder(
    load: Load, container: Container, tokenizer: Tokenizer, progress: Callable[[float, str], None]
) -> tuple[Embedder, Ready]:
    """Raises BadModel and UnsupportedModel.

    "auto" is float32: an encoder is small, its vectors are compared by the last digits, and the
    CPU multiplies it no slower.
    """
    torch.set_num_threads(load.num_threads or usable_cores())
    dtype = torch.float32 if load.dtype == "auto" else choose_dtype(load.dtype)
    config = encoder_config(container.config, container.metadata)
    pooling = read_pooling(load.files, container, config)
    encoder = Encoder(container, config, dtype, lambda share: progress(share, "reading weights"))
    limits = (config.context_length, pooling.max_length, load.context_length)
    max_length = min(limit for limit in limits if limit > 0)
    ready = Ready(
        context_length=max_length,
        trained_context_length=config.context_length,
        block_size=0,
        num_blocks=0,
        block_bytes=0,
        weights_bytes=encoder.weights_bytes,
        dtype=str(dtype).removeprefix("torch."),
        capabilities=["embedding"],
        vocab_size=config.vocab_size,
        details={
            "dtype": str(dtype).removeprefix("torch."),
            "format": container.format,
            "quantization": container.quantization,
            "kernels": "torch, whole texts",
            "pooling": pooling.mode,
            "threads": torch.get_num_threads(),
        },
    )
    return Embedder(encoder, pooling.vector, tokenizer, max_length), ready


class NoPrompts(PromptBuilder):
    """Tokenizes, but makes no prompt."""

    def __init__(self, name: str, tokenizer: Tokenizer, context_length: int) -> None:
        super().__init__(tokenizer, None, "encoder", context_length)
        self._name = name

    def build(self, request: Generate) -> Prompt:
        """Always raises RequestRefused."""
        raise RequestRefused("unsupported", f"{self._name} does not support generate")


class NoRunner:
    """Runs nothing and holds nothing. Its blocks have a byte each, so that sums divide."""

    block_bytes = 1
    num_bytes = 0

    def execute(self, batch: Batch) -> StepResult:
        """Never comes to this: no prompt is made."""
        raise AssertionError(batch)

    def touched(self, block_ids: Iterable[int]) -> list[int]:
        """None of them is."""
        return []

    def touch(self, block_ids: Iterable[int]) -> None:
        """There is no memory."""

    def release(self, block_ids: Iterable[int]) -> None:
        """There is no memory."""

    def view(self, block_id: int) -> memoryview:
        """There is no memory."""
        return memoryview(b"")

    def write(self, block_id: int, content: memoryview) -> None:
        """There is no memory."""
