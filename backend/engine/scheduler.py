"""Who runs in the next step, and with how many tokens.

There is no prefill or decode phase. Every sequence has tokens known and tokens computed, and a step
closes the gap within a token budget: running sequences first, in the order of their admission, then
waiting ones. A prompt chunk, a decode, a resume after preemption, a prefix hit and drafts to verify
are the same case with other numbers (vLLM's v1 scheduler; Agrawal et al., "Taming Throughput-
Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, for the chunks).

    schedule() ──▶ Batch ──runner──▶ StepResult ──▶ update()      one at a time
                                     or an error ──▶ fail()

Out of blocks: the sequence whose recomputation costs least gives back all its blocks and waits;
what it computed stays in the prefix cache as long as nobody needs the room. A sequence that was
preempted MAX_PREEMPTIONS times is *protected*: it comes back only when the pool can hold it to its
last token, and that room is kept for it. So it cannot be preempted again, and every sequence ends.

Full blocks are published when their step has succeeded, not before: a failed step leaves no key of
a block that was never filled. A waiting sequence whose next block is being computed by a running
one waits a step and then shares it, instead of computing it a second time.

Owner: the Engine, on the engine thread. Time comes in as `now`, in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .batch import Batch, Chunk, Logprobs, RowStart, StepResult
from .block_pool import BlockPool, root_key
from .sequence import EngineRequest, Sequence, Status

MAX_PREEMPTIONS = 3  # of one sequence, before it is protected
HEADROOM_STEPS = 64  # admission leaves room for the growth of what runs, this many steps ahead
HEADROOM_SHARE = 0.1  # ... but at most this share of the pool


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


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did to one sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str = ""


@dataclass(slots=True)
class _Plan:
    """A batch in the making."""

    budget: int
    chunks: list[Chunk]
    sequences: list[Sequence]
    starts: list[RowStart]
    has_preempted: bool = False

    def drop(self, sequence: Sequence) -> None:
        """A sequence that was planned in this pass was preempted after all."""
        for index, planned in enumerate(self.sequences):
            if planned is sequence:
                self.budget += self.chunks[index].num_tokens
                del self.sequences[index], self.chunks[index]
                break
        self.starts = [start for start in self.starts if start.row != sequence.row]


class Scheduler:
    """Continuous batching over a BlockPool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)

        # A live sequence is in exactly one of `_waiting` and `_running`, and in `_sequences`.
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._released_rows: list[int] = []
        self._in_step: list[Sequence] = []  # of the batch whose result is not back, in its order
        self._batch: Batch | None = None
        self._step = 0

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
    def has_work(self) -> bool:
        """A sequence is running or waiting."""
        return bool(self._sequences)

    @property
    def max_sequence_tokens(self) -> int:
        """What one sequence alone could hold."""
        return self.pool.num_blocks * self.config.block_size

    # ------------------------------------------------------------- come and go

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a sequence. Raises Unservable, and ValueError for an id that is in use."""
        if request.id in self._sequences:
            raise ValueError(f"sequence {request.id} exists")
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
        """Make a running sequence give back its blocks and wait. For tests of that path."""
        sequence = self._sequences.get(id)
        if sequence is None or sequence.status is not Status.RUNNING:
            return False
        self._preempt(sequence)
        return True

    def set_num_blocks(self, num_blocks: int) -> None:
        """The KV memory grew or shrank. Running sequences keep what they hold."""
        self.pool.set_num_blocks(num_blocks)

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None if nothing can run. Every batch wants one update or fail."""
        assert self._batch is None, "the last batch has no result yet"
        plan = _Plan(self.config.max_batch_tokens, [], [], [])
        for sequence in list(self._running):
            if sequence.status is Status.RUNNING and plan.budget > 0:
                self._plan_running(sequence, plan)
        if not plan.has_preempted:
            self._admit_waiting(plan)
        if not plan.chunks:
            return None
        for sequence in plan.sequences:
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
        self._step += 1
        self._in_step = plan.sequences
        self._batch = Batch(
            step=self._step,
            chunks=tuple(plan.chunks),
            starts=tuple(plan.starts),
            releases=tuple(self._released_rows),
        )
        self._released_rows = []
        return self._batch

    def _plan_running(self, sequence: Sequence, plan: _Plan) -> None:
        num_tokens = self._chunk_size(sequence, plan.budget)
        num_blocks = self._blocks_for(sequence.num_computed + num_tokens)
        wanted = num_blocks - len(sequence.block_table)
        while wanted > self._num_available(sequence):
            victim = self._victim()
            if victim is None:
                return  # only protected sequences hold blocks, and they will end
            self._preempt(victim)
            plan.drop(victim)
            plan.has_preempted = True
            if victim is sequence:
                return
        if wanted > 0:
            sequence.block_table.extend(self.pool.allocate(wanted))
        self._plan_chunk(sequence, num_tokens, plan)

    def _admit_waiting(self, plan: _Plan) -> None:
        computing = self._keys_being_computed()
        held = Counter(sequence.request.client for sequence in self._running)
        skipped: set[int] = set()
        while plan.budget > 0 and self._free_rows and len(skipped) < len(self._waiting):
            candidates = (seq for seq in self._waiting if id(seq) not in skipped)
            sequence = min(candidates, key=lambda seq: _turn(seq, held))
            hits = self._find_prefix(sequence)
            if self._next_key(sequence, len(hits)) in computing:
                skipped.add(id(sequence))
                continue
            if not self._admit(sequence, hits, plan):
                return  # first come, first served: nobody overtakes for being small
            held[sequence.request.client] += 1
            computing.update(sequence.block_keys[len(hits) :])

    def _admit(self, sequence: Sequence, hits: list[int], plan: _Plan) -> bool:
        """Give the sequence a row and its blocks. False, and nothing changed, if they don't fit."""
        if not self._fits(sequence, hits):
            return False
        for block_id in hits:
            self.pool.reuse(block_id)
        sequence.block_table = list(hits)
        sequence.num_computed = len(hits) * self.config.block_size
        sequence.num_published = len(hits)
        sequence.num_sent_blocks = 0
        if sequence.first_scheduled_at is None:
            sequence.num_cached_tokens = sequence.num_computed
        sequence.row = self._free_rows.pop()
        sequence.status = Status.RUNNING
        self._waiting.remove(sequence)
        self._running.append(sequence)
        num_tokens = self._chunk_size(sequence, plan.budget)
        wanted = self._blocks_for(sequence.num_computed + num_tokens) - len(hits)
        sequence.block_table.extend(self.pool.allocate(wanted))
        plan.starts.append(_row_start(sequence))
        self._plan_chunk(sequence, num_tokens, plan)
        return True

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """The whole known sequence fits, and what runs can still grow for a while.

        A protected sequence comes in only with room for its last token.
        """
        tokens = sequence.num_tokens + 1
        if _is_protected(sequence):
            tokens = self._final_tokens(sequence)
        new_blocks = self._blocks_for(tokens) - len(hits)
        idle_hits = sum(1 for block_id in hits if self.pool.is_idle(block_id))
        headroom = self._headroom() if self._running else 0
        return new_blocks + idle_hits + headroom <= self.pool.num_free - self._num_reserved()

    def _plan_chunk(self, sequence: Sequence, num_tokens: int, plan: _Plan) -> None:
        new_blocks = tuple(sequence.block_table[sequence.num_sent_blocks :])
        sequence.num_sent_blocks = len(sequence.block_table)
        plan.chunks.append(
            Chunk(
                row=sequence.row,
                start=sequence.num_computed,
                num_tokens=num_tokens,
                new_blocks=new_blocks,
                samples=sequence.num_computed + num_tokens == sequence.num_tokens,
            )
        )
        plan.sequences.append(sequence)
        plan.budget -= num_tokens

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        cap = self.config.prefill_chunk or budget
        return min(sequence.num_left, cap, budget)

    # -------------------------------------------------------------- after a step

    def update(self, result: StepResult, now: float) -> list[Advance]:
        """Take in what the step drew. One Advance for each sequence that got tokens or failed."""
        batch, sequences = self._take_batch(result.step)
        advances = []
        for index, (chunk, sequence) in enumerate(zip(batch.chunks, sequences, strict=True)):
            if sequence.status is not Status.RUNNING or sequence.row != chunk.row:
                continue  # cancelled while the step ran
            if chunk.row in result.errors:
                self._finish(sequence)
                error = result.errors[chunk.row]
                advances.append(Advance(sequence, (), finish_reason="error", error=error))
                continue
            ids = result.token_ids[index]
            sequence.num_computed += chunk.num_tokens + max(len(ids) - 1, 0)
            if ids:
                logprobs = result.logprobs[index] if result.logprobs else ()
                advances.append(self._advance(sequence, ids, logprobs, now))
            if sequence.status is Status.RUNNING:
                self._publish(sequence)
        return advances

    def fail(self, step: int, error: str) -> list[Advance]:
        """The step raised: its sequences end with this error. Nothing of it was published."""
        _, sequences = self._take_batch(step)
        advances = []
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self._finish(sequence)
                advances.append(Advance(sequence, (), finish_reason="error", error=error))
        return advances

    def _take_batch(self, step: int) -> tuple[Batch, list[Sequence]]:
        batch, sequences = self._batch, self._in_step
        assert batch is not None and batch.step == step, "a result without its batch"
        self._batch, self._in_step = None, []
        return batch, sequences

    def _advance(
        self, sequence: Sequence, ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], now: float
    ) -> Advance:
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        for count, token_id in enumerate(ids, start=1):
            sequence.append(token_id)
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                # Drafts behind the end were accepted for nothing; their keys are not valid.
                sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
                self._publish(sequence)
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

    def _publish(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed // self.config.block_size
        for index in range(sequence.num_published, num_full):
            self.pool.publish(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_published = max(sequence.num_published, num_full)

    # ---------------------------------------------------------------- blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest known prefix, in blocks; one token at least is left to compute."""
        hits: list[int] = []
        for key in sequence.block_keys[: (sequence.num_tokens - 1) // self.config.block_size]:
            block_id = self.pool.find(key)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _next_key(self, sequence: Sequence, num_hits: int) -> bytes | None:
        last = (sequence.num_tokens - 1) // self.config.block_size
        return sequence.block_keys[num_hits] if num_hits < last else None

    def _keys_being_computed(self) -> set[bytes | None]:
        """Blocks that a running sequence fills from tokens it knows already."""
        keys: set[bytes | None] = set()
        for sequence in self._running:
            if sequence.num_left > 1:
                keys.update(sequence.block_keys[sequence.num_published :])
        return keys

    def _final_tokens(self, sequence: Sequence) -> int:
        request = sequence.request
        return min(request.num_prompt_tokens + request.max_tokens, self.max_sequence_tokens)

    def _num_reserved(self, asker: Sequence | None = None) -> int:
        """Blocks kept for the protected sequences that run, the asker's own not counted."""
        return sum(
            max(self._blocks_for(self._final_tokens(sequence)) - len(sequence.block_table), 0)
            for sequence in self._running
            if _is_protected(sequence) and sequence is not asker
        )

    def _num_available(self, sequence: Sequence) -> int:
        return self.pool.num_free - self._num_reserved(sequence)

    def _headroom(self) -> int:
        growth = sum(
            self._blocks_for(
                min(sequence.num_tokens + HEADROOM_STEPS, self._final_tokens(sequence))
            )
            - len(sequence.block_table)
            for sequence in self._running
        )
        return min(max(growth, 0), int(self.pool.num_blocks * HEADROOM_SHARE))

    def _victim(self) -> Sequence | None:
        """The least important sequence, then the cheapest to bring back, then the youngest."""
        candidates = [sequence for sequence in self._running if not _is_protected(sequence)]
        if not candidates:
            return None
        size = self.config.block_size
        return min(
            reversed(candidates),
            key=lambda seq: (-seq.request.priority, seq.num_computed - seq.num_published * size),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.num_computed = sequence.num_published = 0
        sequence.num_preemptions += 1
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
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._released_rows.append(sequence.row)
        sequence.row = -1

    def check(self) -> None:
        """Assert the invariants; for tests, and for the engine when it is idle."""
        self.pool.check()
        live = [*self._waiting, *self._running]
        assert len(live) == len(self._sequences), "a sequence is in no list, or in two"
        assert {sequence.id for sequence in live} == set(self._sequences)
        rows = [sequence.row for sequence in self._running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs))
        assert all(seq.row == -1 and not seq.block_table for seq in self._waiting)
        held = Counter(block for seq in self._running for block in seq.block_table)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == held[block_id], f"block {block_id} is off"
        for sequence in self._running:
            self._check_running(sequence)

    def _check_running(self, sequence: Sequence) -> None:
        assert 0 <= sequence.num_computed < sequence.num_tokens
        assert len(sequence.block_table) >= self._blocks_for(sequence.num_computed)
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        assert sequence.num_preemptions <= MAX_PREEMPTIONS
        assert sequence.num_published <= sequence.num_computed // self.config.block_size
        for index in range(sequence.num_published, len(sequence.block_table)):
            # A block that is still written to has one holder.
            assert self.pool.ref_count(sequence.block_table[index]) == 1


def _is_protected(sequence: Sequence) -> bool:
    return sequence.num_preemptions >= MAX_PREEMPTIONS


def _turn(sequence: Sequence, held: Counter[str]) -> tuple[int, bool, int, float]:
    """Smaller is sooner: priority, then the preempted, then the client with least in hand."""
    request = sequence.request
    is_fresh = sequence.num_preemptions == 0
    return (request.priority, is_fresh, held[request.client], sequence.arrived_at)


def _row_start(sequence: Sequence) -> RowStart:
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
