"""From finished notes to an exporter: a bounded queue and the task that empties it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trioserve.config.schema import TraceConfig
from trioserve.engine.api import EngineApi
from trioserve.errors import RequestError
from trioserve.tracing.record import MAX_CONTENT, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

UNTRACED = frozenset(
    (
        *("/", "/docs", "/favicon.ico", "/openapi.json"),
        *("/health", "/health/live", "/health/ready", "/ping", "/load"),
        *("/metrics", "/startup", "/version"),
    )
)
BATCH = 256  # requests handed over at once
MAX_HEADER_BYTES = 512
MAX_PATH = 256
LAST_FLUSH_S = 3.0
TOLD_S = 60.0  # between two lines about a collector that does not take spans


class Sender(Protocol):
    """Makes spans of notes and sends them; used by one thread at a time."""

    def send(self, traces: Sequence[RequestTrace]) -> tuple[int, bool]:
        """How many spans were made, and whether the exporter took them. Blocks; never raises."""

    def close(self) -> None:
        """Give up what is being sent; called by another thread."""


class Tracer:
    """Keeps the notes of finished requests until they are sent.

    The loop's thread writes here, the thread that sends sees only what it was given.

    Attributes:
        num_exported: spans the exporter took.
        num_failed: spans it did not take.
        num_dropped: requests that found the queue full, or were left over at the end.
    """

    def __init__(self, config: TraceConfig, engine: EngineApi, sender: Sender) -> None:
        self._config = config
        self._engine = engine
        self._sender = sender
        self._queue: deque[RequestTrace] = deque()
        self._full = trio.Event()  # a batch is there, or the end has come
        self._ending = False
        self._limiter = trio.CapacityLimiter(1)
        self._told_s = -math.inf
        self.num_exported = 0
        self.num_failed = 0
        self.num_dropped = 0

    def begin(
        self, request_id: str, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> RequestTrace | None:
        """Notes for a request; None for probes and pages, which would hide the rest."""
        if path in UNTRACED:
            return None
        context = {b"traceparent": "", b"tracestate": ""}
        for name, value in headers:
            if name.lower() in context and len(value) <= MAX_HEADER_BYTES:
                context[name.lower()] = value.decode("latin1")
        return RequestTrace(
            request_id,
            method[:MAX_PATH],
            path[:MAX_PATH],
            context[b"traceparent"],
            context[b"tracestate"],
            self._config.content,
        )

    def add(self, trace: RequestTrace) -> None:
        """Take the notes of a request that has ended."""
        if len(self._queue) >= self._config.max_queue:
            self.num_dropped += 1
            return
        self._queue.append(trace)
        if len(self._queue) >= BATCH:
            self._full.set()

    def end(self) -> None:
        """Have ``run`` return once all is sent."""
        self._ending = True
        self._full.set()

    async def run(self) -> None:
        """Send batches until ``end``. Cancellation gives up what is not sent yet."""
        while not (self._ending and not self._queue):
            if not self._ending:
                with trio.move_on_after(self._config.interval_s):
                    await self._full.wait()
                if not self._ending:
                    self._full = trio.Event()
            while self._queue:
                await self._send_batch()

    async def _send_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        done = False
        try:
            for trace in batch:
                for ids in trace.prompt_ids:
                    trace.prompts.append(await self._decode(ids))
            num_spans, taken = await trio.to_thread.run_sync(
                self._sender.send, batch, limiter=self._limiter, abandon_on_cancel=True
            )
            done = True
        finally:
            if not done:
                self.num_dropped += len(batch)
        if taken:
            self.num_exported += num_spans
        else:
            self.num_failed += num_spans
            self._tell(num_spans)

    async def _decode(self, token_ids: list[int]) -> str:
        """The prompt as the model saw it; empty where the model is gone by now."""
        try:
            return (await self._engine.decode(token_ids))[:MAX_CONTENT]
        except RequestError:
            return ""

    def _tell(self, num_spans: int) -> None:
        if trio.current_time() - self._told_s >= TOLD_S:
            self._told_s = trio.current_time()
            log.warning(
                "%d spans lost: %s did not take them", num_spans, self._config.endpoint or "nobody"
            )

    def give_up(self) -> None:
        """Count what is left over as dropped, and let go of the exporter."""
        self.num_dropped += len(self._queue)
        self._queue.clear()
        self._sender.close()


class TraceMetrics(Collector):
    """The series of a Tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterator[Metric]:
        """All three."""
        tracer = self._tracer
        yield CounterMetricFamily(
            "trioserve_trace_spans_exported", "Spans the collector took.", tracer.num_exported
        )
        yield CounterMetricFamily(
            "trioserve_trace_spans_failed", "Spans the collector did not take.", tracer.num_failed
        )
        yield CounterMetricFamily(
            "trioserve_trace_requests_dropped",
            "Requests without spans because too many waited.",
            tracer.num_dropped,
        )


@asynccontextmanager
async def open_tracer(
    config: TraceConfig,
    engine: EngineApi,
    make_sender: Callable[[TraceConfig], Sender] | None = None,
) -> AsyncIterator[Tracer | None]:
    """A Tracer whose task runs inside the block; None where ``[trace] endpoint`` is not set.

    Leaving waits up to LAST_FLUSH_S for what is not sent yet. Cancellation gives it up.
    """
    if config.endpoint is None:
        yield None
        return
    # Half a second of imports, for which the loop need not stand still.
    sender = await trio.to_thread.run_sync(partial(make_sender or _otlp_sender, config))
    tracer = Tracer(config, engine, sender)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracer.run)
            yield tracer
            tracer.end()
            nursery.cancel_scope.deadline = trio.current_time() + LAST_FLUSH_S
    finally:
        tracer.give_up()
    if tracer.num_dropped:
        log.warning("the spans of %d requests were not sent", tracer.num_dropped)


def _otlp_sender(config: TraceConfig) -> Sender:
    from trioserve.tracing.spans import SpanSender, otlp_exporter

    exporter: SpanExporter = otlp_exporter(config)
    return SpanSender(config, exporter)
