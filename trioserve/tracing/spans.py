"""Spans made of notes, and the exporter: all that needs the OpenTelemetry SDK.

Everything here runs in the thread of one export at a time, never on the loop. The SDK's own batch
processor is not used: it has a thread of its own that outlives whoever started it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

import orjson
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import trioserve
from trioserve.config.schema import TraceConfig
from trioserve.sampling_params import SamplingParams
from trioserve.tracing.record import ChoiceTrace, RequestTrace

log = logging.getLogger(__name__)

OPERATIONS = {"/v1/completions": "text_completion"}  # every other route that generates is a chat
CLIENT_GONE = "client_gone"
Attributes = dict[str, str | bool | int | float | Sequence[str]]


class SpanSender:
    """Makes spans and gives them to an exporter. Used by one thread at a time."""

    def __init__(self, config: TraceConfig, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended = _Ended()
        # Resource.create would look around with a pool of threads, and exit handlers are not ours.
        resource = Resource(
            {
                "service.name": config.service_name,
                "service.version": trioserve.__version__,
                "telemetry.sdk.language": "python",
                "telemetry.sdk.name": "opentelemetry",
            }
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("trioserve", trioserve.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def send(self, traces: Sequence[RequestTrace]) -> tuple[int, bool]:
        """How many spans were made, and whether the exporter took them. Blocks; never raises."""
        try:
            for trace in traces:
                self._make(trace)
            spans = self._ended.take()
            if not spans:  # none was sampled
                return 0, True
            return len(spans), self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("spans could not be made")
            return len(self._ended.take()) or len(traces), False

    def close(self) -> None:
        """Give up what is being sent; called by another thread."""
        self._exporter.shutdown()

    def _make(self, trace: RequestTrace) -> None:
        carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = self._propagator.extract(carrier, context=Context())
        span = self._tracer.start_span(
            _name(trace),
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_http(trace),
            start_time=trace.start_ns,
        )
        if span.is_recording():
            if trace.choices:
                span.set_attributes(_generation(trace))
            _set_outcome(span, trace)
            inside = set_span_in_context(span, Context())
            for index, choice in enumerate(trace.choices):
                self._make_phases(trace, index, choice, inside)
        span.end(end_time=trace.ns(trace.end_s))

    def _make_phases(
        self, trace: RequestTrace, index: int, choice: ChoiceTrace, inside: Context
    ) -> None:
        """A span for each phase the choice has entered."""
        timings = choice.timings
        if timings is None:
            return
        started, first = timings.started_s, timings.first_token_s
        phases = [("queue", timings.submitted_s, started)]
        if started is not None:
            phases.append(("prefill", started, first))
        if first is not None:
            phases.append(("decode", first, timings.last_token_s))
        for name, begin, end in phases:
            span = self._tracer.start_span(
                name,
                context=inside,
                attributes={"trioserve.choice.index": index},
                start_time=trace.ns(begin),
            )
            # One that was not left ended with the request.
            span.end(end_time=trace.ns(trace.end_s if end is None else end))


class _Ended(SpanProcessor):
    """Keeps the sampled spans that have ended."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep it."""
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        """What has ended since the last call."""
        spans, self._spans = self._spans, []
        return spans


def otlp_exporter(config: TraceConfig) -> SpanExporter:
    """The exporter of ``[trace]``. It has no thread; what it sends, its caller waits for."""
    assert config.endpoint is not None
    parts = urlsplit(config.endpoint)
    if parts.path in ("", "/"):
        parts = parts._replace(path="/v1/traces")
    headers = dict(header.split("=", 1) for header in config.headers)
    return OTLPSpanExporter(
        endpoint=urlunsplit(parts), headers=headers or None, timeout=config.timeout_s
    )


def _name(trace: RequestTrace) -> str:
    """Of few different values, as names of spans should be."""
    if trace.choices:
        return f"{_operation(trace)} {trace.model}"
    return f"{trace.method} {trace.route}" if trace.route else trace.method


def _operation(trace: RequestTrace) -> str:
    return OPERATIONS.get(trace.route or trace.path, "chat")


def _http(trace: RequestTrace) -> Attributes:
    attributes: Attributes = {
        "http.request.method": trace.method,
        "url.path": trace.path,
        "trioserve.request.id": trace.request_id,
    }
    if trace.route:
        attributes["http.route"] = trace.route
    if trace.status is not None:
        attributes["http.response.status_code"] = trace.status
    return attributes


def _generation(trace: RequestTrace) -> Attributes:
    """The attributes of OpenTelemetry's conventions for generative models."""
    usages = [choice.usage for choice in trace.choices if choice.usage is not None]
    of_prompts = usages[:: trace.num_samplings or 1]  # each prompt counted once
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(trace),
        "gen_ai.provider.name": "trioserve",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.finish_reasons": [choice.reason for choice in trace.choices],
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in of_prompts),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in of_prompts),
    }
    if trace.sampling is not None:
        attributes |= _sampling(trace.sampling)
    if trace.num_samplings > 1:
        attributes["gen_ai.request.choice.count"] = trace.num_samplings
    if trace.with_content:
        attributes["trioserve.prompts"] = trace.prompts
        attributes["gen_ai.output.messages"] = orjson.dumps(
            [
                {
                    "role": "assistant",
                    "parts": [{"type": "text", "content": "".join(choice.text)}],
                    "finish_reason": choice.reason,
                }
                for choice in trace.choices
            ]
        ).decode()
    return attributes


def _sampling(sampling: SamplingParams) -> Attributes:
    attributes: Attributes = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def _set_outcome(span: Span, trace: RequestTrace) -> None:
    """Errors of ours make the span one; those of the client have a type alone."""
    gone = any(choice.reason == "gone" for choice in trace.choices) or trace.status is None
    error = trace.error or (CLIENT_GONE if gone else None)
    if error is None and (trace.status or 0) >= 400:
        error = str(trace.status)
    if error is not None:
        span.set_attribute("error.type", error)
    # A stream that fails has said 200 already.
    if trace.error is not None and not 400 <= (trace.status or 0) < 500:
        span.set_status(Status(StatusCode.ERROR, trace.error))
    elif (trace.status or 0) >= 500:
        span.set_status(Status(StatusCode.ERROR))
