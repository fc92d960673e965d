"""Metrics for Prometheus. Their names are listed in docs/serving.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sbert_infer import __version__
from sbert_infer.serve.history import History
from sbert_infer.serve.logs import lost_lines
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.types import BULK, INTERACTIVE, Observe

_ERROR_KINDS = {
    "OverloadedError": "overloaded",
    "DeadlineError": "deadline",
    "TextError": "text",
    "TruncationError": "too_long",
    "CallTooLargeError": "too_large",
    "WorkerError": "worker",
    "CancelledError": "cancelled",
    "EngineError": "engine",
}
# Six to each power of ten: percentiles are interpolated within them.
_SECONDS = tuple(round(step * 10.0**power, 6) for power in range(-3, 2) for step in (1, 1.5, 2, 3, 5, 7))[:-1]
_TOKENS = tuple(2**power for power in range(2, 16))


class Metrics:
    """Counters and histograms in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # twice as many lines
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._responses = Counter(
            "sbert_http_requests",
            "Responses. Status 499: the client left.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "sbert_http_request_seconds",
            "From the request's headers to the response's last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._series: dict[tuple[str, int], tuple[Callable[[], None], Callable[[float], None]]] = {}
        self.in_progress = 0  # requests; changed by the event loop's thread only
        in_progress = Gauge("sbert_http_requests_in_progress", "Requests in progress.", registry=registry)
        in_progress.set_function(lambda: self.in_progress)
        self._reloads = Counter("sbert_reloads", "Reloads, by how they ended.", ["model", "result"], registry=registry)
        self._stages = Histogram(
            "sbert_stage_seconds", "Time by stage.", ["model", "stage"], buckets=_SECONDS, registry=registry
        )
        self._classes = Histogram(
            "sbert_class_seconds",
            "Time of calls that were encoded, by their priority.",
            ["model", "class"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._batches = Histogram(
            "sbert_batch_size_tokens", "Tokens in each batch.", ["model"], buckets=_TOKENS, registry=registry
        )
        registry.register(_LogCollector())
        self.history = History(registry)
        Gauge("sbert_server_info", "The server.", ["version"], registry=registry).labels(__version__).set(1)

    def observer(self, model: str) -> Observe:
        """Make the callback to which a model's engine reports its times."""
        stages: dict[str, Callable[[float], None]] = {
            stage: self._stages.labels(model, stage).observe for stage in ("tokenize", "queue", "run", "total")
        }
        stages |= {priority: self._classes.labels(model, priority).observe for priority in (INTERACTIVE, BULK)}
        stages["batch_tokens"] = self._batches.labels(model).observe

        def observe(name: str, value: float) -> None:
            stages[name](value)

        return observe

    def count_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response and its time."""
        series = self._series.get((route, status))
        if series is None:  # a lookup by labels takes longer than all the rest
            series = self._responses.labels(route, str(status)).inc, self._seconds.labels(route).observe
            self._series[route, status] = series
        series[0]()
        series[1](seconds)

    def count_reload(self, model: str, result: str) -> None:
        """Count a reload."""
        self._reloads.labels(model, result).inc()

    def watch_connections(self, connections: Collection[object]) -> None:
        """Add the gauge of open connections."""
        gauge = Gauge("sbert_http_connections", "Open connections.", registry=self.registry)
        gauge.set_function(lambda: len(connections))

    def watch(self, models: Models) -> None:
        """Add the counters and gauges of these models."""
        self.registry.register(_ModelCollector(models))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LogCollector(Collector):
    """Reads the counter of lost log lines at each scrape."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Lines of the log that could not be written."
        yield CounterMetricFamily("sbert_log_lines_lost", text, value=lost_lines.total)


class _ModelCollector(Collector):
    """Reads the engines' own counters at each scrape."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        models = [model for model in self._models if model.is_open]
        yield from _counters(models)
        yield from _gauges(models)
        if cached := [model for model in models if model.engine.cache is not None]:
            yield from _cache_counters(cached)
        labels = ["model", "precision", "backend", "device", "dim", "max_length"]
        info = GaugeMetricFamily("sbert_model_info", "The models.", labels=labels)
        for model in models:
            engine = model.engine.engine.info
            info.add_metric([model.name, *(str(engine[label]) for label in labels[1:])], 1)
        yield info


def _counters(models: list[Model]) -> Iterator[CounterMetricFamily]:
    counts = [(model.name, *model.counts()) for model in models]
    for key, name, text in (
        ("requests", "sbert_requests", "Calls of the model."),
        ("texts", "sbert_texts", "Texts in them."),
        ("tokens", "sbert_tokens", "Tokens in those that were encoded, after truncation."),
        ("truncated", "sbert_truncated_texts", "Texts longer than the model's limit."),
        ("batch_tokens", "sbert_batch_tokens", "Tokens of all batches that have run, padding excluded."),
        ("padded_tokens", "sbert_padded_tokens", "Tokens of all batches that have run, padding included."),
        ("restarts", "sbert_worker_restarts", "Hung or dead workers that were replaced."),
    ):
        family = CounterMetricFamily(name, text, labels=["model"])
        for model, total, _ in counts:
            family.add_metric([model], total[key])
        yield family
    failed = CounterMetricFamily("sbert_errors", "Calls that failed, by kind.", labels=["model", "kind"])
    for model, _, errors in counts:
        kinds = dict.fromkeys([*_ERROR_KINDS.values(), "other"], 0)
        for error, count in errors.items():
            kinds[_ERROR_KINDS.get(error, "other")] += count
        for kind, count in kinds.items():
            failed.add_metric([model, kind], count)
    yield failed


def _cache_counters(models: list[Model]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    hits = CounterMetricFamily("sbert_cache_hits", "Texts whose vectors were in the cache.", labels=["model"])
    misses = CounterMetricFamily("sbert_cache_misses", "Texts whose vectors were not.", labels=["model"])
    size = GaugeMetricFamily("sbert_cache_bytes", "Memory of the vectors in the cache.", labels=["model"])
    for model in models:
        total, _ = model.counts()
        hits.add_metric([model.name], total["cache_hits"])
        misses.add_metric([model.name], total["cache_misses"])
        size.add_metric([model.name], model.engine.cache.size if model.engine.cache else 0)
    yield from (hits, misses, size)


def _gauges(models: list[Model]) -> Iterator[GaugeMetricFamily]:
    stats = [(model.name, model.engine.stats(), model) for model in models]
    for name, text, field in (
        ("sbert_queue_texts", "Texts that wait, by priority.", "queued_texts"),
        ("sbert_queue_tokens", "Tokens that wait, by priority.", "queued_tokens"),
        ("sbert_queue_oldest_seconds", "How long the oldest has waited, by priority.", "oldest_age_s"),
    ):
        family = GaugeMetricFamily(name, text, labels=["model", "class"])
        for model, found, _ in stats:
            for priority, lane in found.lanes.items():
                family.add_metric([model, priority], getattr(lane, field))
        yield family
    for name, text, values in (
        ("sbert_running_batches", "Batches that run now.", [s.running_batches for _, s, _ in stats]),
        ("sbert_speed_tokens_per_second", "As measured under load.", [s.tokens_per_s for _, s, _ in stats]),
        ("sbert_ready", "1 if it takes calls.", [int(s.ready) for _, s, _ in stats]),
        ("sbert_max_batch_tokens", "Tokens that may run together.", [m.max_batch_tokens for _, _, m in stats]),
        ("sbert_max_queue_tokens", "Tokens that may wait.", [m.settings.max_queue_tokens for _, _, m in stats]),
    ):
        family = GaugeMetricFamily(name, text, labels=["model"])
        for (model, _, _), value in zip(stats, values, strict=True):
            if value is not None:
                family.add_metric([model], value)
        yield family
