"""From a server's documents to numbers worth a look. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import attrs
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from trioserve.engine.api import StageStatus
from trioserve.logs import escape
from trioserve.top.client import Unreachable

RATES_S = 5.0  # rates are means over this long
LATENCIES_S = 60.0  # quantiles are of the answers of this long
QUANTILES = (0.5, 0.9, 0.99)
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
Buckets = list[tuple[float, float]]  # upper bound in s, count up to it


class InfoDocument(msgspec.Struct):
    """What the engine settled on, as far as it is shown."""

    block_size: int = 0
    num_blocks: int = 0


class StageDocument(msgspec.Struct):
    """One stage of ``/startup``."""

    name: str
    state: str
    fraction: float | None = None
    detail: str = ""
    bytes: int | None = None
    seconds: float | None = None


class StartupDocument(msgspec.Struct):
    """What ``/startup`` answers, as far as it is shown."""

    phase: str
    model: str
    incarnation: int
    uptime_s: float
    stages: list[StageDocument]
    cause: str | None = None
    info: InfoDocument | None = None


class Series:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        """Raises ValueError where the text is no exposition."""
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str | tuple[str, ...]) -> float:
        """Sum of the samples ``trioserve_<name>`` with these labels; 0 if there are none."""
        return sum(
            value
            for have, value in self._samples.get(f"trioserve_{name}", ())
            if all(have.get(k) in (v if isinstance(v, tuple) else (v,)) for k, v in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Totals by the values of one label, in order of appearance."""
        totals: dict[str, float] = {}
        for have, value in self._samples.get(f"trioserve_{name}", ()):
            totals[have.get(label, "")] = totals.get(have.get(label, ""), 0.0) + value
        return totals

    def buckets(self, name: str) -> Buckets:
        """The buckets of a histogram."""
        samples = self._samples.get(f"trioserve_{name}_bucket", ())
        return sorted((float(labels["le"]), value) for labels, value in samples)


@attrs.frozen
class Snapshot:
    """One look at a server. ``at_s`` is of any monotonic clock."""

    at_s: float
    startup: StartupDocument
    series: Series


def read(startup: bytes, metrics: bytes, at_s: float) -> Snapshot:
    """Take the answers of ``/startup`` and ``/metrics``. Raises Unreachable where they are none."""
    try:
        document = msgspec.json.decode(startup, type=StartupDocument)
        return Snapshot(at_s, document, Series(metrics.decode()))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise Unreachable("what answers is not a trioserve server, or one too old") from error


class History:
    """Past snapshots of one life of one server, as far back as they are needed."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Add a later one; a server that has been started anew has no past."""
        past = self._snapshots
        if past and snapshot.startup.uptime_s < past[-1].startup.uptime_s:
            past.clear()
        past.append(snapshot)
        while len(past) > 2 and snapshot.at_s - past[1].at_s >= LATENCIES_S:
            past.popleft()

    @property
    def now(self) -> Snapshot | None:
        """The latest."""
        return self._snapshots[-1] if self._snapshots else None

    def before(self, seconds: float) -> Snapshot | None:
        """The latest that is at least this much older than the last, or the oldest of all others.

        None if there is only one.
        """
        *earlier, last = self._snapshots
        for snapshot in reversed(earlier):
            if last.at_s - snapshot.at_s >= seconds:
                return snapshot
        return earlier[0] if earlier else None


@attrs.frozen
class Latency:
    """Quantiles of one histogram, in s; None if there was nothing to measure."""

    name: str
    quantiles: tuple[float | None, ...]  # of QUANTILES


@attrs.frozen
class Reading:
    """What is shown; no text has control characters.

    Rates and shares are None where there is nothing to tell them from. ``rates_s`` is how long the
    rates are means over, None where there are none yet; ``latencies_s`` how long quantiles and the
    share of hits are of, None where they are of all the server's life.
    """

    phase: str
    model: str
    cause: str | None
    uptime_s: float
    incarnation: int
    stages: list[StageStatus]
    running: int
    waiting: int
    open: int
    answered: dict[str, int]  # generation requests by class of status, since the start
    finished: dict[str, int]  # choices by reason, since the start
    requests_per_s: float | None
    prompt_per_s: float | None  # tokens
    output_per_s: float | None  # tokens
    kv_share: float
    kv_tokens: int  # in all; 0 before ready
    hit_share: float | None  # of the prompt tokens looked up
    preemptions: int
    latencies: list[Latency]
    rates_s: float | None
    latencies_s: float | None
    connections: int
    blocked: int
    lag_s: float | None  # 99th percentile


def make_reading(history: History) -> Reading:
    """The reading of the last snapshot; at least one is there."""
    last = history.now
    assert last is not None
    startup, series = last.startup, last.series
    recent, older = history.before(RATES_S), history.before(LATENCIES_S)
    queries = gained("prefix_cache_queries_total", series, older)
    hits = gained("prefix_cache_hits_total", series, older)
    rates_s = last.at_s - recent.at_s if recent else None
    latencies_s = last.at_s - older.at_s if older else None
    return Reading(
        phase=escape(startup.phase),
        model=escape(startup.model),
        cause=None if startup.cause is None else escape(startup.cause),
        uptime_s=startup.uptime_s,
        incarnation=startup.incarnation,
        stages=list(map(make_stage, startup.stages)),
        running=int(series.total("requests_running")),
        waiting=int(series.total("requests_waiting")),
        open=int(series.total("requests_open")),
        answered={
            escape(status): int(
                series.total("http_requests_total", route=GENERATION, status=status)
            )
            for status in series.by("http_requests_total", "status")
        },
        finished={
            escape(reason): int(count)
            for reason, count in series.by("choices_finished_total", "reason").items()
        },
        requests_per_s=rate("http_requests_total", last, recent, route=GENERATION),
        prompt_per_s=rate("prefill_tokens_total", last, recent),
        output_per_s=rate("generation_tokens_total", last, recent),
        kv_share=series.total("kv_cache_usage_ratio"),
        kv_tokens=startup.info.block_size * startup.info.num_blocks if startup.info else 0,
        hit_share=hits / queries if queries else None,
        preemptions=int(series.total("preemptions_total")),
        latencies=[
            Latency(label, quantiles(name, series, older, QUANTILES))
            for label, name in (
                ("first token", "time_to_first_token_seconds"),
                ("next token", "inter_token_seconds"),
                ("whole answer", "request_seconds"),
            )
        ],
        rates_s=rates_s or None,
        latencies_s=latencies_s,
        connections=int(series.total("http_connections")),
        blocked=int(series.total("event_loop_blocked_total")),
        lag_s=quantiles("event_loop_lag_seconds", series, older, (0.99,))[0],
    )


def make_stage(stage: StageDocument) -> StageStatus:
    """A stage as the rest of the program knows it."""
    return StageStatus(
        name=escape(stage.name),
        state=escape(stage.state),
        fraction=stage.fraction,
        detail=escape(stage.detail),
        num_bytes=stage.bytes,
        seconds=stage.seconds,
    )


def gained(name: str, series: Series, before: Snapshot | None, **labels: Any) -> float:
    """Growth of a counter. One that went down was the former worker's and began anew."""
    now = series.total(name, **labels)
    then = before.series.total(name, **labels) if before else 0.0
    return now - then if now >= then else now


def rate(name: str, last: Snapshot, before: Snapshot | None, **labels: Any) -> float | None:
    """Growth of a counter a second."""
    if before is None or last.at_s <= before.at_s:
        return None
    return gained(name, last.series, before, **labels) / (last.at_s - before.at_s)


def quantiles(
    name: str, series: Series, before: Snapshot | None, wanted: Iterable[float]
) -> tuple[float | None, ...]:
    """Quantiles of what a histogram has counted since ``before``."""
    now = series.buckets(name)
    then = before.series.buckets(name) if before else []
    if [bound for bound, _ in now] == [bound for bound, _ in then]:
        now = [(bound, count - old) for (bound, count), (_, old) in zip(now, then, strict=True)]
    return tuple(quantile(now, share) for share in wanted)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Value below which ``share`` of the counts lie, even within a bucket; None without counts.

    What lies above the last finite bound is given as that bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return None
