"""Prometheus series of one server: what requests were like, written by the HTTP layer.

No label is taken from a request, so the number of series is fixed from the start and a scrape costs
the same for ever. docs/metrics.md has each series; a test holds it to the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from werkzeug.exceptions import HTTPException

from trioserve.config.schema import Config
from trioserve.engine.api import EngineApi
from trioserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    NotReady,
    QueueFull,
    RequestCut,
    RequestError,
)
from trioserve.http.engine_metrics import EngineCollector, ProcessCollector
from trioserve.series import Counter, Histogram

STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "gone")
WHOLE = ("stop", "length")  # the model's own ends
FINISHES = (*WHOLE, "error", "aborted", "timeout", "cut", "gone")
REJECTIONS = (
    *("queue_full", "not_ready", "context_length", "model_not_found", "invalid"),
    *("timeout", "error", "gone"),
)
OTHER_ROUTE = "other"
CONTENT_TYPE = choose_encoder("")[1]  # for whom does not ask for another

_MOMENTS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST_S = (*_MOMENTS_S, 30, 60, 120, 300, 600, 1800)
_TOKEN_S = (0.0001, 0.00025, *_MOMENTS_S, 30)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

# attribute, name, help, bounds
_HISTOGRAMS = (
    (
        "ttft",
        "time_to_first_token_seconds",
        "From the submission of a request to the first token of any of its answers.",
        _REQUEST_S,
    ),
    (
        "itl",
        "inter_token_seconds",
        "Between two deliveries of a streamed answer, divided by the tokens of the later.",
        _TOKEN_S,
    ),
    (
        "tpot",
        "time_per_output_token_seconds",
        "Mean time between the tokens of a whole answer of two or more, as the engine saw them.",
        _TOKEN_S,
    ),
    ("e2e", "request_seconds", "From the submission of a request to its end.", _REQUEST_S),
    ("queue", "request_queue_seconds", "From submission to the first step.", _REQUEST_S),
    ("prefill", "request_prefill_seconds", "From the first step to the first token.", _REQUEST_S),
    ("decode", "request_decode_seconds", "From the first token to the last.", _REQUEST_S),
    (
        "inference",
        "request_inference_seconds",
        "From the first step to the last token.",
        _REQUEST_S,
    ),
    ("prompt_length", "request_prompt_tokens", "Tokens of each prompt accepted.", _TOKENS),
    ("output_length", "request_generation_tokens", "Tokens delivered of each answer.", _TOKENS),
    ("params_n", "request_params_n", "Answers asked for to each prompt.", _CHOICES),
    ("params_max_tokens", "request_params_max_tokens", "max_tokens, where given.", _TOKENS),
)

_COUNTERS = (
    ("accepted", "requests_accepted", "Generation requests submitted to the engine."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of accepted requests."),
    ("cached_tokens", "prompt_tokens_cached", "Those of them found in the prefix cache."),
    ("output_tokens", "generation_tokens", "Tokens delivered to clients."),
    (
        "connection_failures",
        "http_connection_failures",
        "Connections ended by an error of ours.",
    ),
)


class Metrics:
    """What requests were like; the engine's state and the processes' are read at each scrape.

    Written by the tasks of one server, all in one thread.

    Attributes:
        registry: holds all series; more collectors may be added.
        connections: open ones.
    """

    ttft: Histogram
    itl: Histogram
    tpot: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_length: Histogram
    output_length: Histogram
    params_n: Histogram
    params_max_tokens: Histogram
    accepted: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter
    connection_failures: Counter

    def __init__(self, engine: EngineApi, routes: Sequence[str], config: Config) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.connections = Counter()
        for attribute, _, _ in _COUNTERS:
            setattr(self, attribute, Counter())
        for attribute, _, _, bounds in _HISTOGRAMS:
            setattr(self, attribute, Histogram(bounds))
        self._routes = {route: dict.fromkeys(STATUS_CLASSES, 0) for route in (*routes, OTHER_ROUTE)}
        self._finished = dict.fromkeys(FINISHES, 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self.registry.register(_RequestCollector(self))
        self.registry.register(EngineCollector(engine, config))
        self.registry.register(ProcessCollector(engine))

    def count_request(self, route: str | None, status: int | None) -> None:
        """Count an answered request; ``status`` is None if the client left before."""
        counts = self._routes.get(route or OTHER_ROUTE) or self._routes[OTHER_ROUTE]
        counts["gone" if status is None else f"{status // 100}xx"] += 1

    def count_finish(self, reason: str) -> None:
        """Count an ended answer; reasons are those of FINISHES."""
        self._finished[reason if reason in FINISHES else "error"] += 1

    def count_rejection(self, error: Exception | None) -> None:
        """Count a generation request that ended with ``error`` before anything was submitted; None
        where its client left."""
        self._rejected[rejection(error)] += 1

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All series, and their content type: OpenMetrics if ``accept``, the header of that name,
        asks for it, else Prometheus' text format."""
        try:
            encode, content_type = choose_encoder(accept)
            return encode(self.registry), content_type
        except (TypeError, ValueError):  # how the library takes a version that is none
            encode, content_type = choose_encoder("")
            return encode(self.registry), content_type

    def families(self) -> Iterator[Metric]:
        """The series written here."""
        requests = CounterMetricFamily(
            "trioserve_http_requests",
            "Requests answered, by route template and class of status.",
            labels=("route", "status"),
        )
        for route, counts in self._routes.items():
            for status, count in counts.items():
                requests.add_metric((route, status), count)
        yield requests
        yield by_label("requests_rejected", "Refused before submission.", "reason", self._rejected)
        yield by_label("choices_finished", "Answers ended, by reason.", "reason", self._finished)
        for attribute, name, help in _COUNTERS:
            value = getattr(self, attribute).value
            yield CounterMetricFamily(f"trioserve_{name}", help, value=value)
        yield GaugeMetricFamily(
            "trioserve_http_connections", "Open connections.", value=self.connections.value
        )
        for attribute, name, help, _ in _HISTOGRAMS:
            histogram = getattr(self, attribute)
            yield HistogramMetricFamily(
                f"trioserve_{name}", help, histogram.buckets(), histogram.sum
            )


class _RequestCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """The series of Metrics."""
        return self._metrics.families()


def rejection(error: Exception | None) -> str:
    """Which of REJECTIONS an error stands for."""
    match error:
        case None:
            return "gone"
        case QueueFull():
            return "queue_full"
        case RequestCut() | NotReady():
            return "not_ready"
        case ContextLengthExceeded():
            return "context_length"
        case ModelNotFound():
            return "model_not_found"
        case DeadlineExceeded():
            return "timeout"
        case RequestError(status=status) | HTTPException(code=int(status)) if status < 500:
            return "invalid"
        case _:
            return "error"


def by_label(name: str, help: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    """A counter with one label."""
    family = CounterMetricFamily(f"trioserve_{name}", help, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
