"""A worker without a model, for tests of the daemon's core: deterministic tokens at a set speed.

Token i of a sequence is a hash of its prompt, its seed and i, so that a resumed sequence can be
told from a wrong one. What it does besides is set per model name by FAKE_WORKER, a JSON object:

    {"slow": {"load_s": 1, "token_s": 0.02}, "broken": {"fail": ["bad_model", "no weights"]}}

    load_s, token_s, rss_bytes   how long a load and a token take, what Stats reports
    fail [code, text]            the load fails in words
    die_in_load text             the load writes this to the log and exits
and by the prompt:
    DIE n      exits after n tokens unless the sequence was resumed;  DIE! n  always
    STUMBLE n  exits after n tokens of its own
    HANG n     the whole process falls silent after n tokens, unless resumed
    LONG n     n tokens; any other prompt gets 16
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from typing import Any

from llmd.backend import protocol
from llmd.backend.protocol import (
    Cancel,
    Delta,
    Embed,
    Embedded,
    Failed,
    Finished,
    Generate,
    Load,
    Loading,
    Ready,
    Shutdown,
    Started,
    Stats,
    Step,
    Tokenize,
    Tokenized,
)

WEIGHTS_BYTES = 1_000_000


def token(prompt: str, seed: int, index: int) -> int:
    raw = hashlib.sha256(f"{prompt}/{seed}/{index}".encode()).digest()
    return int.from_bytes(raw[:2], "big")


def text_of(ids: list[int]) -> str:
    return "".join(f"w{id} " for id in ids)


def expected_text(prompt: str, seed: int, count: int = 16) -> str:
    """What an undisturbed run answers."""
    return text_of([token(prompt, seed, index) for index in range(count)])


class Sequence:
    def __init__(self, request: Generate, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.prompt = request.prompt or (
            str(request.messages[-1]["content"]) if request.messages else ""
        )
        command, _, rest = self.prompt.partition(" ")
        self.command = command
        has_number = command in ("DIE", "DIE!", "HANG", "LONG", "STUMBLE")
        self.number = int(rest.split()[0]) if has_number else 0
        wanted = self.number if command == "LONG" else 16
        self.length = min(wanted, request.max_tokens or wanted)
        self.ids = list(request.output_ids)
        self.is_resumed = bool(request.output_ids)

    def step(self) -> Delta:
        new = [token(self.prompt, self.seed, len(self.ids))]
        if self.is_resumed and len(self.ids) == len(self.request.output_ids):
            new = [*self.ids, *new]  # told from the first token
            self.ids = []
        self.ids += new
        is_last = len(self.ids) >= self.length
        finished = (
            Finished("length", num_prompt_tokens=3, num_output_tokens=len(self.ids))
            if is_last
            else None
        )
        return Delta(self.request.id, text_of(new), token_ids=new, finished=finished)


class FakeWorker:
    def __init__(self) -> None:
        self.inbox: queue.Queue[protocol.Request | None] = queue.Queue()
        self.running: dict[str, Sequence] = {}
        self.behaviour: dict[str, Any] = {}
        self.num_steps = 0
        self.num_started = 0
        self.deadline: float | None = None
        self.stats_at = 0.0

    def read(self) -> None:
        for line in sys.stdin.buffer:
            self.inbox.put(protocol.decode_request(line))
        os._exit(0)

    def send(self, event: protocol.Event) -> None:
        sys.stdout.buffer.write(protocol.encode(event))
        sys.stdout.buffer.flush()

    def load(self, load: Load) -> None:
        self.behaviour = json.loads(os.environ.get("FAKE_WORKER", "{}")).get(
            load.name.split(":")[0], {}
        )
        print(f"loading {load.name}", file=sys.stderr, flush=True)
        if "die_in_load" in self.behaviour:
            print(self.behaviour["die_in_load"], file=sys.stderr, flush=True)
            os._exit(3)
        for quarter in range(4):
            self.send(Loading(quarter / 4, "reading weights"))
            time.sleep(self.behaviour.get("load_s", 0) / 4)
        if "fail" in self.behaviour:
            self.send(Failed(None, *self.behaviour["fail"]))
            os._exit(1)
        self.send(self.stats())
        layers = {part.device: part.num_layers for part in load.parts}
        on_gpus = sum(count for device, count in layers.items() if device != "cpu")
        vram_bytes = WEIGHTS_BYTES * on_gpus // max(sum(layers.values()), 1)
        self.send(Ready(2048, 2048, 16, 100, 4096, WEIGHTS_BYTES, vram_bytes))

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            blocks_total=100,
            blocks_in_use=sum(1 + len(seq.ids) // 16 for seq in self.running.values()),
            steps=self.num_steps,
            rss_bytes=self.behaviour.get("rss_bytes", WEIGHTS_BYTES),
        )

    def serve(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        while True:
            now = time.monotonic()
            if now > self.stats_at:
                self.stats_at = now + 0.5
                self.send(self.stats())
            timeout = self.behaviour.get("token_s", 0.001) if self.running else 0.5
            try:
                request = self.inbox.get(timeout=timeout)
            except queue.Empty:
                self.step()
                continue
            if request is not None:
                self.take(request)

    def take(self, request: protocol.Request) -> None:
        if isinstance(request, Load):
            self.load(request)
        elif isinstance(request, Generate):
            self.num_started += 1
            seed = request.sampling.seed
            sequence = Sequence(request, self.num_started + os.getpid() if seed is None else seed)
            self.running[request.id] = sequence
            self.send(Started(request.id, [1, 2, 3], sequence.seed, 100, 2048))
        elif isinstance(request, Cancel):
            self.end([request.id])
        elif isinstance(request, Embed):
            if request.texts == ["DIE"]:
                os._exit(3)
            self.send(Embedded(request.id, [[1.0, 0.0] for _ in request.texts], 1))
        elif isinstance(request, Tokenize):
            self.send(Tokenized(request.id, [1, 2, 3], request.text or ""))
        elif isinstance(request, Shutdown):
            self.deadline = time.monotonic() + request.drain_s
            self.end_if_drained()

    def step(self) -> None:
        self.end_if_drained()
        if not self.running:
            return
        for sequence in self.running.values():
            self.misbehave(sequence)
        self.num_steps += 1
        deltas = [sequence.step() for sequence in self.running.values()]
        for delta in deltas:
            if delta.finished:
                del self.running[delta.id]
        self.send(Step(deltas, self.stats()))

    def misbehave(self, sequence: Sequence) -> None:
        num_own = len(sequence.ids) - len(sequence.request.output_ids)
        if sequence.command == "STUMBLE" and num_own >= sequence.number:
            os._exit(3)
        if len(sequence.ids) < sequence.number or sequence.command not in ("DIE", "DIE!", "HANG"):
            return
        if sequence.command == "DIE!" or not sequence.is_resumed:
            print(f"{sequence.command} after {len(sequence.ids)}", file=sys.stderr, flush=True)
            if sequence.command != "HANG":
                os._exit(3)
            time.sleep(3600)

    def end(self, ids: list[str]) -> None:
        deltas = [
            Delta(
                id,
                finished=Finished(
                    "abort", num_prompt_tokens=3, num_output_tokens=len(sequence.ids)
                ),
            )
            for id in ids
            if (sequence := self.running.pop(id, None)) is not None
        ]
        self.send(Step(deltas, self.stats()))

    def end_if_drained(self) -> None:
        if self.deadline is None:
            return
        if time.monotonic() >= self.deadline:
            self.end(list(self.running))
        if not self.running:
            os._exit(0)


if __name__ == "__main__":
    FakeWorker().serve()
