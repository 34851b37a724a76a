"""The two values that the scheduler and the runner exchange: a Batch, and its StepResult.

The scheduler decides, the runner computes; neither sees the other's state. A sequence that runs has
a *row*, an int in [0, max_num_seqs), which stays the same from its admission to its end or its
preemption. The runner keeps what it needs per row (token ids, block table, sampling), and a Batch
says only what is new: a decode step without a new block is a few ints per sequence.

No phases (Kwon et al. 2023; vLLM's v1 scheduler): a sequence has tokens known and tokens computed.
A prompt chunk, a decode, a resume after preemption and the verification of drafts are all a Chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The blocks of one span of `block_size` tokens: one for each group of layers.

    A model whose layers all see everything has one group, and a span is a block. Layers that see
    only a window hold blocks of their own, which are given back when the window has passed; so that
    one pool serves all, the layers are dealt into groups of equally many. Ids of a span stand
    together in `Chunk.new_blocks`, the groups that see everything first.
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0  # tokens that a windowed layer sees, the own one included
    # False: blocks do not hold all that a sequence is. Other layers remember it in a state of their
    # own, so that no prefix is found again and no block is copied.
    is_shareable: bool = True

    @property
    def num_groups(self) -> int:
        """Blocks of a span."""
        return self.num_full + self.num_windowed


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence gets a row. Whatever the row held before is gone."""

    row: int
    token_ids: tuple[int, ...]  # all that are known: prompt, and outputs of an earlier life
    num_prompt_tokens: int  # where the outputs begin; penalties and logprobs care
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # cannot be drawn before sampling.min_tokens outputs exist
    adapter: str = ""
    grammar: Any = None  # an opaque handle for the runner's token masks; see backend/text/grammar


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one sequence runs in this step: the known tokens [start, start + num_tokens), then the
    drafts. Their keys and values are written; the block table given so far covers them.

    Planned ahead (PipelinedRunner), the one token at `start` is what the step in flight draws."""

    row: int
    start: int  # tokens computed before this step
    num_tokens: int  # >= 1, drafts not included
    draft_ids: tuple[int, ...] = ()
    # Appended to the row's block table before the step: whole spans, see BlockGroups. Where the
    # window has passed, a windowed group's place names some block; nobody reads it.
    new_blocks: tuple[int, ...] = ()
    samples: bool = False  # the chunk reaches the last known token, so a token is drawn


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `copies` happen first, then `starts`, then the chunks."""

    step: int
    chunks: tuple[Chunk, ...]
    starts: tuple[RowStart, ...] = ()
    releases: tuple[int, ...] = ()  # rows given back since the last batch
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block), whole blocks

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(chunk.num_tokens + len(chunk.draft_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-softmax of the unmodified logits at one drawn token."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, in the order of the batch's chunks.

    A chunk that samples gets 1 + (accepted drafts) ids, all others none. `errors` names rows whose
    logits were unusable (NaN, everything masked): that sequence alone fails.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[Logprobs, ...], ...] = ()  # empty if no row asked
    errors: dict[int, str] = field(default_factory=dict)


class Runner(Protocol):
    """What the engine needs of whoever computes. `backend.runner.ModelRunner` is the real one."""

    def execute(self, batch: Batch) -> StepResult:
        """Run one step. Raises only when no sequence of the batch can go on."""
        ...


class Pending(Protocol):
    """A step that was handed over and may still run."""

    def result(self) -> StepResult:
        """Wait for it. Raises what `execute` would have raised. Asked once, in order of the
        steps."""
        ...


@runtime_checkable
class PipelinedRunner(Protocol):
    """A runner that takes the next step while the last one runs: see Chunk.

    At most two steps are in flight. A batch that was planned ahead differs from others in one
    thing: the last known token of a chunk may be one that the step in flight draws. The runner
    takes it from there, so that the host need not know it; `num_tokens` is 1 then, and there are
    no drafts. The scheduler plans ahead for a sequence at most one token, never beyond its last.

    What the step in flight draws may end the sequence (a stop token). The chunk that was planned
    ahead for it then computes for nothing: its result is dropped by whoever finds the sequence
    gone from its row. The same holds for one that was cancelled or preempted. Steps run in order,
    so a block that such a chunk writes to can be given away at once.
    """

    def execute(self, batch: Batch) -> StepResult:
        """As Runner."""
        ...

    def submit(self, batch: Batch) -> Pending:
        """Begin a step and return before it is done. Raises only what is known at once, and then
        the runner has taken nothing of the batch but its releases and starts."""
        ...
