"""Real worker processes that die, hang, fall silent and come back, under a real manager."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmd.backend.protocol import Delta, Embed, Generate, Load, SamplingParams, Started
from llmd.daemon.errors import DiedInLoad, LoadFailed, NoMemory, WorkerDied
from llmd.daemon.lease import Lease
from llmd.daemon.listener import Listener
from llmd.daemon.moment import Moment
from llmd.daemon.worker_process import WorkerProcess
from llmd.registry.names import ModelName

from ..fake_worker import expected_text
from .manager_stage import FAKE_COMMAND, RealStage

MODEL = ModelName.parse("plain")


def request(prompt: str, seed: int = 7) -> Generate:
    return Generate("", prompt=prompt, sampling=SamplingParams(seed=seed))


async def text_of(
    lease: Lease, prompt: str, seed: int = 7, on_delta: Callable[[int], None] = lambda num: None
) -> str:
    parts: list[str] = []
    num_tokens = 0
    async for answer in lease.generate(request(prompt, seed)):
        if isinstance(answer, Delta):
            parts.append(answer.text)
            num_tokens += len(answer.token_ids)
            on_delta(num_tokens)
    return "".join(parts)


async def until(holds: Callable[[], bool]) -> None:
    """Whoever calls this is under a time limit."""
    while not holds():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


def staged(
    root: Path, work: Callable[[RealStage], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run with real processes; none is left at the end."""

    async def run() -> None:
        stage = RealStage(root, ["plain", "caller"], **options)
        try:
            await work(stage)
        finally:
            await stage.close()

    asyncio.run(asyncio.wait_for(run(), 250))


def behave(monkeypatch: pytest.MonkeyPatch, **behaviour: Any) -> None:
    monkeypatch.setenv("FAKE_WORKER", json.dumps({"plain": behaviour}))


def test_a_stream_goes_on_at_the_exact_token_when_its_worker_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, token_s=0.002)
    draw = random.Random(1)

    async def work(stage: RealStage) -> None:
        for round in range(6):
            victim, at = draw.randrange(8), draw.randrange(1, 60)

            killed: list[int] = []

            def kill(num_tokens: int, at: int = at, killed: list[int] = killed) -> None:
                if num_tokens >= at and not killed:
                    killed.append(num_tokens)
                    stage.signal(signal.SIGKILL)

            prompts = [f"LONG 60 {round}/{index}" for index in range(8)]
            async with stage.manager.lease(MODEL) as lease:
                texts = await asyncio.gather(
                    *(
                        text_of(lease, prompt, 7, kill if index == victim else lambda num: None)
                        for index, prompt in enumerate(prompts)
                    )
                )
            assert killed
            assert texts == [expected_text(prompt, 7, 60) for prompt in prompts]
            stage.manager._hold_off._deaths.clear()  # each round is a day of its own
        assert len(stage.workers) == 7

    staged(tmp_path, work)


def test_a_sequence_without_a_seed_keeps_the_one_it_was_given(tmp_path: Path) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            seed, text = 0, ""
            async for answer in lease.generate(Generate("", prompt="DIE 5")):
                if isinstance(answer, Delta):
                    text += answer.text
                else:
                    seed = answer.seed
        assert text == expected_text("DIE 5", seed)
        assert len(stage.workers) == 2

    staged(tmp_path, work)


def test_a_stopped_worker_is_replaced_and_its_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, token_s=0.01)

    async def work(stage: RealStage) -> None:
        stopped_at: list[int] = []

        def stop(num_tokens: int) -> None:
            if num_tokens >= 10 and not stopped_at:
                stopped_at.append(num_tokens)
                stage.signal(signal.SIGSTOP)

        async with stage.manager.lease(MODEL) as lease:
            text = await text_of(lease, "LONG 40", on_delta=stop)
        assert text == expected_text("LONG 40", 7, 40)
        assert "no sign of life" in stage.manager.history()[-2].reason

    staged(tmp_path, work)


def test_a_worker_that_falls_silent_is_replaced(tmp_path: Path) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            assert await text_of(lease, "HANG 3") == expected_text("HANG 3", 7)

    staged(tmp_path, work, silence_s=1.5)


def test_a_request_that_kills_two_workers_fails_with_their_last_words_and_others_go_on(
    tmp_path: Path,
) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            with pytest.raises(WorkerDied, match=r"exit code 3.*DIE! after 2"):
                await text_of(lease, "DIE! 2")
        async with stage.manager.lease(MODEL) as lease:
            assert await text_of(lease, "hello") == expected_text("hello", 7)

    staged(tmp_path, work)


def test_a_request_that_gets_on_survives_more_than_one_death(tmp_path: Path) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            assert await text_of(lease, "STUMBLE 6") == expected_text("STUMBLE 6", 7)
        assert len(stage.workers) == 3

    staged(tmp_path, work)


def test_an_embedding_is_asked_for_once_more_when_the_worker_dies(tmp_path: Path) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            stage.signal(signal.SIGKILL)
            assert (await lease.embed(Embed("", ["x"]))).vectors == [[1.0, 0.0]]
            assert len(stage.workers) == 2
            with pytest.raises(WorkerDied):
                await lease.embed(Embed("", ["DIE"]))
        assert len(stage.workers) == 3

    staged(tmp_path, work)


def test_a_reader_that_leaves_frees_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, token_s=0.01)

    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            stream = lease.generate(request("LONG 2000"))
            async for answer in stream:
                if isinstance(answer, Delta):
                    break
            assert stage.workers[0].stats.running == 1
            await stream.aclose()
            await until(lambda: stage.workers[0].stats.running == 0)
        assert stage.workers[0].stats.blocks_in_use == 0

    staged(tmp_path, work)


def test_a_slow_reader_gets_everything_in_few_pieces(tmp_path: Path) -> None:
    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            text, num_pieces = "", 0
            async for answer in lease.generate(request("LONG 400")):
                await asyncio.sleep(0.05)
                if isinstance(answer, Delta):
                    text += answer.text
                    num_pieces += 1
        assert text == expected_text("LONG 400", 7, 400)
        assert num_pieces < 100

    staged(tmp_path, work)


def test_a_listener_and_its_reader_share_a_stream_in_order_through_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, token_s=0.002)
    draw = random.Random(2)

    async def work(stage: RealStage) -> None:
        parts: list[str] = []
        num_by_way = {"listener": 0, "reader": 0}

        class Half(Listener):
            def write(self, delta: Delta, came: Moment) -> bool:
                if draw.random() < 0.4:
                    return False
                num_by_way["listener"] += 1
                parts.append(delta.text)
                if num_by_way["listener"] == 15:
                    stage.signal(signal.SIGKILL)
                return True

        listener = Half()
        async with stage.manager.lease(MODEL) as lease:
            async for answer in lease.generate(request("LONG 60"), listener):
                if isinstance(answer, Delta):
                    num_by_way["reader"] += 1
                    parts.append(answer.text)
        assert "".join(parts) == expected_text("LONG 60", 7, 60)
        assert min(num_by_way.values()) > 5, num_by_way
        assert listener.num_text == len("".join(parts))
        assert len(listener.token_ids) == 60
        assert len(stage.workers) == 2

    staged(tmp_path, work)


def test_a_listener_that_fails_is_not_asked_again(tmp_path: Path) -> None:
    calls: list[Delta] = []

    class Failing(Listener):
        def write(self, delta: Delta, came: Moment) -> bool:
            calls.append(delta)
            raise ValueError("no way")

    async def work(stage: RealStage) -> None:
        async with stage.manager.lease(MODEL) as lease:
            text = ""
            async for answer in lease.generate(request("LONG 40"), Failing()):
                text += answer.text if isinstance(answer, Delta) else ""
        assert text == expected_text("LONG 40", 7, 40)
        assert len(calls) == 1

    staged(tmp_path, work)


def test_shutdown_lets_answers_end_within_the_time_and_then_ends_them_properly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(monkeypatch, token_s=0.01)

    async def work() -> None:
        worker = await WorkerProcess.start(Load("plain", "0" * 64, []), FAKE_COMMAND)

        num_started = 0
        both_started = asyncio.Event()

        async def reason(prompt: str) -> str:
            nonlocal num_started
            async for answer in worker.generate(request(prompt)):
                if isinstance(answer, Started):
                    num_started += 1
                    if num_started == 2:
                        both_started.set()
                elif answer.finished is not None:
                    return answer.finished.reason
            raise AssertionError("the stream ended without a final delta")

        answers = [asyncio.create_task(reason(f"LONG {num}")) for num in (10, 100000)]
        await both_started.wait()
        await worker.stop(drain_s=2.0)
        assert [await answer for answer in answers] == ["length", "abort"]

    asyncio.run(asyncio.wait_for(work(), 200))


def _failing(command: Awaitable[WorkerProcess]) -> None:
    async def work() -> None:
        await command

    asyncio.run(asyncio.wait_for(work(), 200))


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ({"fail": ["bad_model", "no tensor x"]}, LoadFailed, "^no tensor x$"),
        ({"fail": ["no_memory", "8 GB wanted, 4 GB there"]}, NoMemory, "8 GB wanted"),
        ({"die_in_load": "a bus error"}, DiedInLoad, "exit code 3.*a bus error"),
    ],
)
def test_a_failed_load_says_why(
    monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any], kind: type[Exception], words: str
) -> None:
    behave(monkeypatch, **behaviour)
    with pytest.raises(kind, match=words):
        _failing(WorkerProcess.start(Load("plain", "0" * 64, []), FAKE_COMMAND))


def test_a_load_without_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, load_s=60)
    with pytest.raises(LoadFailed, match="no progress for 1 s"):
        _failing(WorkerProcess.start(Load("plain", "0" * 64, []), FAKE_COMMAND, load_timeout_s=1))
    assert not [p for p in psutil.Process(os.getpid()).children() if "fake_worker" in p.cmdline()]


def test_a_program_that_is_no_worker_is_refused() -> None:
    with pytest.raises(LoadFailed, match="ended unexpectedly"):
        _failing(WorkerProcess.start(Load("plain", "0" * 64, []), ["echo", "hello"]))
