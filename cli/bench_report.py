"""What `llmd bench` prints: tables, and a plot of one character a second."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .bench import Bench, Level, Prefix, Sample
from .client import Client
from .errors import CommandFailed
from .tables import table

BARS = " ▁▂▃▄▅▆▇█"
MAX_STREAMS = 512  # each is a thread here
PLOT_ROWS = 4
PLOT_WIDTH = 72


def run_bench(
    client: Client, model: str, streams: str, num_tokens: int, seconds: float, seed: int | None
) -> None:
    """Measure and print, part by part. Raises CommandFailed, ApiError, Unreachable."""
    counts = read_counts(streams)
    bench = Bench(client, model, num_tokens, random.randrange(2**32) if seed is None else seed)
    print(f"{model}: ready after {bench.load():.1f} s")
    bench.level(1)  # what the first answer pays for once is not measured
    levels = []
    for count in counts:
        levels.append(bench.level(count))
    print(f"\n{levels_table(levels)}\n")
    print(f"{prefix_table(bench.prefix())}\n")
    if seconds:
        samples = bench.series(max(counts), seconds)
        print(f"{series_table(samples)}\n")
        print(plot("running", [sample.running for sample in samples]))
        print(plot("waiting", [sample.waiting for sample in samples]))
        print(plot("KV blocks in use", [sample.blocks_in_use for sample in samples]))


def read_counts(text: str) -> list[int]:
    """`1,4,16`. Raises CommandFailed."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= MAX_STREAMS for count in counts):
        raise CommandFailed(
            f"--streams wants numbers from 1 to {MAX_STREAMS} with commas between, not '{text}'"
        )
    return counts


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def ms(seconds: float) -> str:
    """`7.4 ms`, `120 ms`."""
    value = seconds * 1000
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def levels_table(levels: Sequence[Level]) -> str:
    """A row for each number of streams."""
    rows = []
    for level in levels:
        gaps = [gap for stream in level.streams for gap in stream.gaps_s]
        first = [stream.first_s for stream in level.streams]
        per_stream = [
            (stream.num_tokens - 1) / (stream.token_at[-1] - stream.token_at[0])
            for stream in level.streams
            if stream.token_at[-1] > stream.token_at[0]
        ]
        rows.append(
            (
                str(level.num_streams),
                f"{level.tokens_per_s:.1f}",
                f"{percentile(per_stream, 0.5):.1f}",
                ms(percentile(first, 0.5)),
                ms(percentile(first, 0.99)),
                ms(percentile(gaps, 0.5)),
                ms(percentile(gaps, 0.99)),
            )
        )
    header = (
        "STREAMS",
        "TOKENS/S",
        "EACH",
        "FIRST TOKEN",
        "WORST",
        "GAP",
        "GAP P99",
    )
    return table(header, rows)


def prefix_table(prefix: Prefix) -> str:
    """How much of a long prompt is found again."""
    rows = []
    for name, stream in (
        ("new", prefix.cold),
        ("same text, other question", prefix.warm),
        ("other first line", prefix.changed),
    ):
        rows.append(
            (
                name,
                str(stream.num_prompt_tokens),
                str(stream.num_cached_tokens),
                ms(stream.first_s),
                f"{stream.first_s / prefix.cold.first_s:.0%}",
            )
        )
    return table(("LONG PROMPT", "TOKENS", "FOUND", "FIRST TOKEN", "OF NEW"), rows)


def series_table(samples: Sequence[Sample]) -> str:
    """Second by second."""
    rows = []
    for sample in samples:
        share = sample.blocks_in_use / sample.blocks_total if sample.blocks_total else 0.0
        rows.append(
            (
                f"{sample.at - samples[0].at:.0f}",
                str(sample.running),
                str(sample.waiting),
                f"{sample.blocks_in_use} ({share:.0%})",
                str(sample.blocks_cached),
            )
        )
    return table(("SECOND", "RUNNING", "WAITING", "KV BLOCKS", "CACHED"), rows)


def plot(title: str, values: Sequence[float]) -> str:
    """Columns of eighths of a character, as high as the highest value; at most PLOT_WIDTH wide."""
    if not values:
        return f"{title}: no figures"
    values = _narrowed(values)
    top = max(values)
    rows = []
    for row in range(PLOT_ROWS, 0, -1):
        label = f"{top:g}" if row == PLOT_ROWS else "0" if row == 1 else ""
        cells = "".join(_bar(value / top if top else 0.0, row) for value in values)
        rows.append(f"{label:>8} │{cells}")
    return "\n".join([title, *rows, " " * 9 + "└" + "─" * len(values)])


def _bar(share: float, row: int) -> str:
    eighths = round(share * PLOT_ROWS * 8) - (row - 1) * 8
    return BARS[max(0, min(eighths, 8))]


def _narrowed(values: Sequence[float]) -> Sequence[float]:
    """The highest of each group of neighbours, so that a peak is not lost."""
    size = -(-len(values) // PLOT_WIDTH)
    return [max(values[start : start + size]) for start in range(0, len(values), size)]
