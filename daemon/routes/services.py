"""What the routes need of the rest of the daemon, in one value handed to every handler.

The routes know the model manager, the store and the downloads by these shapes alone, so that tests
may put a scripted worker behind them, and a reader sees at a glance what HTTP touches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
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
from ...registry.names import ModelName
from ..metrics import Metrics

API_VERSION = "0.33.0"  # clients refuse servers of this API that look older than 0.6.4


class ManifestFile(Protocol):
    """One file of an installed model."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...


class Manifest(Protocol):
    """What is known of an installed model without loading it."""

    @property
    def name(self) -> ModelName: ...
    @property
    def digest(self) -> str: ...  # 64 hex digits
    @property
    def size(self) -> int: ...  # bytes
    @property
    def modified(self) -> datetime: ...
    @property
    def format(self) -> str: ...  # gguf, safetensors
    @property
    def architecture(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def parameter_count(self) -> int: ...
    @property
    def parameter_size(self) -> str: ...  # "135M"
    @property
    def quantization(self) -> str: ...  # "Q4_1"
    @property
    def context_length(self) -> int: ...
    @property
    def embedding_length(self) -> int: ...
    @property
    def capabilities(self) -> Sequence[str]: ...
    @property
    def files(self) -> Sequence[Any]: ...
    @property
    def template(self) -> str | None: ...
    @property
    def system(self) -> str | None: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def messages(self) -> Sequence[Any]: ...


class Store(Protocol):
    """registry.store.ModelStore. What is missing raises registry.errors.ModelNotFound."""

    def list(self) -> Sequence[Any]: ...
    def get(self, name: ModelName) -> Any: ...
    def path_of(self, file: Any) -> Path: ...
    def delete(self, name: ModelName) -> None: ...
    def copy(self, source: ModelName, destination: ModelName) -> None: ...


class Lease(Protocol):
    """A promise that the model stays loaded."""

    @property
    def manifest(self) -> Any: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def load_s(self) -> float: ...  # waited for it; near 0 when it was loaded

    def generate(self, request: Generate) -> AsyncIterator[Started | Delta]:
        """Started, then Deltas up to the one with `finished`. Closing it cancels the sequence.

        Raises RequestFailed or WorkerDied.
        """
        ...

    async def embed(self, request: Embed) -> Embedded: ...
    async def tokenize(self, request: Tokenize) -> Tokenized: ...


class LoadedModel(Protocol):
    """A snapshot of one loaded model."""

    @property
    def manifest(self) -> Any: ...
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
    def devices(self) -> Sequence[str]: ...


class Manager(Protocol):
    """daemon.manager.ModelManager."""

    def lease(
        self,
        name: ModelName,
        keep_alive_s: float | None,
        on_loading: Callable[[float, str], None] | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """keep_alive_s: None leaves it as it is, math.inf is forever."""
        ...

    def loaded(self) -> Sequence[LoadedModel]: ...

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


class Downloads(Protocol):
    """daemon.downloads: two who ask for the same model share one pull."""

    def pull(self, name: ModelName, insecure: bool) -> AsyncIterator[Any]:
        """Its progress. Ends when the model is stored; raises a RegistryError.

        Closing it leaves the pull; the last to leave stops it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a handler may use."""

    manager: Manager
    store: Store
    downloads: Downloads
    metrics: Metrics
    version: str  # our own
    context_length: int = 0  # default num_ctx; 0: what the worker chooses
    creator: Any = None  # registry.create; None: /api/create says that it isn't there
