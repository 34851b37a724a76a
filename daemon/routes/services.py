"""What the routes need of the rest of the daemon, in one value handed to every handler.

The routes know the model manager and the downloads by these shapes alone, so that tests
may put a scripted worker behind them, and a reader sees at a glance what HTTP touches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ...backend.protocol import (
    Delta,
    Embed,
    Embedded,
    Generate,
    Ready,
    Started,
    Stats,
    Tokenize,
    Tokenized,
)
from ...registry.manifest import Manifest
from ...registry.names import ModelName
from ...registry.pull import Reference
from ...registry.store import ModelStore
from ..devices import Device
from ..listener import Listener
from ..metrics import Metrics
from ..placement import NO_WISH, Wish
from ..running import RunningRequest
from ..snapshots import HistoryEntry, LoadingModel

API_VERSION = "0.33.0"  # clients refuse servers of this API that look older than 0.6.4


class Lease(Protocol):
    """A promise that the model stays loaded."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def load_s(self) -> float: ...  # waited for it; near 0 when it was loaded

    def generate(
        self, request: Generate, listener: Listener | None = None
    ) -> AsyncIterator[Started | Delta]:
        """Started, then Deltas up to the one with `finished`. Closing it cancels the sequence.

        `listener` is offered the deltas first. Raises RequestFailed or WorkerDied.
        """
        ...

    async def embed(self, request: Embed) -> Embedded: ...
    async def tokenize(self, request: Tokenize) -> Tokenized: ...


class LoadedModel(Protocol):
    """A snapshot of one loaded model."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def expires_at(self) -> datetime | None: ...  # None: forever
    @property
    def size(self) -> int: ...  # bytes, weights and KV
    @property
    def size_vram(self) -> int: ...  # the part of it on GPUs
    @property
    def context_length(self) -> int: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def pid(self) -> int: ...
    @property
    def devices(self) -> Sequence[str]: ...
    @property
    def kv_budget_bytes(self) -> int: ...


class Manager(Protocol):
    """daemon.manager.ModelManager."""

    def lease(
        self,
        name: ModelName,
        keep_alive_s: float | None,
        on_loading: Callable[[float, str], None] | None = None,
        wish: Wish = NO_WISH,
    ) -> AbstractAsyncContextManager[Lease]:
        """keep_alive_s: None leaves it as it is, math.inf is forever. `wish` counts at a load."""
        ...

    def loaded(self) -> Sequence[LoadedModel]: ...
    def loading(self) -> Sequence[LoadingModel]: ...
    def devices(self) -> Sequence[Device]: ...
    def history(self) -> Sequence[HistoryEntry]: ...

    def requests(self) -> Sequence[tuple[RunningRequest, float]]:
        """What is being answered, and for how many seconds."""
        ...

    async def tidy(self, digest: str) -> None:
        """Remove what was derived from a model that is no longer installed."""
        ...

    def cancel(self, beginning: str) -> str | None:
        """End the one request whose id begins so. None: there is none, or more than one."""
        ...

    async def unload(self, name: ModelName) -> None:
        """Unload as soon as it is idle; at once if it is now. Not loaded: nothing happens."""
        ...


class PullProgress(Protocol):
    """registry.pull.PullProgress."""

    @property
    def status(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def total(self) -> int | None: ...
    @property
    def completed(self) -> int | None: ...
    @property
    def source(self) -> str | None: ...  # who serves it, once that is known
    @property
    def overall_total(self) -> int | None: ...  # of all files together
    @property
    def overall_completed(self) -> int | None: ...


class Downloads(Protocol):
    """daemon.downloads: two who ask for the same model share one pull."""

    def pull(
        self, what: Reference, insecure: bool = False, accepts_terms: bool = True
    ) -> AsyncGenerator[PullProgress, None]:
        """Its progress. Ends when the model is stored; raises a RegistryError.

        Closing it leaves the pull; the last to leave stops it.
        """
        ...

    def push(self, name: ModelName, insecure: bool = False) -> AsyncGenerator[PullProgress, None]:
        """Its progress. Ends when the registry has the model; raises a RegistryError."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a handler may use."""

    manager: Manager
    store: ModelStore
    downloads: Downloads
    metrics: Metrics
    version: str  # our own
    context_length: int = 0  # default num_ctx; 0: what the worker chooses
    stop: Callable[[], None] = lambda: None  # end the daemon
    creator: Any = None  # registry.create; None: /api/create says that it isn't there
