"""From documents to figures, and from figures to text."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from rich.console import Console

from trioserve.top.client import Unreachable
from trioserve.top.reading import (
    Buckets,
    History,
    Reading,
    Series,
    Snapshot,
    make_reading,
    quantile,
    read,
)
from trioserve.top.view import LinesView, LiveView, draw, duration, line, seconds, snapshot, title

STAGES = [
    {
        "name": "spawn",
        "state": "done",
        "fraction": 1.0,
        "detail": "",
        "bytes": None,
        "seconds": 0.1,
    },
    {"name": "weights", "state": "running", "fraction": 0.4, "detail": "fp16", "bytes": 93_000_000},
    {"name": "profile", "state": "pending"},
]


def startup(**changes: Any) -> bytes:
    document = {
        "phase": "ready",
        "model": "tiny",
        "incarnation": 1,
        "uptime_s": 12.0,
        "ready_after_s": 1.0,
        "cause": None,
        "stages": STAGES,
        "info": {"block_size": 16, "num_blocks": 100, "more": [1]},
    }
    return msgspec.json.encode(document | changes)


class Server:
    """Series such as a server has, to be moved by hand."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._make(Counter, "http_requests", ["route", "status"])
        self.output = self._make(Counter, "generation_tokens")
        self.queries = self._make(Counter, "prefix_cache_queries")
        self.hits = self._make(Counter, "prefix_cache_hits")
        self.running = self._make(Gauge, "requests_running")
        self.ttft = Histogram(
            "trioserve_time_to_first_token_seconds", "x", buckets=(0.1, 1), registry=self.registry
        )
        for status in ("2xx", "5xx"):
            self.requests.labels("/v1/completions", status)

    def _make(self, kind: Any, name: str, labels: Any = ()) -> Any:
        return kind(f"trioserve_{name}", "x", labels, registry=self.registry)

    def look(self, at_s: float, **changes: Any) -> Snapshot:
        changes.setdefault("uptime_s", at_s)
        return read(startup(**changes), generate_latest(self.registry), at_s)


def reading_of(*snapshots: Snapshot) -> Reading:
    history = History()
    for one in snapshots:
        history.add(one)
    return make_reading(history)


def test_a_first_look_has_totals_and_no_rates() -> None:
    server = Server()
    server.requests.labels("/v1/completions", "2xx").inc(3)
    server.requests.labels("/metrics", "2xx").inc(100)
    server.running.set(2)
    server.ttft.observe(0.05)
    reading = reading_of(server.look(5.0))
    assert reading.answered == {"2xx": 3, "5xx": 0}
    assert (reading.running, reading.waiting) == (2, 0)
    assert reading.kv_tokens == 1600
    assert reading.requests_per_s is reading.output_per_s is reading.hit_share is None
    assert reading.latencies[0].quantiles[0] == pytest.approx(0.05)
    assert reading.latencies[1].quantiles == (None, None, None)
    assert [stage.num_bytes for stage in reading.stages] == [None, 93_000_000, None]


def test_rates_are_means_over_the_last_seconds() -> None:
    server = Server()
    looks = []
    for second in range(20):
        looks.append(server.look(float(second)))
        server.output.inc(10 if second < 12 else 30)
        server.requests.labels("/v1/completions", "2xx").inc(2)
    reading = reading_of(*looks)
    assert reading.output_per_s == pytest.approx(30.0)
    assert reading.requests_per_s == pytest.approx(2.0)


def test_quantiles_and_hits_are_those_of_the_last_minute() -> None:
    server = Server()
    for _ in range(100):
        server.ttft.observe(0.5)
    server.queries.inc(100)
    first = server.look(0.0)
    server.ttft.observe(0.05)
    server.queries.inc(10)
    server.hits.inc(5)
    second = server.look(10.0)
    for reading in (reading_of(first, second), reading_of(first, second, server.look(30.0))):
        assert reading.latencies[0].quantiles[2] <= 0.1
        assert reading.hit_share == 0.5
    history = History()
    for second in range(200):
        history.add(server.look(float(second)))
    assert history.before(60.0).at_s == 139.0
    assert history.before(5.0).at_s == 194.0
    assert len(history._snapshots) == 61


def test_what_figures_are_of_is_said() -> None:
    server = Server()
    first = reading_of(server.look(0.0))
    assert (first.rates_s, first.latencies_s) == (None, None)
    assert "no rates yet, quantiles and hits since the start" in snapshot(first)
    looks = [server.look(float(second)) for second in range(3)]
    soon = reading_of(*looks)
    assert (soon.rates_s, soon.latencies_s) == (2.0, 2.0)
    assert line(soon).endswith("; rates over 2.0 s, quantiles and hits over 2.0 s")
    later = reading_of(*(server.look(float(second)) for second in range(100)))
    assert (later.rates_s, later.latencies_s) == (5.0, 60.0)
    assert "rates over 5.0 s, quantiles and hits over 1:00" in text_of(draw(later))


def test_a_server_started_anew_has_no_past() -> None:
    server, again = Server(), Server()
    server.output.inc(1000)
    reading = reading_of(server.look(100.0), again.look(101.0, uptime_s=1.0))
    assert reading.output_per_s is None


def test_a_counter_that_fell_is_the_next_workers() -> None:
    server, again = Server(), Server()
    server.queries.inc(1000)
    again.queries.inc(50)
    again.hits.inc(25)
    reading = reading_of(server.look(100.0), again.look(101.0, incarnation=2))
    assert reading.hit_share == 0.5


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(1.0, 10.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5, 0.5),
        ([(1.0, 5.0), (2.0, 10.0), (float("inf"), 10.0)], 0.9, 1.8),
        ([(1.0, 0.0), (2.0, 0.0), (float("inf"), 10.0)], 0.5, 2.0),
        ([(1.0, 0.0), (2.0, 4.0), (float("inf"), 4.0)], 0.0, 1.0),
    ],
)
def test_quantile(buckets: Buckets, share: float, value: float | None) -> None:
    assert quantile(buckets, share) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "answers",
    [
        (b"", b""),
        (b"<html>", b""),
        (b"{}", b""),
        (b"[]", b""),
        (startup(stages=[{"name": "x", "state": "running", "fraction": "half"}]), b""),
        (startup(), b"\xff"),
        (startup(), b"trioserve_x{ 1"),
        (startup(), b"trioserve_x one"),
    ],
)
def test_what_is_no_server_of_ours_is_said(answers: tuple[bytes, bytes]) -> None:
    with pytest.raises(Unreachable, match="not a trioserve server"):
        read(*answers, 0.0)


def test_series_by_labels() -> None:
    series = Series('trioserve_a{x="1",y="2"} 3\ntrioserve_a{x="4",y="2"} 5\n')
    assert series.total("a") == 8
    assert series.total("a", x="4") == 5
    assert series.total("a", x=("1", "4")) == 8
    assert series.total("b") == 0
    assert series.by("a", "x") == {"1": 3, "4": 5}
    assert series.buckets("a") == []


# ------------------------------------------------------------------------------------- text


def text_of(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_while_loading_the_stages_are_shown() -> None:
    reading = reading_of(Server().look(3.0, phase="loading", info=None))
    assert line(reading) == "tiny: loading, up 3.0 s; stage weights 40%"
    assert "  weights      running 40% 88.7 MiB fp16" in snapshot(reading).splitlines()
    assert "requests" not in snapshot(reading)
    drawn = text_of(draw(reading))
    assert "▸ weights" in drawn
    assert "✓ spawn" in drawn
    assert "KV cache" not in drawn


def test_when_ready_the_figures_are_shown() -> None:
    server = Server()
    server.running.set(3)
    reading = reading_of(server.look(3.0))
    assert line(reading).startswith("tiny: running 3, waiting 0, - requests/s, prompt - tokens/s")
    shown = snapshot(reading)
    assert "3 running, 0 waiting, 0 open" in shown
    assert "0.0% of 1600 tokens" in shown
    assert "weights" not in shown
    assert "3 running" in text_of(draw(reading))
    assert "weights" not in text_of(draw(reading))


def test_a_failure_shows_its_cause_and_its_stage() -> None:
    stages = [{"name": "weights", "state": "failed"}]
    reading = reading_of(Server().look(3.0, phase="failed", cause="no memory", stages=stages))
    assert line(reading) == "tiny: failed, up 3.0 s; no memory; stage weights"
    assert "weights      failed" in snapshot(reading)
    assert title(reading_of(Server().look(3.0, incarnation=2))).endswith(", incarnation 2")


def test_a_server_cannot_write_to_the_terminal() -> None:
    evil = "\x1b[2J\nroot"
    stages = [{"name": evil, "state": "running", "detail": evil}]
    server = Server()
    server.requests.labels("/v1/completions", "\x1b[2J").inc()
    for phase in ("loading", "restarting", "ready", "failed"):
        changes = {"phase": phase, "model": evil, "cause": evil, "stages": stages}
        reading = reading_of(server.look(3.0, **changes))
        for text in (line(reading), snapshot(reading), text_of(draw(reading))):
            assert "\x1b" not in text
            assert "\nroot" not in text


def test_lines_say_once_that_a_server_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    view = LinesView()
    reading = reading_of(Server().look(3.0))
    view.gone("http://x", "refused", None)
    view.gone("http://x", "refused", None)
    view.gone("http://x", "no answer within 5 s", None)
    view.show(reading)
    view.gone("http://x", "no answer within 5 s", reading)
    view.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no answer from http://x: refused; trying on"
    said = [text.split(":")[0] for text in lines[1:]]
    assert said == ["no answer from http", "tiny", "no answer from http"]


def test_the_live_view_draws_without_a_thread_and_gives_the_cursor_back() -> None:
    import threading

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    before = threading.active_count()
    view = LiveView(console)
    reading = reading_of(Server().look(3.0))
    view.show(reading)
    assert threading.active_count() == before
    assert "tiny: ready" in file.getvalue()
    view.gone("http://x", "refused", reading)
    view.gone("http://x", "refused", None)
    assert "no answer from http://x: refused" in file.getvalue()
    view.close()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_units() -> None:
    assert (duration(3.21), duration(65), duration(3723)) == ("3.2 s", "1:05", "1:02:03")
    assert (seconds(None), seconds(0.0123), seconds(1.5)) == ("-", "12.3 ms", "1.50 s")
