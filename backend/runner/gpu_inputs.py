"""One step's inputs as device tensors, and the per-row state that they are gathered from.

A row keeps its block table and its last token on the device from admission to end. A step sends
one buffer of ints: which rows, where their chunks begin, how long they are, and the tokens that the
host knows. Positions, slots, tables and lengths are index arithmetic on the device, without Python
per sequence. A decode step whose sequences cross no block border writes no table at all.

A token that was drawn on the device is fed back there: a step that is planned before the host has
seen it has FEED_BACK in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FEED_BACK = -1  # as a token id: take the row's last drawn token


@dataclass(frozen=True, slots=True)
class StepTensors:
    """T tokens of B sequences; shapes and meanings as in kernels.reference."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [B, max_blocks] int32
    query_start: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    logit_rows: Tensor  # [num_logits] int64
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence runs one token and draws one."""
        return self.max_query_len == 1 and self.logit_rows.shape[0] == self.num_seqs

    def to(self, device: torch.device) -> StepTensors:
        """The same on another device; itself if it is there."""
        if self.token_ids.device == device:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            block_tables=self.block_tables.to(device),
            query_start=self.query_start.to(device),
            seq_lens=self.seq_lens.to(device),
            logit_rows=self.logit_rows.to(device),
        )

    @staticmethod
    def blank(size: int, max_blocks: int, block_size: int, device: torch.device) -> StepTensors:
        """A decode batch of padding, for `size` sequences that may be as long as there is room."""
        return StepTensors(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            logit_rows=torch.arange(size, device=device),
            max_query_len=1,
            max_seq_len=max_blocks * block_size,
        )

    def fill_padded(self, inputs: StepTensors) -> None:
        """Copy a smaller decode batch in; the other rows become padding."""
        count = inputs.num_seqs
        self.token_ids[:count] = inputs.token_ids
        self.positions[:count] = inputs.positions
        self.slot_mapping[:count] = inputs.slot_mapping
        self.slot_mapping[count:] = -1
        self.block_tables[:count, : inputs.block_tables.shape[1]] = inputs.block_tables
        self.seq_lens[:count] = inputs.seq_lens
        self.seq_lens[count:] = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk as the device needs it."""

    row: int
    start: int
    token_ids: Sequence[int]  # drafts included; FEED_BACK for the row's last drawn token
    num_logits: int  # of its last tokens


class RowState:
    """The device's memory of rows. Owner: the runner, on the engine thread.

    Writes are staged during a step and applied by one copy and one scatter.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.device = device
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._num_blocks = [0] * max_rows  # the host's own count of each table's entries
        self._staged: list[int] = []  # (place in _tables, block id), flat

    def start(self, row: int) -> None:
        """The row is another sequence's now; its table is empty."""
        self._num_blocks[row] = 0

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """Append to the row's block table, at the next `gather`."""
        place = row * self._max_blocks + self._num_blocks[row]
        for offset, block_id in enumerate(block_ids):
            self._staged += (place + offset, block_id)
        self._num_blocks[row] += len(block_ids)

    def feed_back(self, rows: Sequence[int], places: Sequence[int], drawn: Tensor) -> None:
        """drawn[places[i]] is the last drawn token of rows[i]; no token leaves the device."""
        sent = self._send([*rows, *places])
        here, there = sent[: len(rows)], sent[len(rows) :]
        self._last_tokens[here] = drawn.to(self.device)[there]

    def gather(self, pieces: Sequence[Piece]) -> StepTensors:
        """The inputs of one step."""
        self._apply_staged()
        lens = [len(piece.token_ids) for piece in pieces]
        num_tokens, num_seqs = sum(lens), len(pieces)
        ends: list[int] = []
        logit_rows: list[int] = []
        end = 0
        for piece, count in zip(pieces, lens, strict=True):
            end += count
            ends.append(end)
            logit_rows += range(end - piece.num_logits, end)
        flat = [piece.row for piece in pieces] + [piece.start for piece in pieces] + lens + ends
        for piece in pieces:
            flat += piece.token_ids
        sent = self._send(flat + logit_rows)
        sizes = [num_seqs, num_seqs, num_seqs, num_seqs, num_tokens, len(logit_rows)]
        rows, starts, counts, stops, token_ids, wanted = torch.split_with_sizes(sent, sizes)

        owner = torch.repeat_interleave(
            torch.arange(num_seqs, device=self.device), counts, output_size=num_tokens
        )
        begins = stops - counts
        positions = torch.arange(num_tokens, device=self.device) - (begins - starts)[owner]
        max_seq_len = max(p.start + n for p, n in zip(pieces, lens, strict=True))
        width = -(-max_seq_len // self._block_size)
        tables = self._tables[rows, :width]
        blocks = tables[owner, positions // self._block_size].long()
        fed_back = self._last_tokens[rows][owner]
        return StepTensors(
            token_ids=torch.where(token_ids == FEED_BACK, fed_back, token_ids),
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            block_tables=tables.contiguous(),
            query_start=torch.nn.functional.pad(stops, (1, 0)).to(torch.int32),
            seq_lens=(starts + counts).to(torch.int32),
            logit_rows=wanted,
            max_query_len=max(lens),
            max_seq_len=max_seq_len,
        )

    def _apply_staged(self) -> None:
        if self._staged:
            places, block_ids = self._send(self._staged).view(-1, 2).unbind(1)
            self._tables.view(-1)[places] = block_ids.to(torch.int32)
            self._staged = []

    def _send(self, numbers: list[int]) -> Tensor:
        """Ints to the device, without waiting for it where it is a GPU."""
        host = torch.tensor(numbers, dtype=torch.int64)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host.to(self.device)
