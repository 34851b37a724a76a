"""The loop of one model: schedule, run, update.

With a PipelinedRunner and a depth of 2 the next step is planned and handed over while the last one
runs, so that the device does not wait for the planning, nor for what the caller does between steps:

    depth 1   plan 1 │ run 1 │ update 1 │ plan 2 │ run 2 │ update 2
    depth 2   plan 1 │ run 1            │ run 2                     │ run 3
                     │ plan 2           │ update 1, plan 3          │ update 2, plan 4

The texts are the same: see Scheduler. A plan that needs the result first waits for it.

Owner: the worker's engine thread; nothing here is thread-safe. A runner that raises ends the
sequences of that step with the reason "error"; the engine itself goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from .batch import Batch, Logprobs, Pending, PipelinedRunner, Runner, StepResult
from .block_pool import block_key, group_key, root_key
from .scheduler import MAX_IN_FLIGHT, Advance, Scheduler, Unservable
from .sequence import EngineRequest

__all__ = ["Engine", "EngineRequest", "EngineStats", "SequenceOutput", "Unservable"]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step, or a cancel, did to one sequence. The figures are those so far."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None  # one of protocol.FINISH_REASONS
    stop_token: int | None = None
    error: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters only grow; the rest is now."""

    running: int
    waiting: int
    blocks_total: int
    blocks_in_use: int
    blocks_cached: int
    blocks_free: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    blocks_left_behind: int = 0  # given back because a layer's window had passed them


class Engine:
    """Joins a Scheduler and a Runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        depth: int = MAX_IN_FLIGHT,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner if isinstance(runner, PipelinedRunner) else _OneByOne(runner)
        self._depth = depth if isinstance(runner, PipelinedRunner) else 1
        self._clock = clock

        # The steps handed over, the oldest first, and when their runner was free to begin.
        self._in_flight: deque[tuple[Batch, Pending]] = deque()
        self._began_at = 0.0
        self._num_steps = 0
        self._num_output_tokens = 0

    def __repr__(self) -> str:
        return f"<Engine {self._num_steps} steps | {self._scheduler!r}>"

    @property
    def has_work(self) -> bool:
        """A sequence is running or waiting, or a step is: `step` has something to do."""
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output of one sequence together can never be more."""
        return self._scheduler.max_sequence_tokens

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises Unservable (both numbers in it) if it can never fit."""
        self._scheduler.add(request, self._clock())

    def cancel(self, id: str, reason: str = "abort") -> SequenceOutput | None:
        """End a sequence now; its blocks are free for the next step. None if it is not there."""
        sequence = self._scheduler.cancel(id)
        if sequence is None:
            return None
        return _output(Advance(sequence, (), finish_reason=reason))

    def step(self) -> list[SequenceOutput]:
        """Run one step. One output for each sequence that got tokens, or ended."""
        self._hand_over()
        if self._in_flight:
            advances = self._take_in(*self._in_flight.popleft())
        else:
            advances = self._scheduler.drop_unservable()
        self._num_output_tokens += sum(len(advance.token_ids) for advance in advances)
        return [_output(advance) for advance in advances]

    def _hand_over(self) -> None:
        """Plan and begin as many steps as may be in flight."""
        while len(self._in_flight) < self._depth:
            now = self._clock()
            batch = self._scheduler.schedule(now)
            if batch is None:
                break
            self._num_steps += 1
            if not self._in_flight:
                self._began_at = now
            try:
                pending = self._runner.submit(batch)
            except Exception as error:
                pending = _Failed(error)  # told in its turn, after the results before it
            self._in_flight.append((batch, pending))

    def _take_in(self, batch: Batch, pending: Pending) -> list[Advance]:
        """Wait for a step, and let its sequences have what it drew."""
        try:
            result = pending.result()
        except Exception as error:
            self._began_at = self._clock()
            return self._scheduler.fail(batch.step, _told(error))
        now = self._clock()
        self._scheduler.observe(batch, now - self._began_at)
        self._began_at = now
        return self._scheduler.update(result, now)

    def force_preempt(self, id: str) -> bool:
        """Preempt a running sequence, as if blocks had run out. For tests of that path."""
        return self._scheduler.preempt(id)

    def set_num_blocks(self, num_blocks: int) -> None:
        """The KV memory was given more room, or less."""
        self._scheduler.set_num_blocks(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that may be held."""
        return self._scheduler.pool.num_blocks

    @property
    def blank_ids(self) -> Collection[int]:
        """Blocks whose memory holds nothing."""
        return self._scheduler.pool.blank_ids

    @property
    def cached_keys(self) -> list[tuple[bytes, int]]:
        """Known prefixes that nobody holds, and their blocks; the longest idle first."""
        return self._scheduler.pool.cached_keys

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens fill."""
        tables = self._scheduler.tables
        return tables.growth(0, tables.num_spans(num_tokens))

    def prefix_keys(self, token_ids: Sequence[int], adapter: str, salt: str) -> list[bytes]:
        """The names of the full blocks that a prompt could take from the prefix cache.

        Touches no state: any thread may ask.
        """
        config = self._scheduler.config
        key = root_key(config.cache_seed, adapter=adapter, salt=salt)
        keys: list[bytes] = []
        for end in range(config.block_size, len(token_ids), config.block_size):
            key = block_key(key, token_ids[end - config.block_size : end])
            keys += [group_key(key, group) for group in range(config.groups.num_groups)]
        return keys

    def knows(self, key: bytes) -> bool:
        """Whether a block with this content is in memory."""
        return self._scheduler.pool.find(key) is not None

    def adopt(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Blocks for prefixes that come from elsewhere, as many as are free, in the order given.

        They are known from now on: the caller fills them before the next step.
        """
        pool = self._scheduler.pool
        unknown = [key for key in keys if pool.find(key) is None][: pool.num_free]
        blocks = pool.allocate(len(unknown))
        for block_id, key in zip(blocks, unknown, strict=True):
            pool.publish(block_id, key)
        pool.release(blocks)
        return list(zip(unknown, blocks, strict=True))

    def reset_prefix_cache(self) -> bool:
        """Forget every known prefix. False, and nothing changed, while something runs."""
        return self._scheduler.pool.reset()

    def stats(self) -> EngineStats:
        """A snapshot."""
        pool = self._scheduler.pool
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            blocks_total=pool.num_blocks,
            blocks_in_use=pool.num_in_use,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_blank,
            steps=self._num_steps,
            prompt_tokens=self._scheduler.num_prompt_tokens,
            cached_tokens=self._scheduler.num_cached_tokens,
            output_tokens=self._num_output_tokens,
            preemptions=self._scheduler.num_preemptions,
            blocks_left_behind=self._scheduler.tables.num_left_behind,
        )

    def check(self) -> None:
        """Assert the invariants of the scheduler and its pool."""
        self._scheduler.check()


class _OneByOne:
    """A runner that can only execute, behind the interface of one that runs ahead."""

    def __init__(self, runner: Runner) -> None:
        self.execute = runner.execute

    def submit(self, batch: Batch) -> Pending:
        """Runs when its result is asked for."""
        return _Deferred(self.execute, batch)


@dataclass(frozen=True, slots=True)
class _Deferred:
    execute: Callable[[Batch], StepResult]
    batch: Batch

    def result(self) -> StepResult:
        return self.execute(self.batch)


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception

    def result(self) -> StepResult:
        raise self.error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _output(advance: Advance) -> SequenceOutput:
    sequence = advance.sequence
    scheduled, began = sequence.first_scheduled_at, sequence.decode_began_at
    last = sequence.last_token_at
    return SequenceOutput(
        id=sequence.id,
        token_ids=advance.token_ids,
        logprobs=advance.logprobs,
        finish_reason=advance.finish_reason,
        stop_token=advance.stop_token,
        error=advance.error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        queue_s=scheduled - sequence.arrived_at if scheduled is not None else 0.0,
        prefill_s=began - scheduled if began is not None and scheduled is not None else 0.0,
        decode_s=last - began if last is not None and began is not None else 0.0,
    )
