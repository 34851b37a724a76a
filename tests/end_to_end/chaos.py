"""Five minutes of everything that can go wrong at once, seeded; then nothing is lost or left.

A daemon with the real model under three names, memory for two of them, and eight clients who chat.
Meanwhile workers are killed and stopped, clients hang up, requests are cancelled, models are pulled
again, removed while they are loaded and brought back, and other programs take the memory.

    python -m tests.end_to_end.chaos [--seconds 300] [--seed 1] [--fake]

Every answer must be, to the letter, what the model says undisturbed; or, if someone cut it short, a
beginning of that. Afterwards each owner of state checks itself, and no block, lease or process is
left. The daemon runs in this process, so that its state can be looked at. With --fake its workers
are tests/fake_worker.py: the daemon's part of it all, in seconds and without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from llmd.daemon.app import make_app
from llmd.daemon.devices import Device, Inventory
from llmd.daemon.downloads import Downloads
from llmd.daemon.manager import ModelManager
from llmd.daemon.metrics import Metrics
from llmd.daemon.routes.services import Services
from llmd.daemon.settings import Settings
from llmd.registry.manifest import Manifest
from llmd.registry.names import ModelName
from llmd.registry.pull import PullSettings, pull
from llmd.registry.store import ModelStore

from .. import model_files

FAKE_COMMAND = (sys.executable, str(Path(__file__).parent.parent / "fake_worker.py"))
NAMES = ("one", "two", "three")
NUM_CLIENTS = 8
NUM_PREDICT = 24
PROMPTS = tuple(
    f"Tell me about {topic}." + " More, please." * number
    for number, topic in enumerate(("foxes", "rain", "bread", "ships", "snow", "music"))
)
# What a client may be told when something was done to its model, and nothing else.
EXPLAINED = ("ended unexpectedly", "is held off", "not found", "no such file", "is gone")
REST_S = 60.0  # for everything to be given back at the end


@dataclass
class Tally:
    """What happened."""

    acts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class ChangingMachine(Inventory):
    """A machine on which other programs come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0.0  # the share of the memory that they hold

    def probe(self) -> tuple[Device, ...]:
        return (self.host(),)

    def host(self) -> Device:
        total = 100 * 10**9
        return Device("cpu", "a test", total, int(total * (1 - self.taken)))


class Stage:
    """The daemon under test."""

    def __init__(self, root: Path, is_fake: bool) -> None:
        self.store = ModelStore(root)
        self.machine = ChangingMachine()
        self.settings = Settings(
            models=root,
            num_threads=1,
            max_loaded_models=2,
            drain_s=2.0,
            worker_command=FAKE_COMMAND if is_fake else (),
        )
        self.manager = ModelManager(self.settings, self.store, inventory=self.machine)
        self.manifests: dict[str, Manifest] = {}

    async def start(self) -> None:
        gguf = str(model_files.smollm2_gguf())
        original = await pull(self.store, gguf)
        for number, name in enumerate(NAMES):
            manifest = replace(
                original,
                name=ModelName.parse(name),
                params={"temperature": 0.0, "num_keep": number + 1},
            )
            self.manifests[name] = manifest
            self.store.put(manifest)
        downloads = Downloads(self.store, PullSettings())
        services = Services(
            self.manager, self.store, downloads, Metrics(self.manager.loaded), version="chaos"
        )
        config = uvicorn.Config(make_app(services), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pids(self) -> list[int]:
        return [loaded.pid for loaded in self.manager.loaded()]

    async def close(self) -> None:
        self._server.should_exit = True
        await self.manager.shutdown()
        await self._serving


class Chaos:
    """The clients and what is done to them."""

    def __init__(self, stage: Stage, seed: int, seconds: float) -> None:
        self._stage = stage
        self._draw = random.Random(seed)
        self._seed = seed
        self._seconds = seconds
        self.tally = Tally()
        self._expected: dict[str, str] = {}
        self.pids: set[int] = set()
        self._is_over = False

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._stage.url, timeout=120) as client:
            self._client = client
            for prompt in PROMPTS:
                self._expected[prompt] = (await self._ask("one", prompt, None))[0]
            end = asyncio.get_running_loop().time() + self._seconds
            clients = [asyncio.create_task(self._chat(number)) for number in range(NUM_CLIENTS)]
            while asyncio.get_running_loop().time() < end:
                await asyncio.sleep(self._draw.uniform(0.5, 4.0))
                await self._act()
            self._is_over = True
            self._stage.machine.taken = 0.0
            await self._bring_back()
            await asyncio.gather(*clients)

    # ----------------------------------------------------------------- clients

    async def _chat(self, number: int) -> None:
        draw = random.Random(1000 * self._seed + number)
        while not self._is_over:
            name, prompt = draw.choice(NAMES), draw.choice(PROMPTS)
            leaves_at = draw.randrange(1, NUM_PREDICT) if draw.random() < 0.15 else None
            began = time.monotonic()
            try:
                text, last = await self._ask(name, prompt, leaves_at)
            except httpx.HTTPError as error:
                self.tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
            self._judge(name, prompt, text, last, leaves_at)
            await asyncio.sleep(draw.uniform(0, 0.5))

    async def _ask(
        self, name: str, prompt: str, leaves_at: int | None
    ) -> tuple[str, dict[str, Any]]:
        """The text, and the last object; {} if the client hung up."""
        body = {
            "model": name,
            "messages": [{"role": "user", "content": prompt}],
            "options": {"num_predict": NUM_PREDICT, "temperature": 0, "seed": 7},
        }
        text, num_lines = "", 0
        async with self._client.stream("POST", "/api/chat", json=body) as response:
            async for line in response.aiter_lines():
                found: dict[str, Any] = json.loads(line)
                if "error" in found or found.get("done"):
                    return text, found
                text += found["message"]["content"]
                num_lines += 1
                if num_lines == leaves_at:
                    return text, {}
        return text, {"error": "the stream ended without a last object"}

    def _judge(
        self, name: str, prompt: str, text: str, last: dict[str, Any], leaves_at: int | None
    ) -> None:
        expected = self._expected[prompt]
        if error := last.get("error"):
            why = next((words for words in EXPLAINED if words in error), None)
            self.tally.ends[f"told: {why}" if why else "wrong"] += 1
            if why is None:
                self.tally.wrong.append(f"{name}: {error}")
        elif not expected.startswith(text):
            self.tally.ends["wrong"] += 1
            self.tally.wrong.append(f"{name}: {text!r} instead of {expected!r}")
        elif not last:
            self.tally.ends["hung up"] += 1
        elif last["done_reason"] == "abort":
            self.tally.ends["cancelled"] += 1
        elif text != expected:
            self.tally.ends["wrong"] += 1
            self.tally.wrong.append(f"{name}: {text!r} is cut short")
        else:
            self.tally.ends["complete"] += 1

    # -------------------------------------------------------------------- acts

    async def _act(self) -> None:
        acts: list[tuple[int, str, Callable[[], Awaitable[None]]]] = [
            (3, "kill -9", lambda: self._signal(signal.SIGKILL)),
            (1, "SIGSTOP", lambda: self._signal(signal.SIGSTOP)),
            (6, "cancel", self._cancel),
            (2, "rm", self._remove),
            (3, "bring back", self._bring_back),
            (2, "pull", self._pull),
            (2, "memory pressure", self._press),
            (1, "stop", self._unload),
        ]
        weights = [weight for weight, _, _ in acts]
        ((_, name, act),) = self._draw.choices(acts, weights)
        self.tally.acts[name] += 1
        await act()
        self._stage.manager.check()

    async def _signal(self, number: int) -> None:
        pids = self._stage.pids
        self.pids.update(pids)
        if pids:
            os.kill(self._draw.choice(pids), number)

    async def _cancel(self) -> None:
        running = (await self._client.get("/api/requests")).json()["requests"]
        if running:
            id = self._draw.choice(running)["id"]
            await self._client.post("/api/cancel", json={"id": id})

    async def _remove(self) -> None:
        body = {"model": self._draw.choice(NAMES)}
        await self._client.request("DELETE", "/api/delete", json=body)

    async def _bring_back(self) -> None:
        await self._pull()
        for manifest in self._stage.manifests.values():
            self._stage.store.put(manifest)

    async def _pull(self) -> None:
        body = {"model": str(model_files.smollm2_gguf()), "stream": False}
        await self._client.post("/api/pull", json=body)

    async def _press(self) -> None:
        self._stage.machine.taken = 0.0 if self._stage.machine.taken else 0.98

    async def _unload(self) -> None:
        body = {"model": self._draw.choice(NAMES), "keep_alive": 0}
        await self._client.post("/api/generate", json=body)


async def settle(stage: Stage) -> dict[str, Any]:
    """Wait until nothing is in use any more, and let every owner check itself."""
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        models = stage.manager.loaded()
        in_use = sum(model.stats.blocks_in_use for model in models)
        running = sum(model.stats.running + model.stats.waiting for model in models)
        leases = sum(model.num_leases for model in models)
        requests = len(stage.manager.requests())
        if not (in_use or running or leases or requests or stage.manager.loading()):
            break
        await asyncio.sleep(0.1)
    stage.manager.check()
    return {
        "blocks in use": in_use,
        "sequences": running,
        "leases": leases,
        "requests": requests,
        "state": repr(stage.manager),
    }


async def trial(
    root: Path, seconds: float, seed: int, is_fake: bool
) -> tuple[Tally, dict[str, Any]]:
    """Chaos, then the reckoning. No process is left."""
    stage = Stage(root, is_fake)
    await stage.start()
    chaos = Chaos(stage, seed, seconds)
    try:
        await chaos.run()
        left = await settle(stage)
    finally:
        await stage.close()
    left["processes"] = len([pid for pid in chaos.pids if psutil.pid_exists(pid)])
    left["events"] = dict(Counter(entry.event for entry in stage.manager.history()))
    left["counters"] = stage.manager.counters()
    return chaos.tally, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true")
    arguments = parser.parse_args()
    if arguments.fake:
        os.environ["FAKE_WORKER"] = json.dumps({name: {"token_s": 0.03} for name in NAMES})
    with tempfile.TemporaryDirectory() as folder:
        tally, left = asyncio.run(
            trial(Path(folder), arguments.seconds, arguments.seed, arguments.fake)
        )
    print(f"seed {arguments.seed}, {arguments.seconds:g} s")
    print("done to them:", dict(tally.acts))
    print("ends:        ", dict(tally.ends))
    print("slowest:     ", f"{tally.slowest_s:.1f} s")
    print("afterwards:  ", left)
    for line in tally.wrong[:20]:
        print("WRONG", line)
    return 0 if is_clean(tally, left) else 1


def is_clean(tally: Tally, left: dict[str, Any]) -> bool:
    """Nobody was told anything wrong, and nothing is left."""
    kinds = ("blocks in use", "sequences", "leases", "requests", "processes")
    return not tally.wrong and not any(left[kind] for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
