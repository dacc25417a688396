"""Counters and gauges of a server, in the text format of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from dyno.scheduler import Scheduler

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTS = {
    "steps": "Steps of the engine.",
    "prompt_tokens": "Tokens of prompts that were computed.",
    "reused_tokens": "Tokens of prompts that a sequence held from before.",
    "generated_tokens": "Tokens that were drawn.",
}
_GAUGES = {
    "running": "Texts that are being written.",
    "waiting": "Requests that wait for a sequence.",
    "sequences": "Texts that can be written at a time.",
}


class _OfScheduler(Collector):
    """The scheduler's own numbers, read when somebody asks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        totals, load = self._scheduler.totals(), self._scheduler.load()
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"dyno_{name}", text, value=totals[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"dyno_{name}", text, value=load[name])


class Metrics:
    """The metrics of one server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfScheduler(scheduler))
        self._requests = Counter(
            "dyno_requests", "Requests that were answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "dyno_request_seconds",
            "Seconds to an answer, or to the first piece of a stream.",
            ("path",),
            registry=self._registry,
            buckets=_SECONDS,
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)
