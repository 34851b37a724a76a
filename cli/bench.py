"""`llmd bench`: what a person does to understand a serving engine, in one command.

    single stream      first token, tokens per second, gaps between tokens
    1, 4, 16 streams   the same, all at once: what a stream loses and what the machine gains
    shared prefix      a long prompt cold, again with another question, again with another first
                       line: only what is equal from the first token on is found again
    second by second   running, waiting and KV blocks in use while clients come, ask and go

Everything is asked over HTTP, as any client would; nothing is taken from inside the daemon. Prompts
begin with a number of their own, so that nothing is warm by accident.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .client import ApiError, Client, Json, Unreachable

PROMPT_WORDS = 60
PREFIX_WORDS = 900
SAMPLE_S = 1.0  # the series' step; the worker's own figures are four times as fresh
WORDS = (
    "time people way water number first part place work week case point company group problem fact "
    "house world area money story month right study book word business side kind head service"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer, as its client saw it."""

    asked_at: float
    token_at: tuple[float, ...]  # of each line with text
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def first_s(self) -> float:
        """From asking to the first text."""
        return self.token_at[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        """Between one line with text and the next."""
        return [b - a for a, b in zip(self.token_at, self.token_at[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's own view at one moment."""

    at: float
    running: int
    waiting: int
    blocks_in_use: int
    blocks_cached: int
    blocks_total: int


@dataclass(frozen=True, slots=True)
class Level:
    """So many streams at once."""

    num_streams: int
    streams: list[Stream]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(stream.num_tokens for stream in self.streams) / self.seconds


@dataclass(frozen=True, slots=True)
class Prefix:
    """Three readings of one long prompt."""

    cold: Stream
    warm: Stream
    changed: Stream


class Bench:
    """Asks one model of one daemon."""

    def __init__(
        self,
        client: Client,
        model: str,
        num_tokens: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._model = model
        self._num_tokens = num_tokens
        self._rng = random.Random(seed)
        self._clock = clock

    def load(self) -> float:
        """Seconds until the model is there. Raises ApiError, Unreachable."""
        began = self._clock()
        for _ in self._client.stream("/api/generate", {"model": self._model}):
            pass
        return self._clock() - began

    def level(self, num_streams: int) -> Level:
        """So many streams at once."""
        prompts = [self._prompt(PROMPT_WORDS) for _ in range(num_streams)]
        began = self._clock()
        with ThreadPoolExecutor(num_streams) as pool:
            streams = list(pool.map(self._ask, prompts))
        return Level(num_streams, streams, self._clock() - began)

    def series(self, num_clients: int, seconds: float) -> list[Sample]:
        """Clients come one after the other in the first half, and ask again until time is up."""
        done = threading.Event()
        samples: list[Sample] = []
        watcher = threading.Thread(target=self._watch, args=(done, samples), name="watch")
        watcher.start()
        try:
            with ThreadPoolExecutor(num_clients) as pool:
                delays = [seconds / 2 * index / num_clients for index in range(num_clients)]
                list(pool.map(lambda delay: self._visit(done, delay, seconds), delays))
        finally:
            done.set()
            watcher.join()
        return samples

    def _visit(self, done: threading.Event, delay_s: float, until_s: float) -> None:
        began = self._clock()
        done.wait(delay_s)
        while self._clock() - began < until_s:
            self._ask(self._prompt(PROMPT_WORDS))

    def prefix(self) -> Prefix:
        """One long text: new, with another question behind it, with another line before it."""
        text = self._prompt(PREFIX_WORDS)
        questions = [self._prompt(8) for _ in range(3)]
        return Prefix(
            cold=self._ask(f"{text}\n{questions[0]}", 4),
            warm=self._ask(f"{text}\n{questions[1]}", 4),
            changed=self._ask(f"It is {self._prompt(2)} o'clock.\n{text}\n{questions[2]}", 4),
        )

    def _prompt(self, num_words: int) -> str:
        number = self._rng.randrange(10**9)
        return f"{number} " + " ".join(self._rng.choice(WORDS.split()) for _ in range(num_words))

    def _ask(self, prompt: str, num_tokens: int = 0) -> Stream:
        body: Json = {
            "model": self._model,
            "prompt": prompt,
            "raw": True,
            "options": {"num_predict": num_tokens or self._num_tokens, "temperature": 0},
        }
        asked_at = self._clock()
        token_at: list[float] = []
        last: Json = {}
        for last in self._client.stream("/api/generate", body):
            if last.get("response"):
                token_at.append(self._clock())
        return Stream(
            asked_at,
            tuple(token_at or [self._clock()]),
            int(last.get("eval_count", 0)),
            int(last.get("prompt_eval_count", 0)),
            int(last.get("llmd", {}).get("cached_tokens", 0)),
        )

    def _watch(self, done: threading.Event, samples: list[Sample]) -> None:
        while True:
            sample = self._sample()
            if sample is not None:
                samples.append(sample)
            if done.wait(SAMPLE_S):
                return

    def _sample(self) -> Sample | None:
        try:
            models: Sequence[Json] = self._client.get("/api/ps", SAMPLE_S)["models"]
        except (ApiError, Unreachable, KeyError):
            return None  # a second is missing; the streams themselves will say what is wrong
        for model in models:
            kv = model.get("kv")
            if kv and self._model in (model.get("name"), str(model.get("name")).split(":")[0]):
                return Sample(
                    self._clock(),
                    int(model.get("running", 0)),
                    int(model.get("waiting", 0)),
                    int(kv["blocks_in_use"]),
                    int(kv["blocks_cached"]),
                    int(kv["blocks_total"]),
                )
        return None
