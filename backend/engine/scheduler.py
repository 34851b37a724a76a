"""Who runs in the next step, and with how many tokens.

There is no prefill or decode phase. Every sequence has tokens known and tokens computed, and a step
closes the gap within a token budget: running sequences first, in the order of their admission, then
waiting ones. A prompt chunk, a decode, a resume after preemption, a prefix hit and drafts to verify
are the same case with other numbers (vLLM's v1 scheduler; Agrawal et al., "Taming Throughput-
Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, for the chunks).

    schedule() ──▶ Batch ──runner──▶ StepResult ──▶ update()      in the order of the batches
                                     or an error ──▶ fail()

A batch may be planned while the one before it runs (`MAX_IN_FLIGHT`): a sequence whose next token
is being drawn then computes it unseen, one token ahead at most. Should that token end the sequence,
or should it be cancelled or preempted, the result is dropped. Ahead of a result nobody is preempted
and nothing is drafted: where that is called for, `schedule` says None until the result is in.

Out of blocks: the sequence whose recomputation costs least gives back all its blocks and waits;
what it computed stays in the prefix cache as long as nobody needs the room. A sequence that was
preempted MAX_PREEMPTIONS times is *protected*: it comes back only when the pool can hold it to its
last token, and that room is kept for it. So it cannot be preempted again, and every sequence ends.

Full blocks are published when their step has succeeded, not before: a failed step leaves no key of
a block that was never filled. A waiting sequence whose next block is being computed by a running
one waits a step and then shares it, instead of computing it a second time. The last block of two
equal prompts is not full and cannot be shared: the second gets a copy as it starts, because it will
write there at once (copy-on-write; Kwon et al., section 4.4). So `n` samples read a prompt once.
Where a prompt leaves the known text within a block, it begins with a copy of that block too
(partial_blocks).

While others decode, a prompt's chunk is as long as the time they can bear (step_time); decoding
sequences may try drafts (drafts) while the batch is small enough for extra rows to cost little.
The prompt of a client who has next to nothing in hand is read in steps of its own, every second
step at most, while another client's crowd decodes: who asks once does not wait for two hundred.
Of a crowd as many run at once as pay (step_time.is_full).

Owner: the Engine, on the engine thread. Time comes in as `now`, in seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import invariants
from .batch import Batch, BlockGroups, Chunk, Logprobs, StepResult
from .block_pool import BlockPool, root_key
from .drafts import Drafter
from .plan import InFlight, Plan, row_start
from .sequence import EngineRequest, Sequence, Span, Status
from .step_time import StepTime
from .tables import BlockTables

MAX_IN_FLIGHT = 2  # batches: one runs, one is planned ahead
HEADROOM_STEPS = 64  # admission leaves room for the growth of what runs, this many steps ahead
HEADROOM_SHARE = 0.1  # ... but at most this share of the pool
TURN_STEPS = 2  # of the crowd's: as long may a turn be of who has next to nothing in hand
CROWD = 8  # times what a client has in hand, in another's: then its prompt has turns of its own


class Unservable(Exception):
    """No pool state could ever serve this sequence. The scheduler is unchanged.

    Shorten the prompt, or give the KV cache more memory.
    """

    def __init__(self, needed_tokens: int, available_tokens: int) -> None:
        super().__init__(
            f"the prompt and one answer token need room for {needed_tokens} tokens, and the KV "
            f"cache holds {available_tokens}; shorten the prompt or raise the memory limit"
        )
        self.needed_tokens = needed_tokens
        self.available_tokens = available_tokens


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one engine."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048  # of one step
    prefill_chunk: int = 0  # of one sequence in one step; 0 is off
    cache_seed: bytes = b""  # model digest and dtype: caches of others never match
    max_gap_ratio: float = 2.0  # of a step with a prompt to one without; 0 is off. See step_time
    max_drafts: int = 0  # of one sequence in one step; 0 is off. See drafts
    max_draft_rows: int = 16  # rows of a step with drafts; more rows are no longer nearly free
    groups: BlockGroups = field(default_factory=BlockGroups)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did to one sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str = ""


class Scheduler:
    """Continuous batching over a BlockPool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        max_chunk = min(config.prefill_chunk or config.max_batch_tokens, config.max_batch_tokens)
        self.tables = BlockTables(self.pool, config.block_size, config.groups, max_chunk)

        # A live sequence is in exactly one of `_waiting` and `_running`, and in `_sequences`.
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._released_rows: list[int] = []
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._updated_at = float("-inf")  # when the last result came
        self._step = 0
        self._step_time = StepTime()
        self._had_turn = False  # the last step was one client's alone

        # Totals since the start; they only grow.
        self.num_prompt_tokens = 0  # computed, drafts and outputs not included
        self.num_cached_tokens = 0  # found instead of computed, at first admission
        self.num_preemptions = 0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting | "
            f"{self.pool!r}>"
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unused_slots(self) -> int:
        """Token slots of the blocks in use that hold no token yet: each table's end."""
        size = self.config.block_size
        return sum(len(seq.block_table) * size - seq.num_planned for seq in self._running)

    @property
    def has_work(self) -> bool:
        """A sequence is running or waiting."""
        return bool(self._sequences)

    @property
    def max_sequence_tokens(self) -> int:
        """What one sequence alone could hold."""
        return self.tables.max_sequence_tokens

    # ------------------------------------------------------------- come and go

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a sequence. Raises Unservable, and ValueError for one that makes no sense."""
        if request.id in self._sequences:
            raise ValueError(f"sequence {request.id} exists")
        if not request.token_ids:
            raise ValueError(f"sequence {request.id} has no tokens to go on from")
        if len(request.token_ids) - request.num_prompt_tokens >= request.max_tokens:
            raise ValueError(f"sequence {request.id} has all its {request.max_tokens} tokens")
        needed = len(request.token_ids) + 1
        if needed > self.max_sequence_tokens:
            raise Unservable(needed, self.max_sequence_tokens)
        root = root_key(self.config.cache_seed, adapter=request.adapter, salt=request.cache_salt)
        sequence = Sequence(request, now, self.config.block_size, root)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, id: str) -> Sequence | None:
        """End a sequence now, whatever its state. None if there is no such sequence.

        Safe while its step runs: the result is then ignored, and its blocks are free for the
        *next* batch, which the runner executes after this one.
        """
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._finish(sequence)
        return sequence

    def preempt(self, id: str) -> bool:
        """Make a running sequence give back its blocks and wait. For tests of that path.

        False, and nothing changed, if it does not run or is protected.
        """
        sequence = self._sequences.get(id)
        if sequence is None or sequence.status is not Status.RUNNING or sequence.is_protected:
            return False
        self._preempt(sequence)
        return True

    def set_num_blocks(self, num_blocks: int) -> None:
        """The KV memory grew or shrank. Running sequences keep what they hold."""
        self.pool.set_num_blocks(num_blocks)

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if nothing can run now. Every batch wants one update or fail."""
        assert len(self._in_flight) < MAX_IN_FLIGHT, "too many batches have no result yet"
        running = [sequence for sequence in self._running if self._can_go_on(sequence)]
        running.sort(key=lambda seq: seq.num_left > 1)  # decodes first; stable
        if self._in_flight and not self._can_plan_ahead(running):
            return None
        plan = Plan(self.config.max_batch_tokens, self.config.groups.num_groups)
        num_decodes = sum(sequence.num_left == 1 for sequence in running)
        self._had_turn = not self._had_turn and self._plan_turn(running, plan)
        if not self._had_turn:
            self._plan_all(running, num_decodes, plan)
        if not plan.chunks:
            return None
        for sequence in plan.sequences:
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
        self._step += 1
        self._in_flight.append(plan.in_flight(self._step, tuple(self._released_rows), now))
        self._released_rows = []
        return self._in_flight[-1].batch

    def _plan_all(self, running: list[Sequence], num_decodes: int, plan: Plan) -> None:
        max_drafts = self._max_drafts(num_decodes, len(running))
        for sequence in running[:num_decodes]:
            if sequence.status is Status.RUNNING and plan.budget > 0:
                self._plan_running(sequence, plan, max_drafts)
        self._limit_prompts(plan)
        for sequence in running[num_decodes:]:
            if sequence.status is Status.RUNNING and plan.budget > 0:
                self._plan_running(sequence, plan, 0)
        if self._waiting and not plan.has_preempted:
            self._admit_waiting(plan)

    def _plan_turn(self, running: list[Sequence], plan: Plan) -> bool:
        """A step for the prompt of a client who has next to nothing in hand, as long as some of the
        crowd's. False, and the plan as it was, if there is no such client or its prompt must wait.
        """
        ratio = self.config.max_gap_ratio
        guest = self._guest(running) if ratio > 1 else None
        if guest is None:
            return False
        usual = plan.budget
        num_decodes = sum(sequence.num_left == 1 for sequence in running)
        limit = self._step_time.max_prompt_tokens(num_decodes, ratio)
        if limit is not None:
            plan.budget = min(plan.budget, int(TURN_STEPS * limit * ratio / (ratio - 1)))
        if guest.status is Status.RUNNING:
            self._plan_running(guest, plan, 0)
        else:
            self._admit_waiting(plan, guest.request.client)
        if not plan.chunks:
            plan.budget = usual
        return bool(plan.chunks)

    def _guest(self, running: list[Sequence]) -> Sequence | None:
        """Whose prompt is next among clients with so little in hand, and no lesser priority."""
        held = Counter(sequence.request.client for sequence in self._running)
        crowd = max(held.values(), default=0)
        if crowd < CROWD:
            return None
        lowest = min(sequence.request.priority for sequence in self._running)
        reading = (sequence for sequence in running if sequence.num_left > 1)
        guests = [
            sequence
            for sequence in (*reading, *self._waiting)
            if held[sequence.request.client] * CROWD <= crowd
            and sequence.request.priority <= lowest
        ]
        return min(guests, key=lambda seq: _turn(seq, held), default=None)

    def _can_go_on(self, sequence: Sequence) -> bool:
        """It is known where its next step starts, and that there is one unless it stops early."""
        if sequence.num_drafts_in_flight:
            return False
        if not sequence.num_pending:
            return True
        num_tokens = sequence.num_tokens + sequence.num_pending
        return num_tokens < self._final_tokens(sequence)

    def _can_plan_ahead(self, running: list[Sequence]) -> bool:
        """Nobody must be preempted for it, and no draft is missed."""
        num_decodes = sum(sequence.num_left == 1 for sequence in running)
        if self._max_drafts(num_decodes, len(running)) and any(
            sequence.drafter is None or not sequence.drafter.is_pausing(sequence.num_tokens + 1)
            for sequence in running
            if sequence.num_left == 1 and sequence.request.grammar is None
        ):
            return False
        budget = self.config.max_batch_tokens
        wanted = sum(
            self.tables.wanted(sequence, self._chunk_size(sequence, budget)) for sequence in running
        )
        num_blocks = wanted * self.config.groups.num_groups
        return num_blocks <= self.pool.num_free - self._num_reserved()

    def _limit_prompts(self, plan: Plan) -> None:
        """Leave as many tokens for prompts as those who decode can bear."""
        ratio = self.config.max_gap_ratio
        if ratio and plan.chunks:
            num_prompts = self._num_prompts_of(plan.sequences)
            limit = self._step_time.max_prompt_tokens(len(plan.chunks), ratio, num_prompts)
            if limit is not None:
                plan.budget = min(plan.budget, limit)

    def _num_prompts_of(self, decoding: Iterable[Sequence]) -> int:
        """Prompts that may count as much as these streams: all that wait, if the streams are of
        clients who wait themselves. What one client asks for does not slow down another's stream
        more than one prompt does."""
        reading = [sequence for sequence in self._running if sequence.num_left > 1]
        waiting = {sequence.request.client for sequence in (*reading, *self._waiting)}
        if any(sequence.request.client not in waiting for sequence in decoding):
            return 1
        return len(reading) + len(self._waiting)

    def _plan_running(self, sequence: Sequence, plan: Plan, max_drafts: int) -> None:
        num_tokens = self._chunk_size(sequence, plan.budget)
        wanted = self.tables.wanted(sequence, num_tokens)
        num_blocks = wanted * self.config.groups.num_groups
        while wanted and num_blocks > self._num_available(sequence):
            victim = self._victim()
            if victim is None:
                return  # only protected sequences hold blocks, and they will end
            self._preempt(victim)
            plan.drop(victim)
            plan.has_preempted = True
            if victim is sequence:
                return
        if wanted:
            self.tables.extend(sequence, wanted)
        drafts = self._drafts(sequence, max_drafts) if max_drafts else ()
        plan.add(sequence, num_tokens, drafts)

    def _max_drafts(self, num_decodes: int, num_running: int) -> int:
        """Drafts that each decoding sequence may add to this step: none beside a prompt, whose
        chunk has the time that there is, nor where a layer's state could not be turned back."""
        is_wanted = self.config.max_drafts > 0 and self.config.groups.is_shareable
        if not is_wanted or not num_decodes or num_decodes < num_running:
            return 0
        rows = min(self.config.max_draft_rows, self.config.max_batch_tokens)
        return min(self.config.max_drafts, rows // num_decodes - 1)

    def _drafts(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        request = sequence.request
        if request.grammar is not None:
            return ()  # its mask is made for one token at a time
        if sequence.drafter is None:
            sequence.drafter = Drafter(self.config.max_drafts)
        # The last token is drawn, never drafted; and drafts preempt nobody.
        room = self._final_tokens(sequence) - sequence.num_tokens - 1
        held = len(sequence.block_table) * self.config.block_size - sequence.num_tokens
        row_cost = self._step_time.draft_cost(self.num_running)
        drafts = sequence.drafter.propose(sequence.token_ids, min(limit, room), row_cost)
        spare = 2 * len(self._running) * self.config.groups.num_groups
        if len(drafts) > held and self._num_available(sequence) <= spare:
            return drafts[:held]
        missing = self.tables.wanted(sequence, 1 + len(drafts))
        if missing:
            self.tables.extend(sequence, missing)
        return drafts

    def _admit_waiting(self, plan: Plan, client: str | None = None) -> None:
        """Those who wait, in their order; of this client alone, if one is named."""
        computing = self._keys_being_computed()
        held = Counter(sequence.request.client for sequence in self._running)
        skipped: set[int] = set()
        while plan.budget > 0 and self._free_rows:
            candidates = [
                sequence
                for sequence in self._waiting
                if id(sequence) not in skipped and client in (None, sequence.request.client)
            ]
            if not candidates:
                return
            sequence = min(candidates, key=lambda seq: _turn(seq, held))
            if client is None and self._must_wait(sequence):
                return
            hits = self.tables.find_prefix(sequence)
            twin = self._twin(sequence)
            is_ready = twin is None or twin.num_computed >= sequence.num_tokens - 1
            if not is_ready or self._next_key(sequence, len(hits)) in computing:
                skipped.add(id(sequence))
                continue
            if not self._admit(sequence, hits, twin, plan):
                return  # first come, first served: nobody overtakes for being small
            held[sequence.request.client] += 1
            computing.update(sequence.block_keys[len(hits) :])

    def _must_wait(self, sequence: Sequence) -> bool:
        """So many run that one more makes all of them slower, and none is less important."""
        return self._step_time.is_full(len(self._running)) and any(
            sequence.request.priority >= other.request.priority for other in self._running
        )

    def _admit(
        self, sequence: Sequence, hits: list[Span], twin: Sequence | None, plan: Plan
    ) -> bool:
        """Give the sequence a row and its blocks. False, and nothing changed, if they don't fit."""
        if not self._fits(sequence, hits):
            return False
        self.tables.share(sequence, hits)
        sequence.num_lives += 1
        sequence.row = self._free_rows.pop()
        sequence.status = Status.RUNNING
        self._waiting.remove(sequence)
        self._running.append(sequence)
        copies = self.tables.copy_last(twin, sequence) if twin is not None else []
        plan.copies += copies or self.tables.copy_partial(sequence)
        if sequence.first_scheduled_at is None:
            sequence.num_cached_tokens = sequence.num_computed
            self.num_cached_tokens += sequence.num_computed
        num_tokens = self._chunk_size(sequence, plan.budget)
        self.tables.extend(sequence, self.tables.wanted(sequence, num_tokens))
        plan.starts.append(row_start(sequence))
        plan.add(sequence, num_tokens)
        return True

    def _twin(self, sequence: Sequence) -> Sequence | None:
        """A running sequence that began with all these tokens but the last, and whose last block is
        worth a copy: another sample of the prompt, or the beam that this one forks from.

        It may still be reading them. None too if whole blocks are all there is to share.
        """
        if not self.tables.groups.is_shareable:
            return None
        num_shared = sequence.num_tokens - 1
        num_full, rest = divmod(num_shared, self.config.block_size)
        if not rest:
            return None
        start = num_full * self.config.block_size
        tail = sequence.token_ids[start:num_shared]
        parent = sequence.parent_key(num_full)
        for other in self._running:
            if (
                other.num_tokens >= sequence.num_tokens
                and other.parent_key(num_full) == parent
                and other.token_ids[start : start + len(tail)] == tail
            ):
                return other
        return None

    def _fits(self, sequence: Sequence, hits: list[Span]) -> bool:
        """The whole known sequence fits, and what runs can still grow for a while.

        A protected sequence comes in only with room for its last token.
        """
        tokens = sequence.num_tokens + 1
        if sequence.is_protected:
            tokens = max(tokens, self._final_tokens(sequence))
        new_blocks = self.tables.growth(len(hits), self.tables.num_spans(tokens))
        idle_hits = sum(self.pool.is_idle(block_id) for span in hits for block_id in span)
        headroom = self._headroom() if self._running else 0
        return new_blocks + idle_hits + headroom <= self.pool.num_free - self._num_reserved()

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        cap = self.config.prefill_chunk or budget
        return min(sequence.num_left, cap, budget)

    # -------------------------------------------------------------- after a step

    def update(self, result: StepResult, now: float) -> list[Advance]:
        """Take in what the step drew. One Advance for each sequence that got tokens or failed."""
        in_flight = self._take(result.step)
        step_s = now - max(in_flight.began_at, self._updated_at)
        self._updated_at = now
        advances = []
        chunks = zip(in_flight.batch.chunks, in_flight.members, strict=True)
        for index, (chunk, (sequence, life)) in enumerate(chunks):
            if sequence.status is not Status.RUNNING or sequence.num_lives != life:
                continue  # it ended, or was preempted, while the step ran
            if chunk.row in result.errors:
                self._finish(sequence)
                error = result.errors[chunk.row]
                advances.append(Advance(sequence, (), finish_reason="error", error=error))
                continue
            ids = result.token_ids[index]
            self._count(sequence, chunk, len(ids))
            if ids:
                if sequence.decode_began_at is None:
                    sequence.decode_began_at = now - step_s * _drawn_part(chunk, len(ids))
                sequence.last_token_at = now
                logprobs = result.logprobs[index] if result.logprobs else ()
                advances.append(self._advance(sequence, ids, logprobs))
            if sequence.status is Status.RUNNING:
                self.tables.publish(sequence)
        return advances

    def _count(self, sequence: Sequence, chunk: Chunk, num_ids: int) -> None:
        """The chunk is computed, and `num_ids` tokens were drawn behind it."""
        prompt_end = sequence.request.num_prompt_tokens
        self.num_prompt_tokens += max(min(chunk.num_tokens, prompt_end - chunk.start), 0)
        num_accepted = max(num_ids - 1, 0)
        sequence.num_computed += chunk.num_tokens + num_accepted
        sequence.num_planned += num_accepted
        sequence.num_pending -= chunk.samples
        if chunk.draft_ids and sequence.drafter is not None:
            sequence.num_drafts_in_flight = 0
            sequence.drafter.record(len(chunk.draft_ids), num_accepted)

    def observe(self, batch: Batch, duration_s: float) -> None:
        """The runner took this long for the batch; later chunks are sized by it."""
        num_decodes = sum(chunk.samples and chunk.num_tokens == 1 for chunk in batch.chunks)
        num_drafts = sum(len(chunk.draft_ids) for chunk in batch.chunks)
        num_prompt_tokens = batch.num_tokens - num_drafts - num_decodes
        self._step_time.observe(num_decodes, num_prompt_tokens, duration_s, num_drafts)

    def drop_unservable(self) -> list[Advance]:
        """Nothing could be scheduled. If nothing ever can, end the sequence in the way.

        That happens only when the pool shrank below what was promised to a sequence.
        """
        if self._running and all(sequence.is_protected for sequence in self._running):
            blocked = self._running[-1]
        elif not self._running and self._waiting:
            blocked = min(self._waiting, key=lambda seq: _turn(seq, Counter()))
            if self._fits(blocked, self.tables.find_prefix(blocked)):
                return []
        else:
            return []
        self._finish(blocked)
        error = Unservable(blocked.num_tokens + 1, self.max_sequence_tokens)
        return [Advance(blocked, (), finish_reason="error", error=str(error))]

    def fail(self, step: int, error: str) -> list[Advance]:
        """The step raised: its sequences end with this error. Nothing of it was published."""
        advances = []
        for sequence, life in self._take(step).members:
            if sequence.status is Status.RUNNING and sequence.num_lives == life:
                self._finish(sequence)
                advances.append(Advance(sequence, (), finish_reason="error", error=error))
        return advances

    def _take(self, step: int) -> InFlight:
        for in_flight in self._in_flight:
            if in_flight.batch.step == step:
                self._in_flight.remove(in_flight)
                return in_flight
        raise AssertionError(f"a result of step {step}, which is not in flight")

    def _advance(
        self, sequence: Sequence, ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]
    ) -> Advance:
        for count, token_id in enumerate(ids, start=1):
            sequence.append(token_id)
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                # Drafts behind the end were accepted for nothing; their keys are not valid.
                sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
                self.tables.publish(sequence)
                self._finish(sequence)
                stop_token = token_id if reason == "stop" else None
                return Advance(sequence, ids[:count], logprobs[:count], reason, stop_token)
        return Advance(sequence, ids, logprobs)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        request = sequence.request
        is_early = sequence.num_outputs <= request.sampling.min_tokens
        if token_id in request.stop_ids and not is_early:
            return "stop"
        if sequence.num_outputs >= request.max_tokens:
            return "length"
        # One more token would not fit the pool even if everyone else left.
        return "length" if sequence.num_tokens >= self.max_sequence_tokens else None

    # ---------------------------------------------------------------- blocks

    def _next_key(self, sequence: Sequence, num_hits: int) -> bytes | None:
        last = (sequence.num_tokens - 1) // self.config.block_size
        return sequence.block_keys[num_hits] if num_hits < last else None

    def _keys_being_computed(self) -> set[bytes | None]:
        """Blocks that a running sequence fills from tokens it knows already."""
        keys: set[bytes | None] = set()
        if not self.tables.groups.is_shareable:
            return keys
        for sequence in self._running:
            if sequence.num_uncomputed > 1 and sequence.num_published < len(sequence.block_keys):
                keys.update(sequence.block_keys[sequence.num_published :])
        return keys

    def _final_tokens(self, sequence: Sequence) -> int:
        request = sequence.request
        return min(request.num_prompt_tokens + request.max_tokens, self.max_sequence_tokens)

    def _num_reserved(self, asker: Sequence | None = None) -> int:
        """Blocks kept for the protected sequences that run, the asker's own not counted."""
        return sum(
            self._growth(sequence, self._final_tokens(sequence))
            for sequence in self._running
            if sequence.is_protected and sequence is not asker
        )

    def _num_available(self, sequence: Sequence) -> int:
        return self.pool.num_free - self._num_reserved(sequence)

    def _headroom(self) -> int:
        growth = sum(
            self._growth(
                sequence, min(sequence.num_tokens + HEADROOM_STEPS, self._final_tokens(sequence))
            )
            for sequence in self._running
        )
        return min(growth, int(self.pool.num_blocks * HEADROOM_SHARE))

    def _growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence takes until it has so many tokens."""
        return self.tables.growth(len(sequence.block_table), self.tables.num_spans(num_tokens))

    def _victim(self) -> Sequence | None:
        """The least important sequence, then the cheapest to bring back, then the youngest."""
        candidates = [sequence for sequence in self._running if not sequence.is_protected]
        if not candidates:
            return None
        size = self.config.block_size
        return min(
            reversed(candidates),
            key=lambda seq: (-seq.request.priority, seq.num_computed - seq.num_published * size),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.set_progress(0)
        sequence.num_published = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.status = Status.WAITING
        self._waiting.append(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._give_back(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]

    def _give_back(self, sequence: Sequence) -> None:
        self.tables.give_back(sequence)
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._released_rows.append(sequence.row)
        sequence.row = -1

    def check(self) -> None:
        """Assert the invariants by name; for tests, and for the engine when it is idle."""
        invariants.check(self)


def _drawn_part(chunk: Chunk, num_drawn: int) -> float:
    """Of the step that drew a sequence's first tokens: the prompt had the rest of it. So an answer
    whose tokens all come in one step has taken some time to draw."""
    return num_drawn / (chunk.num_tokens - 1 + num_drawn)


def _turn(sequence: Sequence, held: Counter[str]) -> tuple[int, bool, int, float]:
    """Smaller is sooner: priority, then the preempted, then the client with least in hand."""
    request = sequence.request
    is_fresh = sequence.num_preemptions == 0
    return (request.priority, is_fresh, held[request.client], sequence.arrived_at)
