"""A worker process without a model: it does what the prompt says.

The last message, or the prompt, is its script:

    SCRIPT [{"text": "He"}, {"sleep_s": 0.1}, {"text": "y", "finished": {"reason": "stop"}}]
    ECHO            answers with the Generate message it got, as JSON
    FAIL code text  fails before the first token
    HANG            starts, and then nothing comes until it is cancelled
    DIE             one delta, then the process is gone
    COUNT n         n tokens, as fast as they can be written, one line each
    anything else   "Hello wörld 👋", in four deltas

Run as `python scripted_worker.py`; speaks backend/protocol.py on stdin and stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgspec

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

HELLO = [{"text": "He"}, {"text": "llo"}, {"text": " wörld"}, {"text": " 👋"}]


def send(event: protocol.Event) -> None:
    sys.stdout.buffer.write(protocol.encode(event))
    sys.stdout.buffer.flush()


class ScriptedWorker:
    def __init__(self) -> None:
        self.running: dict[str, asyncio.Task[None]] = {}
        self.num_cancelled = 0

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=2**28)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
        )
        beat = asyncio.create_task(self.beat())
        async for line in reader:
            self.take(protocol.decode_request(line))
        beat.cancel()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            send(self.stats())

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            blocks_total=100,
            blocks_in_use=3 * len(self.running),
            blocks_cached=7,
            blocks_free=93 - 3 * len(self.running),
            kv_bytes=4096,
            preemptions=self.num_cancelled,  # so that tests can see that a Cancel came
        )

    def take(self, request: protocol.Request) -> None:
        if isinstance(request, Load):
            send(Loading(0.5, "reading weights"))
            send(Ready(2048, 2048, 16, 100, 4096, 1_000_000, block_groups=3, vocab_size=1000))
        elif isinstance(request, Generate):
            self.running[request.id] = asyncio.create_task(self.answer(request))
            send(self.stats())
        elif isinstance(request, Cancel):
            task = self.running.pop(request.id, None)
            if task is not None:
                task.cancel()
                self.num_cancelled += 1
                send(Step([Delta(request.id, finished=Finished("abort"))], self.stats()))
        elif isinstance(request, Embed):
            self.embed(request)
        elif isinstance(request, Tokenize):
            text = request.text or " ".join(str(m["content"]) for m in request.messages or ())
            ids = request.token_ids or [len(word) for word in text.split()]
            send(Tokenized(request.id, ids, request.text or " ".join(map(str, ids))))
        elif isinstance(request, Shutdown):
            os._exit(0)

    def embed(self, request: Embed) -> None:
        if any("too long" in text for text in request.texts) and not request.truncate:
            send(Failed(request.id, "too_long", "the input length exceeds the context length"))
            return
        size = request.dimensions or 4
        vectors = [
            [1.0 if i == len(text) % size else 0.0 for i in range(size)] for text in request.texts
        ]
        send(Embedded(request.id, vectors, sum(len(text.split()) for text in request.texts)))

    async def answer(self, request: Generate) -> None:
        script = _script_of(request)
        command, _, rest = script.partition(" ")
        if command == "FAIL":
            code, _, text = rest.partition(" ")
            self.running.pop(request.id)
            send(Failed(request.id, code, text))
            return
        prompt_ids = [1, *(len(word) for word in script.split())][:50]
        truncated = 5 if request.num_ctx == 4 else 0
        send(
            Started(
                request.id,
                prompt_ids,
                7,
                100,
                2048,
                truncated_tokens=truncated,
                rendered=f"<user>{script}" if request.render_only else "",
            )
        )
        deltas: list[dict[str, Any]] = HELLO
        if request.render_only:
            deltas = []
        elif command == "SCRIPT":
            deltas = json.loads(rest)
        elif command == "ECHO":
            deltas = [{"text": msgspec.json.encode(request).decode()}]
        elif command == "COUNT":
            deltas = [{"text": f"{number} "} for number in range(int(rest))]
        elif command == "HANG":
            await asyncio.sleep(3600)
        elif command == "DIE":
            send(Step([Delta(request.id, text="last words")]))
            os._exit(3)
        await self.play(request, deltas, len(prompt_ids))

    async def play(
        self, request: Generate, deltas: list[dict[str, Any]], num_prompt_tokens: int
    ) -> None:
        num_tokens = 0
        finished: dict[str, Any] = {"reason": "stop"}
        for entry in deltas:
            fields = dict(entry)
            await asyncio.sleep(fields.pop("sleep_s", 0))
            finished = fields.pop("finished", finished)
            if fields:
                ids = fields.pop("token_ids", [100 + num_tokens])
                num_tokens += len(ids)
                delta = {"id": request.id, "token_ids": ids, **fields}
                send(Step([msgspec.convert(delta, Delta)]))
        figures = {
            "num_prompt_tokens": num_prompt_tokens,
            "num_output_tokens": num_tokens,
            "prefill_s": 0.5,
            "decode_s": 0.25,
            **finished,
        }
        self.running.pop(request.id)
        end = Delta(request.id, finished=msgspec.convert(figures, Finished))
        send(Step([end], self.stats()))


def _script_of(request: Generate) -> str:
    if request.messages:
        return str(request.messages[-1]["content"])
    return request.prompt or ""


if __name__ == "__main__":
    asyncio.run(ScriptedWorker().serve())
