"""One sequence: its tokens, how many of them are computed, and the blocks that hold them.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
       ▲                  │
       └─────preempt──────┘   all blocks are given back; the tokens stay

Owner: the Scheduler, also when a token is appended. Everyone else reads.

Two counts follow its progress. `num_computed` is what steps have come back for; `num_planned` also
counts what the steps in flight compute, and `num_pending` the tokens that they draw, which nobody
knows yet. With no step in flight the two are equal and nothing is pending.

Invariants: 0 <= num_computed <= num_planned <= num_tokens + num_pending; a RUNNING sequence has a
row and blocks for what is planned; a WAITING one has neither. `block_keys` names the full spans of
`token_ids`, in order.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

from ..protocol import SamplingParams
from .block_pool import block_key
from .drafts import Drafter

Span = tuple[int, ...]  # the blocks of `block_size` tokens; see batch.BlockGroups

MAX_PREEMPTIONS = 3  # of one sequence, before it is protected


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine is asked to continue.

    `token_ids` are the prompt and, for a sequence that an earlier worker began, its outputs so far;
    `num_prompt_tokens` tells the border. `max_tokens` counts all outputs, the earlier ones too.
    """

    id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs first
    client: str = ""  # waiting sequences of one client take turns with those of others
    cache_salt: str = ""
    adapter: str = ""
    grammar: Any = None


class Sequence:
    """A request on its way through the engine."""

    def __init__(
        self, request: EngineRequest, arrived_at: float, block_size: int, root: bytes
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self._block_size = block_size
        self._root = root

        # The mutable state; see the invariants above.
        self.token_ids = array("I", request.token_ids)
        self.block_keys: list[bytes] = []
        self.block_table: list[Span] = []
        self.num_behind = 0  # spans of the table whose windowed blocks have been given back
        self.num_computed = 0
        self.num_planned = 0
        self.num_pending = 0
        self.num_drafts_in_flight = 0  # how many are right decides where the next step starts
        self.num_lives = 0  # admissions; the result of an earlier life's step is of no use
        self.num_published = 0  # spans of the table that are in the prefix index, or tried to be
        self.status = Status.WAITING
        self.row = -1
        self.num_sent_spans = 0  # of the table, already told to the runner
        self.drafter: Drafter | None = None

        # What is reported at the end.
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_at: float | None = None
        self.decode_began_at: float | None = None
        self.last_token_at: float | None = None
        self._extend_keys()

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id} {self.status.value} "
            f"{self.num_computed}/{len(self.token_ids)} tokens, {len(self.block_ids)} blocks>"
        )

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def block_ids(self) -> list[int]:
        """All blocks of the table, in its order."""
        return [block_id for span in self.block_table for block_id in span]

    @property
    def num_left(self) -> int:
        """Tokens known, or drawn by a step in flight, that no step computes yet."""
        return len(self.token_ids) + self.num_pending - self.num_planned

    @property
    def num_uncomputed(self) -> int:
        """Tokens known and not yet computed; at least 1 while the sequence is alive."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_protected(self) -> bool:
        """It was preempted often enough, and is not again."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    def parent_key(self, num_blocks: int) -> bytes:
        """Names the first `num_blocks` full blocks, and whose cache they belong to."""
        return self.block_keys[num_blocks - 1] if num_blocks else self._root

    def set_progress(self, num_computed: int) -> None:
        """So many tokens are computed, and nothing is in flight."""
        self.num_computed = self.num_planned = num_computed
        self.num_pending = self.num_drafts_in_flight = 0

    def append(self, token_id: int) -> None:
        """A token was generated. Names the block that it fills."""
        self.token_ids.append(token_id)
        self._extend_keys()

    def _extend_keys(self) -> None:
        size = self._block_size
        while (len(self.block_keys) + 1) * size <= len(self.token_ids):
            start = len(self.block_keys) * size
            parent = self.block_keys[-1] if self.block_keys else self._root
            self.block_keys.append(block_key(parent, self.token_ids[start : start + size]))
