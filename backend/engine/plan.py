"""A batch in the making: what one pass of the scheduler has decided so far.

Owner: the Scheduler, for the length of one `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .batch import Batch, Chunk, RowStart
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch whose result is not back, its sequences in the same order, and the life of each."""

    batch: Batch
    members: list[tuple[Sequence, int]]
    began_at: float


@dataclass(slots=True)
class Plan:
    """Chunks and their sequences in the same order, and the tokens that may still be added."""

    budget: int
    num_groups: int = 1  # blocks of a span
    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    has_preempted: bool = False

    def add(self, sequence: Sequence, num_tokens: int, draft_ids: tuple[int, ...] = ()) -> None:
        """The sequence runs its next `num_tokens` tokens; its table covers them and the drafts."""
        samples = num_tokens == sequence.num_left
        self.chunks.append(
            Chunk(
                row=sequence.row,
                start=sequence.num_planned,
                num_tokens=num_tokens,
                draft_ids=draft_ids,
                new_blocks=self._new_blocks(sequence),
                samples=samples,
            )
        )
        sequence.num_sent_spans = len(sequence.block_table)
        sequence.num_planned += num_tokens
        sequence.num_pending += samples
        sequence.num_drafts_in_flight = len(draft_ids)
        self.sequences.append(sequence)
        self.budget -= num_tokens + len(draft_ids)

    def _new_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        """The spans that the runner has not heard of, each filled up to its full length."""
        spans = sequence.block_table[sequence.num_sent_spans :]
        return tuple(
            block_id
            for span in spans
            for block_id in (*span, *(span[:1] or (0,)) * (self.num_groups - len(span)))
        )

    def drop(self, sequence: Sequence) -> None:
        """A sequence that was planned in this pass was preempted after all."""
        for index, planned in enumerate(self.sequences):
            if planned is sequence:
                chunk = self.chunks[index]
                self.budget += chunk.num_tokens + len(chunk.draft_ids)
                del self.sequences[index], self.chunks[index]
                break

    def in_flight(self, step: int, releases: tuple[int, ...], now: float) -> InFlight:
        """The finished value, and who is in it."""
        batch = Batch(
            step=step,
            chunks=tuple(self.chunks),
            starts=tuple(self.starts),
            releases=releases,
            copies=tuple(self.copies),
        )
        members = [(sequence, sequence.num_lives) for sequence in self.sequences]
        return InFlight(batch, members, now)


def row_start(sequence: Sequence) -> RowStart:
    """What the runner must know of a sequence that gets a row."""
    request = sequence.request
    return RowStart(
        row=sequence.row,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        seed=request.seed,
        stop_ids=request.stop_ids,
        adapter=request.adapter,
        grammar=request.grammar,
    )
