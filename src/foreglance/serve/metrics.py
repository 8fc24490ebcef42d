"""Prometheus metrics of one server. Counts what is reported to it; asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from foreglance import __version__
from foreglance.request import Result

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str, running: Callable[[], int], waiting: Callable[[], int], kept: Callable[[], int]):
        self._registry = registry = CollectorRegistry()

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"foreglance_{name}", words, labels, registry=registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"foreglance_{name}", words, buckets=buckets, registry=registry)

        def gauge(name: str, words: str, value: Callable[[], int]) -> None:
            Gauge(f"foreglance_{name}", words, registry=registry).set_function(value)

        self._answers = counter("answers", "Answers ended, by how", "finish_reason")
        self._refusals = counter("refusals", "Requests refused, by HTTP status", "status")
        self._prompt = counter("prompt_tokens", "Prompt rows computed")
        self._cached = counter("prompt_tokens_cached", "Prompt rows that were reused")
        self._image_rows = counter("image_rows", "Image rows in prompts")
        self._tokens = counter("tokens", "Tokens generated")
        self._steps = counter("decode_steps", "Steps of the target after the first token, summed over answers")
        self._drafted = counter("draft_tokens", "Drafts that were verified, by depth", "depth")
        self._accepted = counter("draft_tokens_accepted", "Drafts that stood, by depth", "depth")
        self._first = histogram("first_token_seconds", "From acceptance of a request to its first token", SECONDS)
        self._between = histogram("token_seconds", "Mean time between the tokens of an answer", TOKEN_SECONDS)
        gauge("requests_running", "Sequences in a slot", running)
        gauge("requests_waiting", "Sequences that wait for a slot", waiting)
        gauge("prefix_cache_bytes", "Memory that rows kept for later requests take", kept)
        Info("foreglance_build", "What is served", registry=registry).info({"version": __version__, "model": model})

    def ended(self, result: Result) -> None:
        """An answer ended, in whatever way."""
        t = result.timings
        self._answers.labels(result.finish_reason).inc()
        if not t.num_tokens:
            return
        self._prompt.inc(t.prompt_tokens - t.cached_rows)
        self._cached.inc(t.cached_rows)
        self._image_rows.inc(t.image_rows)
        self._tokens.inc(t.num_tokens)
        self._steps.inc(t.steps)
        for depth, (drafted, accepted) in enumerate(zip(t.drafted, t.accepted, strict=True), 1):
            self._drafted.labels(depth).inc(drafted)
            self._accepted.labels(depth).inc(accepted)
        self._first.observe(t.ttft_ms / 1e3)
        if t.tokens_per_second:
            self._between.observe(1 / t.tokens_per_second)

    def lost(self, count: int) -> None:
        """Answers ended without a result: their client left, or the engine stopped."""
        self._answers.labels("lost").inc(count)

    def refused(self, status: int) -> None:
        self._refusals.labels(status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Collected:
    """Metrics as they were read."""

    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def merged(texts: Iterable[tuple[str, str]]) -> bytes:
    """Metrics of several servers as one text: (name, its text) each; a label `replica` says whose a sample is."""
    metrics: dict[str, Metric] = {}
    for replica, text in texts:
        for read in text_string_to_metric_families(text):
            into = metrics.setdefault(read.name, Metric(read.name, read.documentation, read.type))
            into.samples += [one._replace(labels={"replica": replica, **one.labels}) for one in read.samples]
    registry = CollectorRegistry()
    registry.register(_Collected(metrics.values()))
    return generate_latest(registry)
