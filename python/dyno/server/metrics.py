"""Counters, gauges and histograms of a server, in the text format of Prometheus.

Metrics that vLLM also has use its names and meanings, so that dashboards and alerts for vLLM work; see
`vllm/v1/metrics` in that project.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from dyno._requests import SchedulerEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from dyno._requests import Request, Step
    from dyno.engine import Engine
    from dyno.scheduler import Scheduler

__all__ = ["CONTENT_TYPE_LATEST", "Metrics", "Promise"]

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Promise:
    """The speed that a profile promises, and the speed of comparable steps.

    The `tg` of a profile is the rate of one sequence with a short context. Its `pp` is the rate of a single
    prompt. Of the steps with such work, the last ones are kept.
    """

    KEPT = 64
    SHALLOW = 512
    """Most tokens of a sequence in a step that is comparable with `tg`."""

    def __init__(self, engine: Engine) -> None:
        profile = engine.match.profile
        tuned = {} if profile is None or profile.evidence is None else profile.evidence.tuned
        self.promised: dict[str, float] = {}
        """Promised tokens per second by metric: `tg` and `pp`."""
        self._pp_tokens = 0
        for name, rate in sorted(tuned.items(), key=lambda item: len(item[0])):
            size = name[2:]
            if rate <= 0 or name[:2] not in ("pp", "tg") or not size.isdigit():
                continue
            if name[:2] == "tg":
                self.promised.setdefault("tg", rate)
            elif int(size) > self._pp_tokens:
                self.promised["pp"], self._pp_tokens = rate, int(size)
        self._rates: dict[str, deque[float]] = {name: deque(maxlen=self.KEPT) for name in self.promised}

    def stepped(self, step: Step) -> None:
        """Keep the rate of a step that is comparable with the measurements of the profile."""
        if step.sequences != 1 or step.seconds <= 0:
            return
        kind = "pp" if step.prompt_tokens else "tg"
        # Several tokens are a verified draft, or a text that is read again.
        if kind == "tg" and (step.tokens != 1 or step.deepest > self.SHALLOW):
            return
        # Only near the beginning of a prompt, because attention over more tokens takes longer.
        if kind == "pp" and not (self._pp_tokens <= 2 * step.tokens and step.deepest <= 2 * self._pp_tokens):
            return
        if kind in self._rates:
            self._rates[kind].append(step.tokens / step.seconds)

    def ratios(self) -> dict[str, float]:
        """Measured / promised by metric, from medians, for metrics with measurements."""
        kept = {name: list(rates) for name, rates in self._rates.items()}
        return {name: statistics.median(rates) / self.promised[name] for name, rates in kept.items() if rates}


class _OfScheduler(Collector):
    """A collector of the numbers of the scheduler and the facts of the profile, which are read on request."""

    def __init__(
        self, scheduler: Scheduler, engine: Engine, model: str, promise: Promise, experts: dict[str, int]
    ) -> None:
        self._scheduler, self._promise, self._experts = scheduler, promise, experts
        self._labels = {"model_name": model}
        whole = int(engine.settings["sequences"]) * int(engine.settings["ctx"])
        self._cache_tokens = int(engine.settings.get("cache_tokens", 0)) or whole
        self._profile = _profile_facts(engine)

    def collect(self) -> Iterator[Metric]:
        totals, load = self._scheduler.totals(), self._scheduler.load()
        drafts = self._scheduler.drafts
        looked_up = totals["prompt_tokens"] + totals["reused_tokens"]
        counters: dict[str, tuple[str, float]] = {
            "vllm:prompt_tokens": ("Prompt tokens, including cached ones.", looked_up),
            "vllm:generation_tokens": ("Generated tokens.", totals["generated_tokens"]),
            "vllm:prefix_cache_queries": (
                "Prompt tokens that were looked up in the prefix cache.",
                looked_up,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens that were found in the prefix cache.",
                totals["reused_tokens"],
            ),
            "dyno_prefix_copied_tokens": (
                "Prompt tokens that were copied from another sequence.",
                totals["copied_tokens"],
            ),
            "dyno_recomputed_tokens": (
                "Tokens that were recomputed because their request had waited for memory.",
                totals["recomputed_tokens"],
            ),
            "vllm:num_preemptions": (
                "Number of times that a running request had to wait again for memory.",
                totals["stopped"],
            ),
            "vllm:spec_decode_num_drafts": ("Drafts that were verified.", drafts.drafts),
            "vllm:spec_decode_num_draft_tokens": ("Tokens of drafts.", drafts.tokens),
            "vllm:spec_decode_num_accepted_tokens": (
                "Draft tokens that were accepted.",
                drafts.accepted,
            ),
            "dyno_steps": ("Steps of the engine.", totals["steps"]),
        }
        if self._experts:
            counters |= {
                "dyno_expert_choices": (
                    "Choices of experts in layers with an expert cache.",
                    self._experts["chosen"],
                ),
                "dyno_expert_cache_hits": (
                    "Choices of experts that were in the expert cache.",
                    self._experts["cached"],
                ),
                "dyno_expert_cache_swaps": (
                    "Experts that replaced another one in the expert cache.",
                    self._experts["swapped"],
                ),
            }
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Requests that are running.", load["running"]),
            "vllm:num_requests_waiting": ("Requests that are waiting for a sequence.", load["waiting"]),
            "vllm:kv_cache_usage_perc": (
                "Fraction of the KV cache that running requests use, 0 to 1.",
                load["held_tokens"] / self._cache_tokens,
            ),
            "dyno_kv_cache_bytes": (
                "Current memory of the KV cache, including cached prefixes.",
                load["cache_bytes"],
            ),
            "dyno_kv_cache_max_bytes": ("Maximum memory of the KV cache.", load["cache_bytes_most"]),
            "dyno_sequences": ("Maximum number of requests that can run in parallel.", load["sequences"]),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position in the draft.",
            labels=["model_name", "position"],
        )
        for place, count in enumerate(drafts.accepted_at):
            places.add_metric([self._labels["model_name"], str(place)], count)
        yield places
        yield InfoMetricFamily("dyno_profile", "The profile in force.", self._profile)
        for name, text, values in (
            ("dyno_profile_promised_tokens_per_second", "Speed in the profile.", self._promise.promised),
            (
                "dyno_profile_speed_ratio",
                "Median speed of recent comparable steps, divided by the speed that the profile promises.",
                self._promise.ratios(),
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=["metric"])
            for metric, value in values.items():
                family.add_metric([metric], value)
            yield family


class Metrics(SchedulerEvents):
    """The metrics of one server.

    Args:
        engine: The engine, for its profile and the size of its cache.
        model: Name of the model, which is a label of the metrics of vLLM.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._promise = Promise(engine)
        self._caches_experts = int(engine.plan["settings"]["expert_cache_mib"]) > 0
        self._experts: dict[str, int] = {}  # expert choices at the last step
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)
            child: Histogram = made.labels(model)
            return child

        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Seconds that a request waited for a sequence.", _REQUEST_S
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", _FIRST_S
        )
        self._next = histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a request.", _NEXT_S
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from a request to its last token.", _REQUEST_S
        )
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._drawn = histogram("vllm:request_generation_tokens", "Tokens generated per request.", _TOKENS)
        self._steps = histogram("vllm:iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self._ended = Counter(
            "vllm:request_success",
            "Finished requests, by reason: stop, length, abort or error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._requests = Counter(
            "dyno_requests", "Requests that were answered.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "dyno_request_seconds",
            "Seconds to the response, or to the first event of a stream.",
            ("path",),
            registry=self._registry,
            buckets=_FIRST_S,
        )

    def watch(self, scheduler: Scheduler) -> None:
        """Also report the numbers of a scheduler on request."""
        self._registry.register(
            _OfScheduler(scheduler, self._engine, self._model, self._promise, self._experts)
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)

    # ---- SchedulerEvents ----

    def stepped(self, step: Step) -> None:
        self._steps.observe(step.tokens)
        if self._caches_experts:  # the engine is between two steps, so this does not wait
            self._experts.update(self._engine.expert_choices)
        self._promise.stepped(step)

    def admitted(self, queued_s: float) -> None:
        self._queue.observe(queued_s)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)

    def ended(self, request: Request, reason: str, seconds: float) -> None:
        self._whole.observe(seconds)
        self._prompts.observe(len(request.prompt))
        self._drawn.observe(request.drawn)
        self._ended.labels(self._model, reason).inc()


def _profile_facts(engine: Engine) -> dict[str, str]:
    """Labels of `dyno_profile_info`.

    `state` is `applied`, `partial` (entries fell back to the default), `none` or `off`.
    """
    match = engine.match
    if match.profile is None:
        return {"hash": "", "state": "off" if match.switched_off else "none", "match": "default"}
    digest = hashlib.sha256(match.profile.model_dump_json().encode()).hexdigest()
    state = "partial" if engine.fallbacks else "applied"
    return {"hash": digest[:16], "state": state, "match": match.level.name.lower()}
