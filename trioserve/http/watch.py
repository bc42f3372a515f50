"""What the metrics and the trace learn of one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from trioserve.engine.api import RequestStream, TextDelta
from trioserve.errors import DeadlineExceeded, RequestCut, RequestError
from trioserve.http.metrics import WHOLE, Metrics
from trioserve.sampling_params import SamplingParams
from trioserve.tracing.record import RequestTrace


class Watch:
    """Measures one accepted request, from its submission to its end.

    Args:
        metrics: where the figures go.
        num_choices: answers the request will have.
        num_prompt_tokens: of all its prompts, each counted once.
        streams: one for each answer, in the order of choices.
        samplings: one for each answer to a prompt.
        streamed: whether the client sees each delta as it comes.
        trace: told the same as the metrics.

    Attributes:
        last_s: when the last tokens were delivered, or the request began.
    """

    def __init__(
        self,
        metrics: Metrics,
        num_choices: int,
        num_prompt_tokens: int,
        *,
        streams: Sequence[RequestStream] = (),
        samplings: Sequence[SamplingParams] = (),
        streamed: bool = False,
        trace: RequestTrace | None = None,
    ) -> None:
        self._metrics = metrics
        self._started = self.last_s = trio.current_time()
        self._running: dict[int, float | None] = dict.fromkeys(range(num_choices))  # last delivery
        self._has_token = False
        self._streams = streams
        self._num_samplings = len(samplings) or 1
        self._streamed = streamed
        self._trace = trace
        metrics.accepted.inc()
        metrics.prompt_tokens.inc(num_prompt_tokens)
        for stream in streams[:: self._num_samplings]:
            metrics.prompt_length.observe(len(stream.prompt_token_ids))
        if samplings:
            metrics.params_n.observe(len(samplings))
            if samplings[0].max_tokens is not None:
                metrics.params_max_tokens.observe(samplings[0].max_tokens)
        if trace is not None:
            trace.accept(streams, samplings)

    def delta(self, delta: TextDelta, choice: int = 0) -> None:
        """Note a delta of a choice."""
        num_tokens = len(delta.token_ids)
        if num_tokens:
            now, metrics = trio.current_time(), self._metrics
            metrics.output_tokens.inc(num_tokens)
            if not self._has_token:
                self._has_token = True
                metrics.ttft.observe(now - self._started)
            # A choice's first delivery waited for its prefill, and whole answers are read late.
            elif self._streamed and (last_s := self._running[choice]) is not None:
                metrics.itl.observe((now - last_s) / num_tokens)
            self._running[choice] = self.last_s = now
        if self._trace is not None:
            self._trace.add(choice, delta)
        if delta.finish_reason is not None:
            self._end_choice(choice, delta.finish_reason)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Notes a RequestError that passes through."""
        try:
            yield
        except RequestError as error:
            self.failed(error)
            raise

    def failed(self, error: RequestError) -> None:
        """Note that the choices still running ended with ``error``."""
        if self._trace is not None:
            self._trace.fail(error)
        if isinstance(error, DeadlineExceeded):
            self._end_rest("timeout")
        elif isinstance(error, RequestCut):
            self._end_rest("cut")
        else:
            self._end_rest("aborted" if error.code == "aborted" else "error")

    def end(self) -> None:
        """The request is over; choices that still ran lost their client."""
        self._end_rest("gone")
        self._metrics.e2e.observe(trio.current_time() - self._started)
        for stream in self._streams[:: self._num_samplings]:
            self._metrics.cached_tokens.inc(stream.usage.cached_tokens)

    def _end_rest(self, reason: str) -> None:
        for choice in list(self._running):
            self._end_choice(choice, reason)

    def _end_choice(self, choice: int, reason: str) -> None:
        del self._running[choice]
        metrics = self._metrics
        metrics.count_finish(reason)
        if self._trace is not None:
            self._trace.end_choice(choice, reason)
        if not self._streams:
            return
        stream = self._streams[choice]
        num_tokens, timings = stream.usage.completion_tokens, stream.timings
        metrics.output_length.observe(num_tokens)
        started, first, last = timings.started_s, timings.first_token_s, timings.last_token_s
        if started is None:  # no step ever began it: all its time was waiting
            metrics.queue.observe(trio.current_time() - self._started)
            return
        metrics.queue.observe(started - timings.submitted_s)
        if first is None:
            return
        metrics.prefill.observe(first - started)
        # What was ended from outside would make decoding look short.
        if reason in WHOLE and last is not None:
            metrics.decode.observe(last - first)
            metrics.inference.observe(last - started)
            if num_tokens > 1:
                metrics.tpot.observe((last - first) / (num_tokens - 1))
