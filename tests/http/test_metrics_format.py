"""The exposition: what parsers make of it, what it costs, what clients cannot do to it, and
docs/metrics.md."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from trioserve.config.schema import Config, TraceConfig
from trioserve.engine.api import Phase
from trioserve.engine.tally import StepTally
from trioserve.http.app import ROUTES
from trioserve.http.metrics import STATUS_CLASSES, Metrics
from trioserve.ipc.messages import StepStats
from trioserve.loop_watch import LoopMetrics, watching_loop
from trioserve.series import Histogram
from trioserve.tracing.tracer import TraceMetrics, Tracer

from .client import serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory

ROOT = Path(__file__).parents[2]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# As Prometheus itself asks for it.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


class NoSender:
    def send(self, traces: Any) -> tuple[int, bool]:
        raise AssertionError("nothing to send")

    def close(self) -> None:
        pass


def all_metrics(engine: Any = None) -> Metrics:
    """Every series a server can have."""
    engine = engine or FakeEngine()
    metrics = Metrics(engine, ROUTES, Config())
    with watching_loop() as watch:
        metrics.registry.register(LoopMetrics(watch))
    metrics.registry.register(TraceMetrics(Tracer(TraceConfig(), engine, NoSender())))
    return metrics


def num_samples(families: Iterator[Metric]) -> int:
    return sum(len(family.samples) for family in families)


# ------------------------------------------------------------------------------------ parsers


async def test_both_formats_parse_and_say_the_same() -> None:
    metrics = all_metrics()
    metrics.itl.observe(0.0123)
    metrics.count_finish("stop")
    text, text_type = metrics.exposition()
    opened, open_type = metrics.exposition(PROMETHEUS)
    assert text_type.startswith("text/plain")
    assert open_type.startswith("application/openmetrics-text")
    assert opened.endswith(b"# EOF\n")

    def values(families: Any) -> dict[Any, float]:
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in families
            for s in family.samples
            if "process_cpu" not in s.name and "memory" not in s.name
        }

    one, other = values(parse_text(text.decode())), values(parse_openmetrics(opened.decode()))
    assert one == other
    assert len(one) > 300
    assert not [name for name, _ in one if name.endswith("_created")]


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain", "text/html", "nonsense;;;", "\x7f" * 9]
)
async def test_others_get_the_text_format(accept: str) -> None:
    text, content_type = all_metrics().exposition(accept)
    assert content_type.startswith("text/plain")
    assert num_samples(parse_text(text.decode())) > 300


MANGLED = [
    "text/plain",
    "application/openmetrics-text",
    ";",
    ",",
    "version=",
    "escaping=",
    "q=",
    "=",
]


@given(st.lists(st.sampled_from(MANGLED) | st.text(max_size=5), max_size=9))
@example(["text/plain;version=abc"])
@example(["application/openmetrics-text;version=1.x"])
@example(["application/openmetrics-text;version=1.0.0;escaping=\r\nx"])
def test_no_header_is_a_failure_of_ours(parts: list[str]) -> None:
    """Nor does any of it come back in the answer's own header."""
    metrics = Metrics.__new__(Metrics)
    metrics.registry = CollectorRegistry()
    _, content_type = metrics.exposition("".join(parts))
    assert re.fullmatch(
        r"(text/plain|application/openmetrics-text); version=[\d.]+; charset=utf-8"
        r"(; escaping=[a-z0-9-]+)?",
        content_type,
    )


async def test_the_header_decides(autojump_clock: trio.testing.MockClock) -> None:
    async with serving_in_memory() as served:
        client = served.connect()
        for accept, parse in ((OPENMETRICS, parse_openmetrics), ("text/plain", parse_text)):
            await client.send("GET", "/metrics", Accept=accept)
            answer = await client.answer()
            assert answer.headers["content-type"].startswith(accept.split(";")[0])
            assert num_samples(parse(answer.body.decode())) > 300


async def test_a_name_of_the_configuration_is_escaped() -> None:
    engine = FakeEngine()
    name = 'a"b\nc\\d'
    status = engine.status
    status.model_name = name

    class Named(FakeEngine):
        @property
        def status(self) -> Any:
            return status

    for accept, parse in (("", parse_text), (OPENMETRICS, parse_openmetrics)):
        text, _ = all_metrics(Named()).exposition(accept)
        (family,) = [
            f
            for f in parse(text.decode())
            if f.name.startswith("trioserve_model") and f.samples[0].name == "trioserve_model_info"
        ]
        assert family.samples[0].labels["model_name"] == name


# -------------------------------------------------------------------------------------- OP-01


HOSTILE = [
    'x"} 1\ntrioserve_evil 1\n',
    "a" * 200_000,
    "\u2028\x00\x1b[2J",
    "{}",
    {"an": "object"},
    ["a", "list"],
    1e300,
    None,
    True,
]


async def test_op_01_hostile_values_make_no_series() -> None:
    async with serving() as served:
        before = (await served.call("GET", "/metrics")).body.decode()
        client = await served.connect()
        for value in HOSTILE:
            for field in ("model", "user", "metadata", "priority", "service_tier", "stop", "n"):
                body = {"prompt": "hi", field: value}
                await client.send("POST", "/v1/completions", json.dumps(body).encode())
                await client.answer()
        for index in range(200):
            await client.send(f"M{index}", f"/v1/{index}?{index}")
            await client.answer()
            await client.send("GET", f"/v1/models/%22%0a{index}")
            await client.answer()
        after = (await served.call("GET", "/metrics")).body.decode()
    names = [
        {(s.name, *sorted(s.labels.items())) for f in parse_text(text) for s in f.samples}
        for text in (before, after)
    ]
    assert names[0] == names[1]
    assert "evil" not in after


async def test_op_01_every_series_is_there_before_its_first_use() -> None:
    metrics = all_metrics(FakeEngine(phase=Phase.LOADING))
    text, _ = metrics.exposition()
    found = {
        (s.name, *sorted(s.labels.items())) for f in parse_text(text.decode()) for s in f.samples
    }
    for route in (*ROUTES, "other"):
        for status in STATUS_CLASSES:
            labels = (("route", route), ("status", status))
            assert ("trioserve_http_requests_total", *labels) in found


async def test_op_01_a_scrape_is_cheap_whatever_was_counted() -> None:
    """In processor time, as others work on this machine; usually some 5 ms."""
    metrics = all_metrics()
    sizes = []
    for _ in range(2):
        for index in range(10_000):
            metrics.count_request(f"/x/{index}", 200)
            metrics.count_finish(f"reason {index}")
            metrics.itl.observe(index / 1000)
        best = 1.0
        for _ in range(5):
            began = time.process_time()
            text, _ = metrics.exposition()
            best = min(best, time.process_time() - began)
        assert best < 0.05
        sizes.append(text.count(b"\n"))
    assert sizes[0] == sizes[1] < 1500


# ---------------------------------------------------------------------------------- histograms


def test_a_value_at_a_bound_belongs_to_it() -> None:
    histogram = Histogram((0.1, 1))
    for value in (0.1, 0.10001, 1, 1.5, -1):
        histogram.observe(value)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(1.70001)
    assert histogram.count == 5


async def test_bounds_are_ascending_and_reach_from_below_a_ms_to_minutes() -> None:
    for family in all_metrics().registry.collect():
        bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert bounds == sorted(set(bounds))
        if bounds and family.name.startswith("trioserve_request_") and "seconds" in family.name:
            assert bounds[0] < 0.001
            assert bounds[-2] >= 600


# --------------------------------------------------------------------------------------- steps


def stats(prompt: int, output: int, step_s: float) -> StepStats:
    return StepStats(1, 0, 1, 9, 0, 0, 0, prompt, output, step_s)


def test_steps_are_tallied_by_what_they_add() -> None:
    tally = StepTally()
    tally.add(stats(8, 4, 0.1))  # with its self-test: only the time is known
    tally.add(stats(108, 5, 0.2))
    tally.add(stats(108, 5, 0.0))  # the answer to an abort
    tally.add(stats(108, 8, 0.3))
    tally.begin_worker()
    tally.add(stats(8, 4, 0.4))
    tally.add(stats(8, 5, 0.5))
    assert (tally.seconds.count, tally.seconds.sum) == (5, pytest.approx(1.5))
    assert (tally.tokens.count, tally.tokens.sum) == (3, 101 + 3 + 1)


# ----------------------------------------------------------------------------- docs/metrics.md


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name to type and labels, from the tables."""
    rows = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `trioserve_"):
            name, kind, labels = cells[:3]
            assert len(cells) == 5, line
            assert all(cells[3:]), line
            rows[name.strip("`")] = (kind, tuple(re.findall(r"`(\w+)`", labels)))
    return rows


async def test_the_tables_list_every_series_and_no_other() -> None:
    found = {}
    for family in all_metrics().registry.collect():
        names = {s.name for s in family.samples}
        labels = {key for s in family.samples for key in s.labels if key != "le"}
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        assert f"{family.name}{suffix}" in names or family.type == "histogram"
        found[f"{family.name}{suffix}"] = (family.type, tuple(sorted(labels)))
    assert {k: (t, tuple(sorted(x))) for k, (t, x) in documented().items()} == found


async def test_names_follow_the_conventions() -> None:
    for family in all_metrics().registry.collect():
        assert family.name.startswith("trioserve_")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|milliseconds|us|kb|mb|percent|perc|pct)$", family.name)
        assert family.name == family.name.lower()
