"""Batches in, token ids out, over the kernels that `select` chose for the devices.

    Batch ──▶ RowState.gather ──▶ StepTensors ──GpuDecoder, or a captured graph of it──▶ logits
                                                   gpu_draw, on the device ──▶ PendingStep

The host keeps of a row what it must branch on; tables and last tokens stay on the device. `submit`
returns before the device is done, and takes the next step meanwhile: the token that the step in
flight draws is fed back on the device. A row whose draw depends on its whole text (penalties, a
grammar) has the host wait for the step before, after the forward pass has been handed over.

Owner: the engine thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.batch import Batch, BlockGroups, Chunk, StepResult
from .gpu_cache import GpuCache
from .gpu_draw import Draw, PendingStep, Row, draw
from .gpu_graphs import Capture, StepGraphs
from .gpu_inputs import FEED_BACK, Piece, RowState
from .gpu_model import GpuDecoder, current


class GpuRunner:
    """A loaded model that executes batches on the devices of its layers.

    `capture` None runs every step eagerly; graphs need one device.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        cache: GpuCache,
        *,
        max_num_seqs: int = 256,
        context_length: int = 0,
        capture: Capture | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self.weights_bytes = decoder.weights_bytes
        self.weights_vram_bytes = decoder.weights_vram_bytes
        trained = decoder.config.context_length
        self.context_length = min(context_length or trained, trained)
        self.groups = BlockGroups()
        self.details: dict[str, Any] = {
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "kernels": decoder.choices,
            "layers": [str(device) for device in decoder.devices],
        }
        max_blocks = min(-(-self.context_length // cache.block_size), cache.num_blocks)
        self._state = RowState(max_num_seqs, max_blocks, cache.block_size, decoder.devices[0])
        self._rows: dict[int, Row] = {}
        self._in_flight: PendingStep | None = None
        self._graphs: StepGraphs | None = None
        if capture is not None and len(set(decoder.devices)) == 1:
            self._graphs = StepGraphs(
                lambda inputs: decoder.forward(inputs, cache.layers),
                capture,
                max_blocks,
                cache.block_size,
            )

    def __repr__(self) -> str:
        return f"<GpuRunner {len(self._rows)} rows | {self._cache!r} | {self._graphs!r}>"

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
    def pages(self) -> GpuCache:
        """The memory of the blocks, for what saves them and gives them back."""
        return self._cache

    def prepare(self) -> None:
        """Capture the graphs that a first request is likely to need."""
        if self._graphs is not None:
            self._graphs.prepare(self._decoder.devices[0])

    def execute(self, batch: Batch) -> StepResult:
        """Run one step; see engine.batch."""
        return self.submit(batch).result()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingStep:
        """Begin one step; see engine.batch."""
        self._take_in(batch)
        if not batch.chunks:
            return PendingStep(batch, [], None, None, {}, {})
        rows = [self._rows[chunk.row] for chunk in batch.chunks]
        inputs = self._state.gather([self._piece(chunk) for chunk in batch.chunks])
        logits = None
        if self._graphs is not None and inputs.is_decode:
            logits = self._graphs.run(inputs)
        if logits is None:
            logits = self._decoder.forward(inputs, self._cache.layers)
        self._in_flight = self._drawn(batch, rows, logits)
        return self._in_flight

    def _take_in(self, batch: Batch) -> None:
        for row in batch.releases:
            self._rows.pop(row, None)
        for start in batch.starts:
            self._rows[start.row] = Row(start)
            self._state.start(start.row)
        for source, destination in batch.copies:
            self._cache.copy(source, destination)
        for chunk in batch.chunks:
            if chunk.new_blocks:
                self._cache.touch(chunk.new_blocks)
                self._state.extend(chunk.row, chunk.new_blocks)

    def _piece(self, chunk: Chunk) -> Piece:
        row = self._rows[chunk.row]
        end = chunk.start + chunk.num_tokens
        known = list(row.token_ids[chunk.start : end])
        if end > len(row.token_ids):  # planned ahead: the step in flight draws it
            assert chunk.num_tokens == 1 and not chunk.draft_ids, "one token ahead, no drafts"
            known = [FEED_BACK]
        num_logits = 1 + len(chunk.draft_ids) if chunk.samples else 0
        return Piece(chunk.row, chunk.start, [*known, *chunk.draft_ids], num_logits)

    def _drawn(self, batch: Batch, rows: list[Row], logits: Tensor) -> PendingStep:
        """Draw every wanted token at once: that of a draft's place as if the draft were accepted,
        which is what counts if it is."""
        draws = [
            Draw(row, chunk.draft_ids[:depth], chunk.start + chunk.num_tokens + depth)
            for chunk, row in zip(batch.chunks, rows, strict=True)
            if chunk.samples
            for depth in range(1 + len(chunk.draft_ids))
        ]
        if not draws:
            return PendingStep(batch, rows, None, None, {}, {})
        if self._in_flight is not None and any(wanted.waits for wanted in draws):
            self._in_flight.result()
        errors: dict[int, str] = {}
        with current(logits.device):
            drawn = draw(self._decoder.last_kernels, logits, draws, errors)
        self._feed_back(batch, drawn[0])
        asked = [i for i, wanted in enumerate(draws) if wanted.row.sampling.num_logprobs >= 0]
        raw = logits[torch.tensor(asked).to(logits.device)] if asked else None
        places = {index: place for place, index in enumerate(asked)}
        return PendingStep(batch, rows, drawn, raw, places, errors)

    def _feed_back(self, batch: Batch, drawn: Tensor) -> None:
        """Remember on the device what the next step may begin with. After drafts the host knows
        better: how many were right."""
        rows: list[int] = []
        places: list[int] = []
        at = 0
        for chunk in batch.chunks:
            if chunk.samples and not chunk.draft_ids:
                rows.append(chunk.row)
                places.append(at)
            at += 1 + len(chunk.draft_ids) if chunk.samples else 0
        if rows:
            self._state.feed_back(rows, places, drawn)
