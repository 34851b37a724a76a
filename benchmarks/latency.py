"""How long people wait, on a real daemon with the real model.

    p99       eight streams run, a prompt of 4,000 tokens arrives: the 99th percentile of their
              gaps between tokens from then until its first token, against the median of the same
              gaps, and against the median once it is read: by then their own contexts are as long
    prefix    the first token of a prompt of 1,000 tokens, new, and again with another question

    python -m llmd.benchmarks.latency --out benchmarks/results/latency.md

Tokens that came in one step (drafts) are one arrival. The client is one thread for each stream on
the same machine, so what it costs is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ..registry.pull import pull
from ..registry.store import ModelStore
from ..tests.end_to_end.real_daemon import running_daemon
from ..tests.model_files import smollm2_gguf

NUM_STREAMS = 8
LONG = 4000  # tokens
PREFIX = 1000
WARM_UP = 24  # tokens of each stream before the prompt comes
AFTER_S = 3.0  # the streams go on for so long
ONE_ARRIVAL_S = 0.002  # lines that come within it were sent together
WORDS = (
    "time people way water number first part place work week case point company group problem "
    "fact house world area money story month right study book word business side kind head"
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What eight streams felt, in seconds: gaps before the prompt, while it was read, after."""

    before: list[float]
    during: list[float]
    after: list[float]
    long_first_s: float

    @property
    def p99(self) -> float:
        ordered = sorted(self.during)
        return ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]

    @property
    def row(self) -> str:
        before, during, after = map(statistics.median, (self.before, self.during, self.after))
        medians = " | ".join(f"{median * 1e3:.1f} ms" for median in (before, during, after))
        return (
            f"{medians} | {self.p99 * 1e3:.1f} ms | {self.p99 / during:.2f} "
            f"| {self.p99 / after:.2f} | {self.long_first_s:.2f} s |"
        )


class Asker:
    """A client of one model."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=300)
        self._model = model
        self._rng = random.Random(seed)

    def words(self, count: int) -> str:
        """About one token each, never the same twice."""
        chosen = " ".join(self._rng.choice(WORDS.split()) for _ in range(count))
        return f"{self._rng.randrange(10**9)} {chosen}"

    def lines(self, prompt: str, num_predict: int) -> Iterator[tuple[float, dict[str, Any]]]:
        """(time, object) of each line."""
        options = {"num_predict": num_predict, "temperature": 0, "num_ctx": 8192}
        body = {"model": self._model, "prompt": prompt, "raw": True, "options": options}
        for at, line in self._lines("/api/generate", body):
            yield at, json.loads(line)

    def _lines(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
        with self._client.stream("POST", path, json=body) as response:
            for line in response.iter_lines():
                yield time.monotonic(), line

    def endless(self, prompt: str, stop: threading.Event) -> Iterator[float]:
        """When each token came, until `stop`."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 4000, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "options": {"num_ctx": 8192}}
        for at, line in self._lines("/v1/completions", body):
            if stop.is_set():
                return
            if line.startswith("data: {"):
                yield at

    def first_s(self, prompt: str) -> tuple[float, dict[str, Any]]:
        """Seconds to the first text, and the last object."""
        began = time.monotonic()
        first = 0.0
        last: dict[str, Any] = {}
        for at, line in self.lines(prompt, 2):
            first, last = first or at - began, line
        return first, last

    def crowd(self) -> Crowd:
        """Eight run; one with a long prompt comes."""
        stop, ready = threading.Event(), threading.Barrier(NUM_STREAMS + 1)
        times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        prompts = [self.words(60) for _ in range(NUM_STREAMS)]

        def follow(index: int) -> None:
            for at in self.endless(prompts[index], stop):
                times[index].append(at)
                if len(times[index]) == WARM_UP * 4:
                    ready.wait()

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            followers = [pool.submit(follow, index) for index in range(NUM_STREAMS)]
            ready.wait(120)
            asked_at = time.monotonic()
            first_s, last = self.first_s(self.words(LONG))
            end = asked_at + first_s
            time.sleep(AFTER_S)
            stop.set()
            for follower in followers:
                follower.result()
        assert last["prompt_eval_count"] >= LONG, last
        gaps = [gap for stream in times for gap in _gaps(stream)]
        return Crowd(
            before=[gap for at, gap in gaps if at <= asked_at],
            during=[gap for at, gap in gaps if asked_at < at <= end],
            after=[gap for at, gap in gaps if at > end],
            long_first_s=first_s,
        )


def _gaps(times: list[float]) -> list[tuple[float, float]]:
    """(when, seconds since the arrival before) of one stream, from its warm-up on."""
    arrivals = [b for a, b in itertools.pairwise(times) if b - a > ONE_ARRIVAL_S]
    pairs = zip(arrivals[WARM_UP:], arrivals[WARM_UP + 1 :], strict=False)
    return [(b, b - a) for a, b in pairs]


def measure(asker: Asker, rounds: int) -> list[str]:
    """The tables' rows."""
    asker.first_s(asker.words(40))
    lines = [
        "| round | median gap before | while it is read | after | p99 while it is read "
        "| by the median then | by the median after | its first token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number in range(1, rounds + 1):
        lines.append(f"| {number} | {asker.crowd().row}")
        print(lines[-1], flush=True)
    lines += ["", "| round | new | again | ratio | found of |", "|---|---|---|---|---|"]
    for number in range(1, rounds + 1):
        text = asker.words(PREFIX)
        cold, _ = asker.first_s(f"{text}\n{asker.words(8)}")
        warm, last = asker.first_s(f"{text}\n{asker.words(8)}")
        found = f"{last.get('llmd', {}).get('cached_tokens', 0)} of {last['prompt_eval_count']}"
        lines.append(
            f"| {number} | {cold * 1e3:.0f} ms | {warm * 1e3:.1f} ms | {warm / cold:.1%} "
            f"| {found} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Start a daemon, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        name = asyncio.run(pull(ModelStore(models), str(smollm2_gguf()))).name.display
        with running_daemon(models) as daemon:
            lines = measure(Asker(daemon.url, name, options.seed), options.rounds)
    if options.out:
        title = (
            "# Latency on the CPU\n\n`python -m llmd.benchmarks.latency`: a real daemon, "
            f"SmolLM2-135M-Instruct Q4_1. {NUM_STREAMS} streams and a prompt of {LONG} tokens; "
            f"then a prompt of {PREFIX} tokens, new, and with another question.\n\n"
        )
        options.out.write_text(title + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
