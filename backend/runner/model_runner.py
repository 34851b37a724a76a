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
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from ..engine.batch import Batch, BlockGroups, Chunk, Logprobs, RowStart, StepResult
from ..kernels.cpu_attention import Span
from ..layers.linear import prefers_float32
from ..models.adapters import active_adapters
from ..models.build import build_decoder
from ..models.checkpoint import Checkpoint
from ..models.compiled_decoder import CompiledDecoder
from ..models.config import UnsupportedModel
from ..models.decoder import StepInputs
from ..models.state_layers import SequenceState
from ..protocol import Load
from .kv_cache import KVCache
from .kv_layout import layout_of
from .sampler import (
    UnusableLogits,
    draw,
    draw_among,
    draws_from_all,
    is_plain,
    logprobs_of,
    noise_base,
)
from .token_masks import TokenMasks

BLOCK_SIZE = 32  # tokens; larger reads better, smaller shares more of a prefix
DEFAULT_KV_SHARE = 0.25  # of the memory that is free at load; it is taken only as tokens need it
DEFAULT_CONTEXTS = 32  # ... but no more than this many full contexts could use

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class NoMemory(Exception):
    """The model does not fit. The text has both sizes."""


class Row:
    """One sequence between steps."""

    def __init__(self, start: RowStart, num_groups: int) -> None:
        self.token_ids = array("q", start.token_ids)
        self.num_prompt_tokens = start.num_prompt_tokens
        self.sampling = start.sampling
        self.seed = start.seed
        self.adapter = start.adapter
        self.stop_ids = start.stop_ids
        self.num_groups = num_groups
        self.block_ids = array("q")  # span by span, a block for each group
        self.block_tables = torch.empty((num_groups, 0), dtype=torch.int64)  # for the kernels
        self.state = SequenceState()
        self.is_plain = is_plain(start.sampling)
        self.is_greedy = start.sampling.temperature <= 0 or start.sampling.top_k == 1
        self.draws_from_all = draws_from_all(start.sampling)
        self.matcher = None if start.grammar is None else start.grammar.matcher()
        if self.matcher is not None:  # outputs of an earlier life are part of the form
            self.matcher.accept(start.token_ids[start.num_prompt_tokens :])

    def extend_table(self, block_ids: tuple[int, ...]) -> None:
        """By whole spans: one block for each group."""
        self.block_ids.extend(block_ids)
        spans = torch.tensor(self.block_ids, dtype=torch.int64).view(-1, self.num_groups)
        self.block_tables = spans.T.contiguous()

    @property
    def draws_as_is(self) -> bool:
        """The next token is drawn from the logits as they are."""
        if not self.is_plain or self.matcher is not None:
            return False
        num_outputs = len(self.token_ids) - self.num_prompt_tokens
        return num_outputs >= self.sampling.min_tokens or not self.stop_ids

    def append(self, token_id: int) -> None:
        """A token was drawn."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.accept([token_id])


class _Hint(NamedTuple):
    """Of one row of logits."""

    best: int = -1  # the greedy token; -1 if nobody looked, or the logits are unusable
    left: Any = None  # the ids that can win this row's draw, if somebody looked


_NO_HINT = _Hint()


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
        self.weights_vram_bytes = 0
        trained = config.context_length
        self.context_length = min(load.context_length or trained, trained)
        layout = layout_of(config, self.context_length)
        self.groups: BlockGroups = layout.groups
        num_blocks = self._num_blocks(
            load.kv_budget_bytes,
            layout.block_bytes(BLOCK_SIZE, self._dtype),
            layout.span_bytes_per_token(self._dtype),
        )
        self._cache = KVCache(config, self._dtype, num_blocks, BLOCK_SIZE, layout)
        self._masks = TokenMasks(config.vocab_size)
        self._rows: dict[int, Row] = {}
        self._adapters = active_adapters(checkpoint)
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

    def rest(self) -> None:
        """Nothing runs: hold no memory that only a running step needs."""
        if isinstance(self._decoder, CompiledDecoder):
            self._decoder.rest()

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
            self._rows[start.row] = Row(start, self.groups.num_groups)
        inputs = self._inputs(batch)
        self._begin_masks(batch)
        if self._adapters is not None:
            self._adapters.begin(self._rows_by_adapter(batch))
        logits = self._decoder.forward(inputs, self._cache.layers).numpy()
        return self._sample(batch, logits)

    def _inputs(self, batch: Batch) -> StepInputs:
        groups = range(self.groups.num_groups)
        token_ids, positions = array("q"), array("q")
        places = [array("q") for _ in groups]
        spans: list[list[Span]] = [[] for _ in groups]
        logit_rows: list[int] = []
        for chunk in batch.chunks:
            row = self._rows[chunk.row]
            if chunk.new_blocks:
                self._cache.touch(chunk.new_blocks)
                row.extend_table(chunk.new_blocks)
            begin, start = len(token_ids), chunk.start
            known = start + chunk.num_tokens
            end = known + len(chunk.draft_ids)
            token_ids.extend(row.token_ids[start:known])
            token_ids.extend(chunk.draft_ids)
            positions.extend(range(start, end))
            num_held = -(-end // BLOCK_SIZE)
            for group in groups:
                held = row.block_ids[group :: len(groups)]
                places[group].extend(held[spot // BLOCK_SIZE] for spot in range(start, end))
                table = row.block_tables[group, :num_held]
                spans[group].append(Span(begin, end - start, end, table))
            if chunk.samples:
                logit_rows.extend(range(begin + chunk.num_tokens - 1, begin + end - start))
        flat = torch.frombuffer(positions, dtype=torch.int64)
        block_ids = [torch.frombuffer(ids, dtype=torch.int64) for ids in places]
        first, *others = zip(block_ids, spans, strict=True)
        inputs = StepInputs(
            token_ids=torch.frombuffer(token_ids, dtype=torch.int64),
            positions=flat,
            block_ids=first[0],
            offsets=flat % BLOCK_SIZE,
            spans=tuple(first[1]),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            states=tuple(self._rows[chunk.row].state for chunk in batch.chunks),
        )
        if not others:
            return inputs
        views = [replace(inputs, block_ids=ids, spans=tuple(s)) for ids, s in others]
        return replace(inputs, others=tuple(views))

    def _rows_by_adapter(self, batch: Batch) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        begin = 0
        for chunk in batch.chunks:
            end = begin + chunk.num_tokens + len(chunk.draft_ids)
            adapter = self._rows[chunk.row].adapter
            if adapter:
                found.setdefault(adapter, []).extend(range(begin, end))
            begin = end
        return found

    def _begin_masks(self, batch: Batch) -> None:
        sampling = [chunk.row for chunk in batch.chunks if chunk.samples]
        matchers = ((row, self._rows[row].matcher) for row in sampling)
        self._masks.begin((row, matcher) for row, matcher in matchers if matcher is not None)

    def _sample(self, batch: Batch, logits: np.ndarray) -> StepResult:
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[Logprobs, ...]] = []
        errors: dict[int, str] = {}
        at = 0
        hints = self._hints(batch)
        for chunk in batch.chunks:
            if not chunk.samples:
                ids.append(())
                logprobs.append(())
                continue
            count = 1 + len(chunk.draft_ids)
            try:
                drawn, entries = self._draw(chunk, logits[at : at + count], hints[at : at + count])
            except UnusableLogits as error:
                errors[chunk.row] = str(error)
                drawn, entries = (), ()
            ids.append(drawn)
            logprobs.append(entries)
            at += count
        wanted = any(logprobs)
        return StepResult(batch.step, tuple(ids), tuple(logprobs) if wanted else (), errors)

    def _hints(self, batch: Batch) -> list[_Hint]:
        """What the compiled code knows of each row of logits."""
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        num_logits = sum(1 + len(chunk.draft_ids) for chunk in sampling)
        decoder = self._decoder
        if not isinstance(decoder, CompiledDecoder):
            return [_NO_HINT] * num_logits
        hints = [_Hint(best) for best in decoder.best[:num_logits].tolist()]
        requests: list[tuple[int, int, float]] = []
        at = 0
        for chunk in sampling:
            row = self._rows[chunk.row]
            if row.draws_from_all and row.is_plain:
                position, temperature = len(row.token_ids), row.sampling.temperature
                for index in range(1 + len(chunk.draft_ids)):
                    base = noise_base(row.seed, position + index)
                    requests.append((at, base, temperature))
                    at += 1
            else:
                at += 1 + len(chunk.draft_ids)
        if requests:
            for (at, _, _), left in zip(requests, decoder.thin(requests), strict=True):
                hints[at] = _Hint(hints[at].best, left)
        return hints

    def _draw(
        self, chunk: Chunk, logits: np.ndarray, hints: list[_Hint]
    ) -> tuple[tuple[int, ...], tuple[Logprobs, ...]]:
        """One id, and one more for each draft that the draw before it agreed with.

        The noise belongs to the position, not to the step: what is drawn here is what would have
        been drawn without drafts.
        """
        row = self._rows[chunk.row]
        drawn: list[int] = []
        entries: list[Logprobs] = []
        for index, (scores, hint) in enumerate(zip(logits, hints, strict=True)):
            token_id = self._draw_one(chunk.row, row, scores, hint)
            if row.sampling.num_logprobs >= 0:
                entries.append(logprobs_of(scores, token_id, row.sampling.num_logprobs))
            row.append(token_id)
            drawn.append(token_id)
            if index >= len(chunk.draft_ids) or chunk.draft_ids[index] != token_id:
                break
        return tuple(drawn), tuple(entries)

    def _draw_one(self, number: int, row: Row, scores: np.ndarray, hint: _Hint) -> int:
        """The short way where the hint allows it; both ways give the same token."""
        if hint.best >= 0 and row.draws_as_is:
            if row.is_greedy:
                return hint.best
            if hint.left is not None:
                position = len(row.token_ids)
                return draw_among(hint.left, scores, row.sampling, row.seed, position)
        return draw(
            scores,
            row.sampling,
            row.seed,
            row.token_ids,
            row.num_prompt_tokens,
            row.stop_ids,
            self._masks.take(number),
        )

    def _num_blocks(self, budget_bytes: int, block_bytes: int, token_bytes: int) -> int:
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
