"""Texts to vectors, a slice at a time beside whatever else the worker runs.

    Embed ──prepare: tokenize, cut (reader thread)──▶ EmbeddingJob
          ──add──▶ queue ──step: some layers of some texts (engine thread)──▶ Embedded | Failed

Texts of all waiting jobs share a batch of at most MAX_BATCH_TOKENS, one of each job in turn; a
longer text goes alone. One `step` computes for about SLICE_S and gives way between two layers, so a
large request stalls neither a small one nor a running stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from .models.encoder import Run
from .prompt import RequestRefused
from .protocol import Embed, Embedded, Failed

log = logging.getLogger("llmd.worker")

MAX_BATCH_TOKENS = 1024  # beyond it a batch gains nothing on a CPU
SLICE_S = 0.03  # of one step, if one layer is not longer: about a decode step's time


class Network(Protocol):
    """encoder.Encoder fits."""

    def run(self, texts: Sequence[Sequence[int]]) -> Run: ...


class TextEncoder(Protocol):
    """text.tokenizer.Tokenizer fits."""

    prefix_ids: tuple[int, ...]  # what the model wants before a text
    suffix_ids: tuple[int, ...]

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]: ...


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """One request. Owner after `add`: the engine thread."""

    request: Embed
    texts: list[list[int]]  # token ids, as the network reads them
    vectors: list[list[float]] = field(default_factory=list)  # of the first texts; grows


class Embedder:
    """The embeddings of one model.

    `vector_of(states, dimensions)` pools. `max_length` counts the tokens that a model puts around a
    text, too.
    """

    def __init__(
        self,
        network: Network,
        vector_of: Callable[[Tensor, int], Tensor],
        tokenizer: TextEncoder,
        max_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network = network
        self._vector_of = vector_of
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._clock = clock
        # All the mutable state. Texts are taken in order, so a job's next text is len(vectors).
        self._jobs: deque[EmbeddingJob] = deque()
        self._batch: list[EmbeddingJob] = []  # whose text is at this place of the running batch
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"<Embedder {len(self._jobs)} jobs>"

    @property
    def has_work(self) -> bool:
        """`step` has something to do."""
        return bool(self._jobs)

    def prepare(self, request: Embed) -> EmbeddingJob:
        """Any thread. Raises RequestRefused for a text that is too long or has no token."""
        limit = min(request.num_ctx or self._max_length, self._max_length)
        texts = [self._ids(index, text, limit, request) for index, text in enumerate(request.texts)]
        return EmbeddingJob(request, texts)

    def _ids(self, index: int, text: str, limit: int, request: Embed) -> list[int]:
        prefix, suffix = self._tokenizer.prefix_ids, self._tokenizer.suffix_ids
        ids = self._tokenizer.encode(text, parse_special=True)
        room = max(limit - len(prefix) - len(suffix), 1)
        if len(ids) > room and not request.truncate:
            raise RequestRefused(
                "too_long",
                f"input {index} has {len(ids)} tokens, {room} fit the context of {limit}",
            )
        whole = [*prefix, *ids[:room], *suffix]
        if not whole:
            raise RequestRefused("bad_request", f"input {index} has no token")
        return whole

    def add(self, job: EmbeddingJob) -> None:
        """Queue a prepared job."""
        self._jobs.append(job)

    def cancel(self, id: str) -> bool:
        """Forget a job; what runs for it is thrown away. False if there is none of this id."""
        found = [job for job in self._jobs if job.request.id == id]
        for job in found:
            self._jobs.remove(job)
        return bool(found)

    def clear(self) -> None:
        """Forget all jobs: the worker ends."""
        self._jobs.clear()

    def step(self) -> list[Embedded | Failed]:
        """Compute for a slice of time; what was completed in it, or failed."""
        done = [self._finish(job) for job in self._completed()]  # jobs without texts
        if not self._jobs:
            return done
        try:
            states = self._advance(self._clock() + SLICE_S)
        except Exception as error:
            log.exception("a batch of texts could not be computed")
            return [*done, *self._fail_batch(f"{type(error).__name__}: {error}")]
        for job, state in zip(self._batch, states, strict=False):
            if job in self._jobs:
                vector = self._vector_of(state, job.request.dimensions)
                job.vectors.append(vector.tolist())
        return [*done, *(self._finish(job) for job in self._completed())]

    def _advance(self, deadline: float) -> list[Tensor]:
        """The states of the running batch's texts once it is through; empty before."""
        if self._run is None:
            self._batch, texts = self._next_batch()
            self._run = self._network.run(texts)
        while True:
            try:
                next(self._run)
            except StopIteration as end:
                self._run = None
                states: list[Tensor] = end.value
                return states
            if self._clock() >= deadline:
                return []

    def _next_batch(self) -> tuple[list[EmbeddingJob], list[list[int]]]:
        """A text of each job in turn, so that a small request does not wait for a large one."""
        owners: list[EmbeddingJob] = []
        texts: list[list[int]] = []
        num_tokens = 0
        waiting = deque((job, iter(job.texts[len(job.vectors) :])) for job in self._jobs)
        while waiting:
            job, rest = waiting.popleft()
            ids = next(rest, None)
            if ids is None:
                continue
            if texts and num_tokens + len(ids) > MAX_BATCH_TOKENS:
                break
            owners.append(job)
            texts.append(ids)
            num_tokens += len(ids)
            waiting.append((job, rest))
        return owners, texts

    def _completed(self) -> Iterator[EmbeddingJob]:
        for job in list(self._jobs):
            if len(job.vectors) == len(job.texts):
                self._jobs.remove(job)
                yield job

    @staticmethod
    def _finish(job: EmbeddingJob) -> Embedded | Failed:
        for index, vector in enumerate(job.vectors):
            if not all(abs(value) <= 1.5 for value in vector):  # of length one, so this is NaN
                text = f"embedding contains NaN or Inf values (input {index})"
                return Failed(job.request.id, "bad_request", text)
        return Embedded(job.request.id, job.vectors, sum(map(len, job.texts)))

    def _fail_batch(self, message: str) -> Iterator[Failed]:
        self._run = None
        for job in [job for job in self._jobs if job in self._batch]:
            self._jobs.remove(job)
            yield Failed(job.request.id, "internal", message)


class NoEmbedder:
    """Of a model that makes text alone."""

    has_work = False

    def __init__(self, name: str) -> None:
        self._name = name

    def prepare(self, request: Embed) -> EmbeddingJob:
        """Always raises RequestRefused."""
        raise RequestRefused("unsupported", f"{self._name} does not support embeddings")

    def add(self, job: EmbeddingJob) -> None:
        """Never comes to this: there is no job."""
        raise AssertionError(job)

    def cancel(self, id: str) -> bool:
        """There is no job."""
        return False

    def clear(self) -> None:
        """There is no job."""

    def step(self) -> list[Embedded | Failed]:
        """There is no work."""
        return []
