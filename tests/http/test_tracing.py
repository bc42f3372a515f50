"""Spans of requests: what they say, and that sending them harms nobody."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import h11
import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from trioserve.config import checks, load
from trioserve.config.schema import TraceConfig
from trioserve.engine.api import Timings
from trioserve.errors import ConfigError, QueueFull, RequestFailed
from trioserve.tracing import tracer as tracer_module
from trioserve.tracing.record import RequestTrace
from trioserve.tracing.spans import SpanSender
from trioserve.tracing.tracer import Sender, Tracer, open_tracer

from .fake_engine import FakeEngine, FakeStream
from .memory import ServedInMemory, serving_in_memory

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "my secret", "max_tokens": 20, "seed": 3}
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
ON = TraceConfig(endpoint="http://collector", interval_s=0.01)


@attrs.define
class Traced:
    served: ServedInMemory
    tracer: Tracer
    exporter: InMemorySpanExporter

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        client = self.served.connect()
        await client.send(method, path, body, **headers)
        return (await client.answer()).status


@asynccontextmanager
async def traced(
    engine: FakeEngine | None = None, config: TraceConfig = ON
) -> AsyncIterator[Traced]:
    """A server whose spans are in memory; all of them once the block is left."""
    engine, exporter = engine or FakeEngine(), InMemorySpanExporter()
    with trio.fail_after(60):
        async with open_tracer(config, engine, lambda c: SpanSender(c, exporter)) as tracer:
            assert tracer is not None
            async with serving_in_memory(engine, tracer=tracer) as served:
                yield Traced(served, tracer, exporter)


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def timed(stream: FakeStream) -> None:
    """Two seconds in the queue, one of prefill, four of decoding."""
    stream.fixed_timings = Timings(100.0, 102.0, 103.0, 107.0)
    stream.say("Hello", " world", finish="stop")


# ---------------------------------------------------------------------------------- contents


async def test_a_request_is_a_server_span_with_its_phases_inside() -> None:
    async with traced(FakeEngine(script=timed)) as running:
        assert await running.call("POST", COMPLETIONS, BODY, traceparent=PARENT) == 200
    spans = by_name(running.exporter.get_finished_spans())
    assert set(spans) == {"text_completion fake", "queue", "prefill", "decode"}
    root = spans.pop("text_completion fake")
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.UNSET
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.end_time > root.start_time
    assert root.resource.attributes["service.name"] == "trioserve"
    attributes = dict(root.attributes or {})
    assert attributes.pop("trioserve.request.id")
    assert attributes == {
        "http.request.method": "POST",
        "url.path": COMPLETIONS,
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trioserve",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 3,
    }
    lasted = {name: span.end_time - span.start_time for name, span in spans.items()}  # type: ignore[operator]
    assert lasted == {"queue": 2e9, "prefill": 1e9, "decode": 4e9}
    assert spans["queue"].end_time == spans["prefill"].start_time
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        assert span.attributes == {"trioserve.choice.index": 0}


async def test_each_choice_has_its_phases_and_each_prompt_counts_once() -> None:
    async with traced(FakeEngine(script=timed)) as running:
        body = BODY | {"prompt": ["one", "three"], "n": 2, "stream": True}
        assert await running.call("POST", COMPLETIONS, body) == 200
    spans = running.exporter.get_finished_spans()
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 8
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",) * 4
    decoded = [s.attributes["trioserve.choice.index"] for s in spans if s.name == "decode"]  # type: ignore[index]
    assert sorted(decoded) == [0, 1, 2, 3]


async def test_phases_that_were_not_left_end_with_the_request() -> None:
    engine = FakeEngine(script=None)
    async with traced(engine) as running:
        client = running.served.connect()
        await client.send("POST", COMPLETIONS, BODY | {"stream": True})
        (stream,) = await engine.submitted()
        now = stream.timings.submitted_s
        stream.fixed_timings = Timings(now, now, None, None)
        stream.fail(RequestFailed("broken"))
        assert (await client.answer()).status == 500
    spans = by_name(running.exporter.get_finished_spans())
    assert set(spans) == {"text_completion fake", "queue", "prefill"}
    assert spans["prefill"].end_time == spans["text_completion fake"].end_time


@pytest.mark.parametrize("content", [False, True])
async def test_text_is_in_the_spans_only_if_wanted(content: bool) -> None:
    config = attrs.evolve(ON, content=content)
    engine = FakeEngine(script=timed)
    async with traced(engine, config) as running:
        body = {"messages": [{"role": "user", "content": "my secret"}], "n": 2}
        assert await running.call("POST", "/v1/chat/completions", body) == 200
    spans = running.exporter.get_finished_spans()
    everything = "".join(span.to_json() for span in spans)
    assert ("secret" in everything) is content
    assert ("Hello" in everything) is content
    assert len(engine.decoded) == int(content)  # nor is it kept, or made
    if content:
        (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
        assert root.attributes is not None
        assert root.attributes["trioserve.prompts"] == ("my secret",)
        answers = json.loads(str(root.attributes["gen_ai.output.messages"]))
        assert answers == 2 * [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "Hello world"}],
                "finish_reason": "stop",
            }
        ]


# ----------------------------------------------------------------------------------- failures


async def test_errors_say_whose_they_are() -> None:
    engine = FakeEngine(script=None)
    async with traced(engine) as running:
        assert await running.call("POST", COMPLETIONS, {"prompt": 1.5}) == 400
        assert await running.call("GET", "/nowhere") == 404
        engine.refuse = QueueFull("full")
        assert await running.call("POST", COMPLETIONS, BODY) == 429
        engine.refuse = None
        client = running.served.connect()
        await client.send("POST", COMPLETIONS, BODY | {"stream": True})
        (stream,) = await engine.submitted()
        stream.say("a")
        await client.head()
        stream.fail(RequestFailed("broken", code="worker_died"))
        await client.chunk()
        await client.chunk()
        client = running.served.connect()
        await client.send("POST", COMPLETIONS, BODY)
        await engine.submitted(2)
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
    roots = [s for s in running.exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
    told = [
        (
            span.name,
            span.attributes.get("http.response.status_code"),
            span.attributes.get("error.type"),
            span.status.status_code.name,
        )
        for span in roots
        if span.attributes is not None
    ]
    assert told == [
        ("POST /v1/completions", 400, "invalid_request", "UNSET"),
        ("GET", 404, "404", "UNSET"),
        ("POST /v1/completions", 429, "queue_full", "UNSET"),
        ("text_completion fake", 200, "worker_died", "ERROR"),
        ("text_completion fake", None, "client_gone", "UNSET"),
    ]


# ----------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("traceparent", "ratio", "num_roots", "joined"),
    [
        (PARENT, 0.0, 1, True),  # who began the trace has decided
        (PARENT[:-1] + "0", 1.0, 0, False),
        ("", 0.0, 0, False),
        ("", 1.0, 1, False),
        ("00-xyz-01", 1.0, 1, False),
        (f"00-{'0' * 32}-{PARENT_ID}-01", 1.0, 1, False),
        (PARENT + "x" * 5000, 1.0, 1, False),
    ],
)
async def test_the_parent_decides_and_else_the_ratio(
    traceparent: str, ratio: float, num_roots: int, joined: bool
) -> None:
    async with traced(config=attrs.evolve(ON, sample_ratio=ratio)) as running:
        await running.call("POST", COMPLETIONS, BODY, traceparent=traceparent)
    spans = running.exporter.get_finished_spans()
    roots = [span for span in spans if span.kind is SpanKind.SERVER]
    assert len(roots) == num_roots
    assert len(spans) == 4 * num_roots
    assert any(f"{span.context.trace_id:032x}" == TRACE_ID for span in roots) is joined
    assert running.tracer.num_exported == len(spans)


async def test_probes_have_no_spans() -> None:
    async with traced() as running:
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version", "/load"):
            assert await running.call("GET", path) == 200
        assert await running.call("GET", "/v1/models") == 200
    assert [s.name for s in running.exporter.get_finished_spans()] == ["GET /v1/models"]


# ------------------------------------------------------------------------------------ sending


class Refusing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("broken")


@pytest.mark.parametrize("exporter", [Refusing(), Broken()])
async def test_a_collector_that_refuses_is_told_of_once(
    exporter: SpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with open_tracer(ON, FakeEngine(), lambda c: SpanSender(c, exporter)) as tracer:
        assert tracer is not None
        for num in (1, 2, 3):
            tracer.add(make_trace(tracer))
            await until(lambda num=num: tracer.num_failed >= num)
    assert (tracer.num_exported, tracer.num_failed, tracer.num_dropped) == (0, 3, 0)
    assert caplog.text.count("http://collector did not take them") == 1


async def until(condition: Callable[[], bool]) -> None:
    """What a thread does wakes nobody here, and takes a moment only."""
    while not condition():
        await trio.lowlevel.checkpoint()


def make_trace(tracer: Tracer, path: str = "/x") -> RequestTrace:
    trace = tracer.begin("id", "GET", path, [])
    assert trace is not None
    trace.end(None, 404, "", None)
    return trace


class Stuck(Sender):
    def __init__(self, config: TraceConfig) -> None:
        self.closed = threading.Event()
        self.began = threading.Event()

    def send(self, traces: Sequence[RequestTrace]) -> tuple[int, bool]:
        self.began.set()
        self.closed.wait(60)
        return len(traces), False

    def close(self) -> None:
        self.closed.set()


async def test_what_a_stuck_collector_leaves_over_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracer_module, "LAST_FLUSH_S", 0.05)
    sender = Stuck(ON)
    config = attrs.evolve(ON, max_queue=3)
    with trio.fail_after(30):
        async with open_tracer(config, FakeEngine(), lambda c: sender) as tracer:
            assert tracer is not None
            tracer.add(make_trace(tracer))
            await until(sender.began.is_set)
            for _ in range(5):
                tracer.add(make_trace(tracer))
            assert tracer.num_dropped == 2
    assert sender.closed.is_set()
    assert tracer.num_dropped == 6  # and the three kept, and the one in flight
    assert "the spans of 6 requests were not sent" in caplog.text


async def test_cancellation_waits_for_nothing() -> None:
    sender = Stuck(ON)
    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with open_tracer(ON, FakeEngine(), lambda c: sender) as tracer:
                assert tracer is not None
                tracer.add(make_trace(tracer))
                scope.cancel()
                await trio.sleep_forever()
    assert sender.closed.is_set()
    assert tracer.num_dropped == 1


async def test_a_full_batch_is_sent_at_once() -> None:
    exporter = InMemorySpanExporter()
    config = attrs.evolve(ON, interval_s=1000.0)
    with trio.fail_after(60):
        async with open_tracer(config, FakeEngine(), lambda c: SpanSender(c, exporter)) as tracer:
            assert tracer is not None
            for _ in range(tracer_module.BATCH):
                tracer.add(make_trace(tracer))
            await until(lambda: tracer.num_exported == tracer_module.BATCH)


async def receive(stream: trio.SocketStream, status: int) -> tuple[dict[bytes, bytes], bytes]:
    """The head and body of one request, answered with ``status``."""
    http = h11.Connection(h11.SERVER)
    headers: dict[bytes, bytes] = {}
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Request):
            headers = dict(event.headers) | {b"target": event.target}
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
    answer = h11.Response(status_code=status, headers=[("Content-Length", "0")])
    data = (http.send(answer) or b"") + (http.send(h11.EndOfMessage()) or b"")
    await stream.send_all(data)
    return headers, bytes(body)


@pytest.mark.parametrize("status", [200, 400])
async def test_otlp_over_http(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """The exporter that is shipped, to a collector that is one."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    config = attrs.evolve(
        ON, endpoint=f"http://127.0.0.1:{port}", headers=("x-key=a=b",), service_name="mine"
    )
    received: list[tuple[dict[bytes, bytes], bytes]] = []

    async def collect(stream: trio.SocketStream) -> None:
        async with stream:
            received.append(await receive(stream, status))

    engine = FakeEngine(script=timed)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, collect, listeners)
            async with open_tracer(config, engine) as tracer:
                assert tracer is not None
                async with serving_in_memory(engine, tracer=tracer) as served:
                    client = served.connect()
                    await client.send("POST", COMPLETIONS, BODY, traceparent=PARENT)
                    assert (await client.answer()).status == 200
            nursery.cancel_scope.cancel()
    ((headers, body),) = received
    assert headers[b"target"] == b"/v1/traces"
    assert headers[b"x-key"] == b"a=b"
    assert headers[b"content-type"] == b"application/x-protobuf"
    message = ExportTraceServiceRequest.FromString(body)
    (resource,) = message.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "mine"
    spans = resource.scope_spans[0].spans
    assert {span.name for span in spans} == {"text_completion fake", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert b"secret" not in body
    taken = (4, 0) if status == 200 else (0, 4)
    assert (tracer.num_exported, tracer.num_failed) == taken


# ------------------------------------------------------------------------------ configuration


def config_errors(**values: Any) -> str:
    overrides = {f"trace.{name}": value for name, value in values.items()}
    with pytest.raises(ConfigError) as caught:
        load(None, env={}, overrides=overrides)
    return str(caught.value)


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_is_installed", lambda module: False)
    text = config_errors(endpoint="http://localhost:4318")
    assert 'pip install "trioserve[otel]"' in text
    assert "key 'trace.endpoint'" in text
    assert not load(None, env={}, overrides={}).config.trace.endpoint  # nothing asked, no fault


def test_what_is_installed_is_found_without_importing_it() -> None:
    assert checks._is_installed("opentelemetry.exporter.otlp.proto.http")
    assert not checks._is_installed("opentelemetry.nothing.of.it")
    assert not checks._is_installed("no_such_package.at.all")


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://x", "http://", "http://x:port", "http://[::1"]
)
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    assert "trace.endpoint" in config_errors(endpoint=endpoint)


@pytest.mark.parametrize("header", ["name", "=value", "a=b\nc", "ä=b"])
def test_a_header_that_is_none_is_not_shown(header: str) -> None:
    text = config_errors(headers=["fine=1", header])
    assert "entry 2 must be" in text
    assert repr(header)[1:-1] not in text.replace('"name=value"', "")


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, trioserve.main, trioserve.http.server;"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'requests'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


async def test_without_an_endpoint_there_is_no_tracer() -> None:
    async with open_tracer(TraceConfig(), FakeEngine()) as tracer:
        assert tracer is None
