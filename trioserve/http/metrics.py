"""Prometheus series of one server: its own registry, labels known beforehand.

No label is taken from a request, so the number of series is fixed from the start.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trioserve.engine.api import EngineApi, Phase
from trioserve.ipc.messages import STAGES

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "gone")
FINISHES = ("stop", "length", "error", "timeout", "cut", "gone")
OTHER_ROUTE = "other"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters the HTTP layer writes, and the engine's state read at each scrape."""

    def __init__(self, engine: EngineApi, routes: list[str]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "trioserve_http_requests",
            "Requests answered, by route template and class of status.",
            ["route", "status"],
            registry=self.registry,
        )
        self._finished = Counter(
            "trioserve_choices_finished",
            "Answers ended, by reason.",
            ["reason"],
            registry=self.registry,
        )
        for route in (*routes, OTHER_ROUTE):
            for status in STATUS_CLASSES:
                self._requests.labels(route, status)
        for reason in FINISHES:
            self._finished.labels(reason)
        self._routes = frozenset(routes)
        self.ttft = self._histogram(
            "trioserve_time_to_first_token_seconds",
            "From the request's body to its first token.",
            _TTFT_BUCKETS,
        )
        self.itl = self._histogram(
            "trioserve_inter_token_seconds",
            "Between two deliveries of a stream, divided by the tokens of the later.",
            _ITL_BUCKETS,
        )
        self.e2e = self._histogram(
            "trioserve_request_seconds", "From the request's body to its end.", _E2E_BUCKETS
        )
        self.connections = Gauge(
            "trioserve_http_connections", "Open connections.", registry=self.registry
        )
        self.connection_failures = Counter(
            "trioserve_http_connection_failures",
            "Connections ended by an error of ours.",
            registry=self.registry,
        )
        self.prompt_tokens = self._counter(
            "trioserve_prompt_tokens", "Prompt tokens of accepted requests."
        )
        self.output_tokens = self._counter(
            "trioserve_generation_tokens", "Tokens delivered to clients."
        )
        self.registry.register(_EngineCollector(engine))

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, registry=self.registry)

    def count_request(self, route: str | None, status: int | None) -> None:
        """Count an answered request; ``status`` is None if the client left before."""
        label = route if route in self._routes else OTHER_ROUTE
        status_class = "gone" if status is None else f"{status // 100}xx"
        self._requests.labels(label, status_class).inc()

    def count_finish(self, reason: str) -> None:
        """Count an ended answer; reasons are those of FINISHES."""
        self._finished.labels(reason if reason in FINISHES else "error").inc()

    def exposition(self) -> bytes:
        """All series as text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counters, read when asked."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status
        stats = status.stats
        phase = GaugeMetricFamily(
            "trioserve_engine_phase", "1 for the phase the engine is in.", labels=["phase"]
        )
        for candidate in Phase:
            phase.add_metric([candidate.value], float(candidate is status.phase))
        yield phase
        seconds = GaugeMetricFamily(
            "trioserve_startup_stage_seconds", "Time each start-up stage took.", labels=["stage"]
        )
        took = {stage.name: stage.seconds or 0.0 for stage in status.stages}
        for name in STAGES:
            seconds.add_metric([name], took.get(name, 0.0))
        yield seconds
        yield _gauge("ready_seconds", "Start to ready; 0 before.", status.ready_after_s or 0.0)
        yield _gauge("engine_incarnation", "Worker incarnation.", status.incarnation)
        yield CounterMetricFamily(
            "trioserve_engine_restarts", "Workers started after a death.", status.num_restarts
        )
        tasks = trio.lowlevel.current_statistics().tasks_living
        yield _gauge("tasks", "Tasks of the server's event loop.", tasks)
        yield _gauge("requests_open", "Requests submitted and not ended.", status.num_requests)
        running, waiting = (stats.num_running, stats.num_waiting) if stats else (0, 0)
        yield _gauge("requests_running", "Sequences in the last step.", running)
        yield _gauge("requests_waiting", "Sequences waiting for a step.", waiting)
        used, total = (stats.num_blocks_used, stats.num_blocks) if stats else (0, 0)
        yield _gauge("kv_cache_usage_ratio", "Share of KV blocks in use.", used / max(total, 1))
        for name, help, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats and stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats and stats.prefix_hits),
            ("preemptions", "Sequences preempted.", stats and stats.num_preemptions),
            ("prefill_tokens", "Prompt tokens computed.", stats and stats.prompt_tokens),
            ("sampled_tokens", "Tokens sampled.", stats and stats.output_tokens),
        ):
            yield CounterMetricFamily(f"trioserve_{name}", help, value=float(value or 0))


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"trioserve_{name}", help, value=float(value))
