"""Batches in, token ids out: the tensors of one model on the CPU.

A row of the runner holds what a sequence needs between steps: its token ids, its block table, how
to draw. A Batch says only what is new.

    Batch ──▶ rows ──▶ StepInputs ──Decoder──▶ logits ──sampler──▶ StepResult

Owner: the engine thread. A row whose logits are unusable fails alone; everything else that goes
wrong is raised and ends the step.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

import numpy as np
import psutil
import torch

from ..engine.batch import Batch, Chunk, Logprobs, RowStart, StepResult
from ..kernels.cpu_attention import Span
from ..layers.linear import prefers_float32
from ..models.build import build_decoder
from ..models.checkpoint import Checkpoint
from ..models.config import UnsupportedModel
from ..models.decoder import StepInputs, kv_bytes_per_token
from ..protocol import Load
from .kv_cache import KVCache
from .sampler import UnusableLogits, draw, logprobs_of
from .token_masks import TokenMasks

BLOCK_SIZE = 32  # tokens; larger reads better, smaller shares more of a prefix
DEFAULT_KV_SHARE = 0.25  # of the memory that is free at load; it is taken only as tokens need it
DEFAULT_CONTEXTS = 32  # ... but no more than this many full contexts could use

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class NoMemory(Exception):
    """The model does not fit. The text has both sizes."""


class Row:
    """One sequence between steps."""

    def __init__(self, start: RowStart) -> None:
        self.token_ids = array("q", start.token_ids)
        self.num_prompt_tokens = start.num_prompt_tokens
        self.sampling = start.sampling
        self.seed = start.seed
        self.stop_ids = start.stop_ids
        self.block_table = torch.empty(0, dtype=torch.int64)
        self.matcher = None if start.grammar is None else start.grammar.matcher()
        if self.matcher is not None:  # outputs of an earlier life are part of the form
            self.matcher.accept(start.token_ids[start.num_prompt_tokens :])

    def extend_table(self, block_ids: tuple[int, ...]) -> None:
        new = torch.tensor(block_ids, dtype=torch.int64)
        self.block_table = torch.cat((self.block_table, new))

    def append(self, token_id: int) -> None:
        """A token was drawn."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.accept([token_id])


class ModelRunner:
    """A loaded model that executes batches.

    `progress(share, stage)` is told how far loading is. Raises UnsupportedModel, BadModel and
    NoMemory.
    """

    def __init__(
        self, checkpoint: Checkpoint, load: Load, progress: Callable[[float, str], None]
    ) -> None:
        num_threads = load.num_threads or usable_cores()
        torch.set_num_threads(num_threads)
        config = checkpoint.config
        dtype = choose_dtype(load.dtype)
        self._decoder, kernels = build_decoder(
            checkpoint, None if load.dtype == "auto" else dtype, num_threads, progress, dtype
        )
        self._dtype = self._decoder.dtype
        self.weights_bytes = self._decoder.weights_bytes
        trained = config.context_length
        self.context_length = min(load.context_length or trained, trained)
        num_blocks = self._num_blocks(load.kv_budget_bytes, kv_bytes_per_token(config, self._dtype))
        self._cache = KVCache(config, self._dtype, num_blocks, BLOCK_SIZE)
        self._masks = TokenMasks(config.vocab_size)
        self._rows: dict[int, Row] = {}
        self.details = {
            "dtype": str(self._dtype).removeprefix("torch."),
            "format": checkpoint.format,
            "quantization": checkpoint.quantization,
            "linear_layout": self._decoder.linear_layout,
            "threads": torch.get_num_threads(),
            "kernels": kernels,
        }

    def __repr__(self) -> str:
        return f"<ModelRunner {len(self._rows)} rows | {self._cache!r}>"

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    @property
    def kv_bytes(self) -> int:
        """Physical memory of the KV cache now."""
        return self._cache.num_bytes

    @property
    def pages(self) -> KVCache:
        """The cache, for whoever saves its blocks and gives their memory back."""
        return self._cache

    def execute(self, batch: Batch) -> StepResult:
        """Run one step; see engine.batch."""
        for row in batch.releases:
            self._rows.pop(row, None)
        for source, destination in batch.copies:
            self._cache.copy(source, destination)
        for start in batch.starts:
            self._rows[start.row] = Row(start)
        inputs = self._inputs(batch)
        self._begin_masks(batch)
        logits = self._decoder.forward(inputs, self._cache.layers).numpy()
        return self._sample(batch, logits)

    def _inputs(self, batch: Batch) -> StepInputs:
        token_ids = array("q")
        positions: list[np.ndarray] = []
        blocks: list[torch.Tensor] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        for chunk in batch.chunks:
            row = self._rows[chunk.row]
            if chunk.new_blocks:
                self._cache.touch(chunk.new_blocks)
                row.extend_table(chunk.new_blocks)
            begin = len(token_ids)
            end = chunk.start + chunk.num_tokens
            token_ids.extend(row.token_ids[chunk.start : end])
            token_ids.extend(array("q", chunk.draft_ids))
            count = chunk.num_tokens + len(chunk.draft_ids)
            spots = np.arange(chunk.start, chunk.start + count)
            positions.append(spots)
            blocks.append(row.block_table[torch.from_numpy(spots // BLOCK_SIZE)])
            num_held = -(-(chunk.start + count) // BLOCK_SIZE)
            held = row.block_table[:num_held]
            spans.append(Span(begin, count, chunk.start + count, held))
            if chunk.samples:
                logit_rows.extend(range(begin + chunk.num_tokens - 1, begin + count))
        flat = torch.from_numpy(np.concatenate(positions))
        return StepInputs(
            token_ids=torch.frombuffer(token_ids, dtype=torch.int64),
            positions=flat,
            block_ids=torch.cat(blocks),
            offsets=flat % BLOCK_SIZE,
            spans=tuple(spans),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )

    def _begin_masks(self, batch: Batch) -> None:
        sampling = [chunk.row for chunk in batch.chunks if chunk.samples]
        matchers = ((row, self._rows[row].matcher) for row in sampling)
        self._masks.begin((row, matcher) for row, matcher in matchers if matcher is not None)

    def _sample(self, batch: Batch, logits: np.ndarray) -> StepResult:
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[Logprobs, ...]] = []
        errors: dict[int, str] = {}
        at = 0
        for chunk in batch.chunks:
            if not chunk.samples:
                ids.append(())
                logprobs.append(())
                continue
            count = 1 + len(chunk.draft_ids)
            try:
                drawn, entries = self._draw(chunk, logits[at : at + count])
            except UnusableLogits as error:
                errors[chunk.row] = str(error)
                drawn, entries = (), ()
            ids.append(drawn)
            logprobs.append(entries)
            at += count
        wanted = any(logprobs)
        return StepResult(batch.step, tuple(ids), tuple(logprobs) if wanted else (), errors)

    def _draw(
        self, chunk: Chunk, logits: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[Logprobs, ...]]:
        """One id, and one more for each draft that the draw before it agreed with.

        The noise belongs to the position, not to the step: what is drawn here is what would have
        been drawn without drafts.
        """
        row = self._rows[chunk.row]
        drawn: list[int] = []
        entries: list[Logprobs] = []
        for index, scores in enumerate(logits):
            token_id = draw(
                scores,
                row.sampling,
                row.seed,
                row.token_ids,
                row.num_prompt_tokens,
                row.stop_ids,
                self._masks.take(chunk.row),
            )
            if row.sampling.num_logprobs >= 0:
                entries.append(logprobs_of(scores, token_id, row.sampling.num_logprobs))
            row.append(token_id)
            drawn.append(token_id)
            if index >= len(chunk.draft_ids) or chunk.draft_ids[index] != token_id:
                break
        return tuple(drawn), tuple(entries)

    def _num_blocks(self, budget_bytes: int, token_bytes: int) -> int:
        block_bytes = BLOCK_SIZE * token_bytes
        if not budget_bytes:
            available = int(psutil.virtual_memory().available * DEFAULT_KV_SHARE)
            full = DEFAULT_CONTEXTS * self.context_length * token_bytes
            budget_bytes = min(available, full)
        num_blocks = budget_bytes // block_bytes
        if num_blocks < 2:
            raise NoMemory(
                f"the KV cache needs at least {2 * block_bytes} bytes and may have {budget_bytes}; "
                "close other programs or raise the memory limit"
            )
        return num_blocks


def choose_dtype(name: str) -> torch.dtype:
    """ "auto" is bfloat16 where this CPU has fast arithmetic for it, else float32."""
    if name == "auto":
        return torch.float32 if prefers_float32() else torch.bfloat16
    if name not in _DTYPES:
        raise UnsupportedModel(
            f"dtype {name} is not supported on the CPU; auto, {', '.join(_DTYPES)} are"
        )
    return _DTYPES[name]


def usable_cores() -> int:
    """Physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or allowed or 1))
