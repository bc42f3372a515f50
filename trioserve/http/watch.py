"""What the metrics learn of one request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.engine.api import TextDelta
from trioserve.errors import DeadlineExceeded, RequestCut, RequestError
from trioserve.http.metrics import Metrics


class Watch:
    """Measures one accepted request.

    Args:
        metrics: where the figures go.
        num_choices: answers the request will have.
        num_prompt_tokens: of all its prompts, each counted once.

    Attributes:
        last_s: when the last tokens were delivered, or the request began.
    """

    def __init__(self, metrics: Metrics, num_choices: int, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._started = self.last_s = trio.current_time()
        self._num_running = num_choices
        self._has_token = False
        metrics.prompt_tokens.inc(num_prompt_tokens)

    def delta(self, delta: TextDelta) -> None:
        """Note a delta of any choice."""
        num_tokens = len(delta.token_ids)
        if num_tokens:
            now = trio.current_time()
            self._metrics.output_tokens.inc(num_tokens)
            if self._has_token:
                self._metrics.itl.observe((now - self.last_s) / num_tokens)
            else:
                self._has_token = True
                self._metrics.ttft.observe(now - self._started)
            self.last_s = now
        if delta.finish_reason is not None:
            self._num_running -= 1
            self._metrics.count_finish(delta.finish_reason)

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
        if isinstance(error, DeadlineExceeded):
            self._end_rest("timeout")
        else:
            self._end_rest("cut" if isinstance(error, RequestCut) else "error")

    def end(self) -> None:
        """The request is over; choices that still ran lost their client."""
        self._metrics.e2e.observe(trio.current_time() - self._started)
        self._end_rest("gone")

    def _end_rest(self, reason: str) -> None:
        for _ in range(self._num_running):
            self._metrics.count_finish(reason)
        self._num_running = 0
