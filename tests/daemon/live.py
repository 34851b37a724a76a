"""A real daemon application on a real socket, with a scripted worker process behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from llmd.backend.protocol import Load
from llmd.daemon.app import make_app
from llmd.daemon.downloads import Downloads
from llmd.daemon.http_server import Server, make_server, run
from llmd.daemon.manager import ModelManager, Spawn
from llmd.daemon.metrics import Metrics
from llmd.daemon.routes.services import Services
from llmd.daemon.settings import Settings
from llmd.daemon.worker_process import Progress, WorkerProcess
from llmd.registry.errors import ModelNotFound, SourceUnavailable
from llmd.registry.manifest import Manifest, ManifestFile
from llmd.registry.names import ModelName
from llmd.registry.pull import PullSettings, Reference
from llmd.registry.store import ModelStore

WORKER = Path(__file__).with_name("scripted_worker.py")

# What the test models can do.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "plain": ("completion",),
    "caller": ("completion", "tools"),
    "thinker": ("completion", "tools", "thinking"),
    "filler": ("completion", "insert"),
    "embedder": ("embedding",),
    "obliging": ("completion", "tools"),  # tests/clients/obliging_worker.py
}
SYSTEM_OF = {"caller": "You are a caller."}


def tiny_gguf(name: str) -> bytes:
    """A GGUF file of metadata alone, different for each name."""
    pairs = [
        _text("general.architecture", "llama"),
        _text("general.name", name),
        _number("llama.context_length", 2048),
        _number("llama.embedding_length", 8),
        _text("tokenizer.chat_template", "{{ messages }}"),
        _texts("tokenizer.ggml.tokens", ["a", "b", "c", "d", "e", "f", "g"]),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs) + bytes(64)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _text(key: str, value: str) -> bytes:
    return _string(key) + struct.pack("<I", 8) + _string(value)


def _number(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", 4, value)


def _texts(key: str, values: list[str]) -> bytes:
    body = b"".join(_string(value) for value in values)
    return _string(key) + struct.pack("<IIQ", 9, 8, len(values)) + body


def install(store: ModelStore, name: str, capabilities: tuple[str, ...]) -> None:
    content = tiny_gguf(name)
    digest = store.add_bytes(content)
    assert digest.removeprefix("sha256:") == hashlib.sha256(content).hexdigest()
    store.put(
        Manifest(
            name=ModelName.parse(name),
            modified=datetime(2026, 11, 30, 12, 0, sum(map(ord, name)) % 60, tzinfo=UTC),
            format="gguf",
            architecture="llama",
            family="llama",
            parameter_count=135_000_000,
            quantization="Q4_1",
            context_length=2048,
            embedding_length=8,
            capabilities=capabilities,
            files=(ManifestFile(f"{name}.gguf", "weights", digest, len(content)),),
            system=SYSTEM_OF.get(name),
            params={"temperature": 0.5, "stop": ["<end>"]} if name == "caller" else {},
        )
    )


@dataclass(frozen=True)
class Report:
    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None
    source: str | None = None
    overall_total: int | None = None
    overall_completed: int | None = None


class ScriptedDownloads:
    async def pull(
        self, what: Reference, insecure: bool = False, accepts_terms: bool = True
    ) -> AsyncGenerator[Report, None]:
        yield Report("pulling manifest")
        name = what.name
        if name.model == "unknown":
            raise ModelNotFound(name.display, "no source has it")
        if name.model == "offline":
            raise SourceUnavailable("hf.co cannot be reached")
        digest = "ab" * 32
        for completed in (0, 60, 100):
            await asyncio.sleep(0)
            yield Report(f"pulling {digest[:12]}", digest, 100, completed, "a test", 200, completed)
        yield Report("verifying sha256 digest")
        yield Report("writing manifest")
        yield Report("success")

    async def push(self, name: ModelName, insecure: bool = False) -> AsyncGenerator[Report, None]:
        yield Report("retrieving manifest")
        yield Report("pushing manifest", source="a test")


async def _spawn(load: Load, on_loading: Progress | None) -> WorkerProcess:
    return await WorkerProcess.start(load, [sys.executable, str(WORKER)], on_loading, 30.0)


class LiveDaemon:
    """Runs on a thread of its own, with its own event loop, until `stop`."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str] = (*CAPABILITIES,),
        pull_settings: PullSettings | None = None,
        spawn: Spawn = _spawn,
        **guard: Any,
    ) -> None:
        """With `pull_settings` its downloads are real; otherwise they follow a script."""
        self.store = ModelStore(root)
        self._pull_settings = pull_settings
        self._spawn = spawn
        for name in names:
            install(self.store, name, CAPABILITIES[name])
        self._guard = guard
        self._server: Server
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._run()))
        self._thread.start()
        assert self._started.wait(20)
        self.client = httpx.Client(base_url=self.url, timeout=30)

    async def _run(self) -> None:
        manager = ModelManager(Settings(), self.store, self._spawn)
        metrics = Metrics(manager.loaded)
        downloads = (
            ScriptedDownloads()
            if self._pull_settings is None
            else Downloads(self.store, self._pull_settings)
        )
        services = Services(manager, self.store, downloads, metrics, version="0.0.test")
        self._server = make_server(make_app(services, **self._guard), port=0)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._started.set()
        await serving
        await manager.shutdown()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.client.post(path, content=content, **more)

    def lines(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The objects of a native stream, whose framing is checked."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        assert response.text.endswith("\n")
        texts = response.text[:-1].split("\n")
        assert all(texts), "an empty line"
        return [json.loads(text) for text in texts]

    def events(self, path: str, body: Any) -> list[tuple[str, Any]]:
        """The (event, data) pairs of a stream of server-sent events, whose framing is checked."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        assert response.text.endswith("\n\n")
        found = []
        for block in response.text[:-2].split("\n\n"):
            *names, data = block.split("\n")
            assert data.startswith("data: ")
            text = data.removeprefix("data: ")
            name = names[0].removeprefix("event: ") if names else ""
            found.append((name, text if text == "[DONE]" else json.loads(text)))
        return found

    def echo(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the worker was sent for a native request, which must not stream."""
        answer = self.post(path, {**body, "stream": False}).json()
        text = answer["response"] if "response" in answer else answer["message"]["content"]
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def live_daemon(root: Path, **options: Any) -> Iterator[LiveDaemon]:
    daemon = LiveDaemon(root, **options)
    try:
        yield daemon
    finally:
        daemon.stop()
