"""A Lease: the promise that a model stays loaded, and the way to its worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from ..backend.protocol import (
    Delta,
    Embed,
    Embedded,
    Generate,
    Started,
    Tokenize,
    Tokenized,
)
from ..registry.manifest import Manifest
from .failover import resumed, retried
from .listener import Listener
from .running import RunningRequest
from .worker_process import WorkerProcess


class Lender(Protocol):
    """ModelManager, as a lease knows it."""

    async def worker_for(self, manifest: Manifest) -> WorkerProcess:
        """A ready worker, loaded if need be."""
        ...

    def running_request(self, lease: Lease, request: Generate) -> RunningRequest:
        """The record of a sequence that is about to begin."""
        ...


class Lease:
    """Made by ModelManager.lease, good while that block runs."""

    def __init__(
        self, lender: Lender, manifest: Manifest, worker: WorkerProcess, load_s: float
    ) -> None:
        assert worker.ready is not None
        self.manifest = manifest
        self.ready = worker.ready
        self.load_s = load_s
        self.worker = worker
        self._lender = lender

    def generate(
        self, request: Generate, listener: Listener | None = None
    ) -> AsyncGenerator[Started | Delta, None]:
        """Started, then Deltas up to the one with `finished`. Closing it cancels the sequence.

        If the worker dies meanwhile, a fresh one goes on at the exact token, once. `listener` is
        offered the deltas first (worker_process.py). Raises RequestFailed, WorkerDied.
        """
        running = self._lender.running_request(self, request)
        return resumed(self.worker, request, self._replacement, running, listener or Listener())

    def cancel(self, id: str) -> None:
        """End the sequence of this request; its stream ends with a final delta."""
        self.worker.cancel(id)

    async def embed(self, request: Embed) -> Embedded:
        """Raises RequestFailed, WorkerDied."""
        return await retried(self.worker, lambda worker: worker.embed(request), self._replacement)

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Raises RequestFailed, WorkerDied."""
        return await retried(
            self.worker, lambda worker: worker.tokenize(request), self._replacement
        )

    async def _replacement(self) -> WorkerProcess:
        self.worker = await self._lender.worker_for(self.manifest)
        return self.worker
