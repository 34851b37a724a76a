"""Batches in, token ids out, over the kernels that `select` chose for the device.

    Batch ──▶ RowState.gather ──▶ StepTensors ──GpuDecoder, or a captured graph of it──▶ logits
                                                              sample, on the device ──▶ StepResult

The host keeps of a row what it must branch on; tables and last tokens stay on the device. Rows with
penalties, biases or typical_p have their logits adjusted on the host, by the CPU sampler's own
functions; the draw itself is one kernel for all, so that a seed means one thing.

Owner: the engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..engine.batch import Batch, Chunk, Logprobs, RowStart, StepResult
from ..kernels import select
from ..models.checkpoint import Checkpoint
from ..models.decoder import kv_bytes_per_token
from ..protocol import DevicePart, SamplingParams
from .gpu_graphs import Capture, StepGraphs
from .gpu_inputs import FEED_BACK, Piece, RowState
from .gpu_layer_map import layer_map
from .gpu_model import Cache, GpuDecoder
from .sampler import UnusableLogits, adjusted, candidates, logprobs_of

BLOCK_SIZE = 16  # tokens


class Row:
    """One sequence between steps, as the host sees it."""

    def __init__(self, start: RowStart) -> None:
        self.token_ids = array("q", start.token_ids)
        self.num_prompt_tokens = start.num_prompt_tokens
        self.num_sent = len(start.token_ids)  # beyond it, the device knows the last token itself
        self.sampling = start.sampling
        self.seed = start.seed
        self.stop_ids = start.stop_ids


class GpuRunner:
    """A loaded model that executes batches on the devices of `parts`.

    `capture` None runs every step eagerly; graphs need one device. Raises UnsupportedModel,
    BadModel, and ValueError for parts that do not fit the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: list[DevicePart],
        *,
        num_blocks: int,
        dtype: torch.dtype = torch.bfloat16,
        max_num_seqs: int = 256,
        context_length: int = 0,
        choice: select.Choice | None = None,
        capture: Capture | None = None,
        progress: Callable[[float, str], None] = lambda share, stage: None,
    ) -> None:
        config = checkpoint.config
        devices = layer_map(parts, config.num_layers)
        choice = choice or select.choose(devices[0])
        self._kernels = select.load(choice)
        self._decoder = GpuDecoder(
            checkpoint,
            dtype,
            devices,
            self._kernels,
            lambda share: progress(share, "reading weights"),
        )
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, dtype)
        self.weights_bytes = self._decoder.weights_bytes
        trained = config.context_length
        self.context_length = min(context_length or trained, trained)
        self.details = {
            "dtype": str(dtype).removeprefix("torch."),
            "kernels": str(choice),
            "layers": [str(device) for device in devices],
        }
        shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self._caches = [
            Cache(
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for device in devices
        ]
        max_blocks = min(-(-self.context_length // BLOCK_SIZE), num_blocks)
        self._last_device = devices[-1]
        self._state = RowState(max_num_seqs, max_blocks, BLOCK_SIZE, devices[0])
        self._rows: dict[int, Row] = {}
        self._graphs: StepGraphs | None = None
        if capture is not None and len(set(devices)) == 1:
            self._graphs = StepGraphs(
                lambda inputs: self._decoder.forward(inputs, self._caches),
                capture,
                max_blocks,
                BLOCK_SIZE,
            )

    def __repr__(self) -> str:
        return f"<GpuRunner {len(self._rows)} rows | {self.details['kernels']}>"

    def execute(self, batch: Batch) -> StepResult:
        """Run one step; see engine.batch."""
        for row in batch.releases:
            self._rows.pop(row, None)
        for source, destination in batch.copies:
            for cache in self._caches:
                cache.keys[destination] = cache.keys[source]
                cache.values[destination] = cache.values[source]
        for start in batch.starts:
            self._rows[start.row] = Row(start)
            self._state.start(start.row)
        for chunk in batch.chunks:
            if chunk.new_blocks:
                self._state.extend(chunk.row, chunk.new_blocks)
        inputs = self._state.gather([self._piece(chunk) for chunk in batch.chunks])
        logits = None
        if self._graphs is not None and inputs.is_decode:
            logits = self._graphs.run(inputs)
        if logits is None:
            logits = self._decoder.forward(inputs, self._caches)
        return self._sample(batch, logits)

    def _piece(self, chunk: Chunk) -> Piece:
        row = self._rows[chunk.row]
        end = chunk.start + chunk.num_tokens
        known: list[int] = list(row.token_ids[chunk.start : end])
        if chunk.num_tokens == 1 and end > row.num_sent:
            known = [FEED_BACK]
        num_logits = 1 + len(chunk.draft_ids) if chunk.samples else 0
        return Piece(chunk.row, chunk.start, [*known, *chunk.draft_ids], num_logits)

    def _sample(self, batch: Batch, logits: Tensor) -> StepResult:
        """Draw every wanted token at once: that of a draft's place as if the draft were accepted,
        which is what counts if it is."""
        wanted = [
            (chunk.row, chunk.draft_ids[:depth])
            for chunk in batch.chunks
            if chunk.samples
            for depth in range(1 + len(chunk.draft_ids))
        ]
        errors: dict[int, str] = {}
        drawn = self._draw(wanted, logits, errors) if wanted else []
        raw: np.ndarray | None = None
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[Logprobs, ...]] = []
        at = 0
        for chunk in batch.chunks:
            accepted: list[int] = []
            entries: list[Logprobs] = []
            count = 1 + len(chunk.draft_ids) if chunk.samples else 0
            row = self._rows[chunk.row]
            for depth in range(count if chunk.row not in errors else 0):
                token_id = drawn[at + depth]
                accepted.append(token_id)
                if row.sampling.num_logprobs >= 0:
                    raw = logits.cpu().numpy() if raw is None else raw
                    entries.append(
                        logprobs_of(raw[at + depth], token_id, row.sampling.num_logprobs)
                    )
                if depth >= len(chunk.draft_ids) or chunk.draft_ids[depth] != token_id:
                    break
            row.token_ids.extend(accepted)
            ids.append(tuple(accepted))
            logprobs.append(tuple(entries))
            at += count
        self._feed_back(batch, ids)
        return StepResult(batch.step, tuple(ids), tuple(logprobs) if any(logprobs) else (), errors)

    def _draw(
        self, wanted: list[tuple[int, tuple[int, ...]]], logits: Tensor, errors: dict[int, str]
    ) -> list[int]:
        rows = [self._rows[row] for row, _ in wanted]
        adjusted = logits
        for index, (row_id, drafts) in enumerate(wanted):
            if _needs_host(self._rows[row_id]):
                if adjusted is logits:
                    adjusted = logits.clone()
                try:
                    adjusted[index] = self._on_host(self._rows[row_id], drafts, logits[index])
                except UnusableLogits as error:
                    errors[row_id] = str(error)
        device = logits.device
        settings = [row.sampling for row in rows]
        floats = torch.tensor(
            [[s.temperature, 1.0 if _is_cut(s) else s.top_p, s.min_p] for s in settings],
            dtype=torch.float32,
        ).to(device)
        top_k = torch.tensor([s.top_k for s in settings], dtype=torch.int32).to(device)
        seeds = [_signed(row.seed) for row in rows]
        positions = [
            len(row.token_ids) + len(drafts) for row, (_, drafts) in zip(rows, wanted, strict=True)
        ]
        drawn = self._kernels.sample(
            adjusted,
            floats[:, 0].contiguous(),
            top_k,
            floats[:, 1].contiguous(),
            floats[:, 2].contiguous(),
            torch.tensor(seeds).to(device),
            torch.tensor(positions).to(device),
            has_filters=any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in settings),
        )
        peaks = adjusted.amax(dim=-1)  # NaN wherever there is one
        usable = torch.isfinite(peaks)
        both = torch.stack([drawn, usable.to(torch.int64)]).cpu()  # one copy, one wait
        for (row_id, _), is_usable in zip(wanted, both[1].tolist(), strict=True):
            if not is_usable:
                errors.setdefault(row_id, "the model's logits are not finite for this sequence")
        result: list[int] = both[0].tolist()
        return result

    def _on_host(self, row: Row, drafts: tuple[int, ...], logits: Tensor) -> Tensor:
        """The logits with penalties, biases and, with typical_p, all filters applied."""
        known = array("q", [*row.token_ids, *drafts])
        scores = adjusted(
            logits.cpu().numpy(), row.sampling, known, row.num_prompt_tokens, row.stop_ids, None
        )
        if _is_cut(row.sampling):
            kept = candidates(scores, row.sampling)
            cut = np.full_like(scores, -np.inf)
            cut[kept] = scores[kept]
            scores = cut
        return torch.from_numpy(scores).to(logits.device)

    def _feed_back(self, batch: Batch, ids: list[tuple[int, ...]]) -> None:
        rows = [chunk.row for chunk, drawn in zip(batch.chunks, ids, strict=True) if drawn]
        if rows:
            last = [drawn[-1] for drawn in ids if drawn]
            device = self._state.device
            self._state.feed_back(torch.tensor(rows).to(device), torch.tensor(last).to(device))


def _needs_host(row: Row) -> bool:
    s = row.sampling
    has_penalties = s.repeat_last_n != 0 and (
        s.repeat_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    )
    is_young = len(row.token_ids) - row.num_prompt_tokens < s.min_tokens
    return has_penalties or bool(s.logit_bias) or is_young or _is_cut(s)


def _is_cut(sampling: SamplingParams) -> bool:
    """The filters run on the host, typical_p among them."""
    return sampling.typical_p < 1 and sampling.temperature > 0


def _signed(seed: int) -> int:
    """The seed's low 64 bits as torch holds them."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - 2**64 if low >= 2**63 else low
