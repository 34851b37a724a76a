"""Figures for Prometheus at /metrics.

Two sources: what the routes saw (requests, tokens, time to first token, time between tokens), kept
here; and what the manager knows of the loaded models, read when someone asks. No registry of the
process is touched: each Metrics has its own.

The histograms are plain lists. At 20,000 tokens a second the client library's locks and label
look-ups would be the daemon's largest cost; here an observation is a bisect and two additions.

Owner: the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Seconds. From a cached prompt on a GPU to a long one on a laptop's CPU.
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts per bucket. The last one has no upper bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the format wants them."""
        names = [*map(str, self._bounds), "+Inf"]
        total, found = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found

    @property
    def sum(self) -> float:
        return self._sum


class ModelFigures:
    """What the routes saw of one model."""

    __slots__ = ("finished", "generated_tokens", "inter_token_s", "prompt_tokens", "ttft_s")

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}  # by reason
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.ttft_s = Histogram(TTFT_BUCKETS)
        self.inter_token_s = Histogram(INTER_TOKEN_BUCKETS)


class Metrics:
    """Counts while requests are served; answers a scrape. `loaded` gives the manager's snapshots,
    `counters` its own counts by name (loads, evictions, worker deaths)."""

    def __init__(
        self,
        loaded: Callable[[], Iterable[Any]] = list,
        counters: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._loaded = loaded
        self._counters = counters
        self._figures: dict[str, ModelFigures] = {}
        self._requests: dict[tuple[str, int], int] = {}  # by route and status
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of_model(self, name: str) -> ModelFigures:
        """The figures of the model of this display name; made on first use."""
        return self._figures.setdefault(name, ModelFigures())

    def count_request(self, route: str, status: int) -> None:
        """`route` is the pattern, not the path: a scanner must not grow the table."""
        key = (route, status)
        self._requests[key] = self._requests.get(key, 0) + 1

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the client library for each scrape."""
        yield from self._http()
        yield from self._seen_by_routes()
        yield from self._known_by_manager()
        for name, count in sorted(self._counters().items()):
            counter = CounterMetricFamily(f"llmd_{name}", f"{name.replace('_', ' ')} since start")
            counter.add_metric([], count)
            yield counter

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "llmd_http_requests", "HTTP requests answered", labels=["route", "status"]
        )
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests

    def _seen_by_routes(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "llmd_sequences_finished", "answers ended, by reason", labels=["model", "reason"]
        )
        prompt = CounterMetricFamily(
            "llmd_prompt_tokens", "prompt tokens, the cached ones included", labels=["model"]
        )
        generated = CounterMetricFamily("llmd_generated_tokens", "tokens drawn", labels=["model"])
        ttft = HistogramMetricFamily(
            "llmd_time_to_first_token_seconds", "from request to first token", labels=["model"]
        )
        between = HistogramMetricFamily(
            "llmd_inter_token_seconds", "from one token to the next", labels=["model"]
        )
        for model, figures in sorted(self._figures.items()):
            for reason, count in sorted(figures.finished.items()):
                finished.add_metric([model, reason], count)
            prompt.add_metric([model], figures.prompt_tokens)
            generated.add_metric([model], figures.generated_tokens)
            ttft.add_metric([model], figures.ttft_s.buckets(), figures.ttft_s.sum)
            between.add_metric([model], figures.inter_token_s.buckets(), figures.inter_token_s.sum)
        yield from (finished, prompt, generated, ttft, between)

    def _known_by_manager(self) -> Iterator[Metric]:
        rows = [(loaded.manifest.name.display, loaded) for loaded in self._loaded()]
        gauges: list[tuple[str, str, Callable[[Any], float]]] = [
            ("running_sequences", "sequences in the running batch", lambda m: m.stats.running),
            ("waiting_sequences", "sequences that wait", lambda m: m.stats.waiting),
            ("kv_blocks_used", "KV blocks a sequence holds", lambda m: m.stats.blocks_in_use),
            ("kv_blocks_cached", "idle KV blocks, known prefix", lambda m: m.stats.blocks_cached),
            ("kv_blocks_free", "blank KV blocks", lambda m: m.stats.blocks_free),
            ("kv_blocks_total", "KV blocks the budget allows", lambda m: m.stats.blocks_total),
            ("kv_bytes", "KV memory committed", lambda m: m.stats.kv_bytes),
            ("model_bytes", "memory of the loaded model", lambda m: m.size),
            ("tokens_per_second", "tokens drawn lately", lambda m: m.stats.tokens_per_s),
        ]
        for name, help_text, value_of in gauges:
            gauge = GaugeMetricFamily(f"llmd_{name}", help_text, labels=["model"])
            for model, loaded in rows:
                gauge.add_metric([model], value_of(loaded))
            yield gauge
        for name, help_text in (
            ("cached_tokens", "prompt tokens taken from the prefix cache"),
            ("preemptions", "sequences that lost their blocks and ran again"),
            ("blocks_left_behind", "KV blocks given back because a window had passed them"),
        ):
            counter = CounterMetricFamily(f"llmd_{name}", help_text, labels=["model"])
            for model, loaded in rows:
                counter.add_metric([model], getattr(loaded.stats, name))
            yield counter
