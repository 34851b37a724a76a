"""`llmd bench` against a loopback daemon, and what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.cli.bench import Level, Prefix, Sample, Stream
from llmd.cli.bench_report import (
    PLOT_WIDTH,
    levels_table,
    percentile,
    plot,
    prefix_table,
    series_table,
)

from .fake_daemon import FakeDaemon, Refusal, llmd

KV = {"blocks_in_use": 5, "blocks_cached": 1, "blocks_total": 50}


def stream(first_s: float, gap_s: float, count: int = 5, cached: int = 0) -> Stream:
    times = tuple(first_s + gap_s * index for index in range(count))
    return Stream(0.0, times, count, 1000, cached)


def test_the_whole_command_tells_its_four_parts(fake: FakeDaemon, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(body.get("options", {}).get("num_predict", 0)):
            yield {"response": "x", "done": False}
        yield {"response": "", "done": True, "eval_count": 4, "prompt_eval_count": 70}

    fake.answers["POST /api/generate"] = answer
    fake.answers["GET /api/ps"] = {
        "models": [{"name": "m:latest", "running": 2, "waiting": 1, "kv": KV}]
    }
    arguments = ["bench", "m", "--streams", "1,3", "--tokens", "4", "--seconds", "0.2"]
    result = llmd(*arguments, "--seed", "7", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("STREAMS", "LONG PROMPT", "SECOND", "KV blocks in use"):
        assert part in result.stdout
    assert "5 (10%)" in result.stdout
    bodies = fake.bodies("POST /api/generate")
    assert bodies[0] == {"model": "m"}, "the model is loaded first"
    texts = [body["prompt"] for body in bodies[1:]]
    assert len(set(texts)) == len(texts), "no prompt is warm by accident"


def test_an_unknown_model_is_one_line_and_exit_code_1(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = Refusal(404, "model 'm' not found")
    result = llmd("bench", "m", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stderr) == (1, "Error: model 'm' not found\n")


@pytest.mark.parametrize("streams", ["0", "x", "1,,2", "600", ""])
def test_nonsense_for_streams_is_told(fake: FakeDaemon, tmp_path: Path, streams: str) -> None:
    result = llmd("bench", "m", "--streams", streams, environ=fake.environ(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("Error: --streams wants numbers from 1 to 512")
    assert fake.bodies("POST /api/generate") == []


def test_a_level_is_told_by_its_streams() -> None:
    levels = [Level(2, [stream(0.1, 0.01), stream(0.3, 0.02)], seconds=0.5)]
    header, row = levels_table(levels).splitlines()
    cells = dict(zip([h for h in header.split("  ") if h], row.split("  "), strict=False))
    assert "20.0" in row, "ten tokens in half a second"
    assert "300 ms" in row and "20.0 ms" in row, cells


def test_a_prefix_is_told_against_the_new_one() -> None:
    told = prefix_table(Prefix(stream(1.0, 0.1), stream(0.05, 0.1, cached=960), stream(0.9, 0.1)))
    lines = told.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["100%", "5%", "90%"]
    assert " 960 " in lines[2]


def test_a_plot_is_as_high_as_its_highest_and_no_wider_than_a_screen() -> None:
    rising = plot("kv", [0, 1, 2, 4]).splitlines()
    assert rising[0] == "kv"
    assert rising[1].endswith("│   █") and rising[1].strip().startswith("4")
    assert rising[4].endswith("│ ███")
    wide = plot("kv", list(range(500)))
    assert max(map(len, wide.splitlines())) <= PLOT_WIDTH + 10
    assert plot("kv", []) == "kv: no figures"
    assert "█" not in plot("kv", [0, 0])


def test_a_series_counts_its_seconds() -> None:
    samples = [Sample(10.0 + i, i, 0, i * 5, 2, 50) for i in range(3)]
    rows = series_table(samples).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert "10 (20%)" in rows[2]


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 5.0]
    assert percentile([], 0.5) == 0.0
    assert all(percentile(values, tenth / 10) in values for tenth in range(10))
