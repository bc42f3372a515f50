"""Streamed answers as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import orjson

from trioserve.engine.api import TextDelta, Usage
from trioserve.errors import RequestError, RequestFailed
from trioserve.http.connection import Exchange
from trioserve.http.errors import error_object
from trioserve.http.open_requests import Answers, OpenRequest
from trioserve.http.watch import Watch

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
COMMENT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
PROBES_S = (0.05, 0.2, 0.5)  # pauses between the first writes after a client ended its sending


def encode_event(data: object) -> bytes:
    """One event with ``data`` as JSON."""
    return b"data: %b\n\n" % orjson.dumps(data)


class Renderer(Protocol):
    """Turns deltas into the JSON of one route."""

    def opening(self) -> list[object]:
        """Chunks sent before any delta."""

    def chunk(self, choice: int, delta: TextDelta) -> object | None:
        """The chunk for a delta, or None if there is nothing to say."""

    def usage_chunk(self, usage: Usage) -> object:
        """The chunk with the usage, sent last."""


class EventStream:
    """The body of a streamed answer: an async iterator over pieces of the event stream.

    A class and not a generator: it owns nothing that must be closed, and no scope is left open
    between two pieces. A failure becomes an error event, after which the stream ends without the
    marker of success.

    Args:
        first: the first event if it came before the response began.
        usage: called once all choices are finished, if the client asked for usage.
        watch: told of each delta and of a failure.
    """

    def __init__(
        self,
        answers: Answers,
        renderer: Renderer,
        request: OpenRequest,
        exchange: Exchange,
        *,
        heartbeat_s: float,
        first: tuple[int, TextDelta] | None,
        usage: Callable[[], Usage] | None,
        watch: Watch,
    ) -> None:
        self._answers = answers
        self._renderer = renderer
        self._request = request
        self._exchange = exchange
        self._heartbeat_s = heartbeat_s
        self._first = first
        self._usage = usage
        self._watch = watch
        self._num_running = len(answers.streams)
        self._num_probes = 0
        self._opened = False
        self._ended = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        """The next piece, one or several events; waits for the engine, at most a heartbeat.

        Cancellation loses nothing.
        """
        if self._ended:
            raise StopAsyncIteration
        try:
            return await self._next()
        except RequestError as error:
            return self._fail(error)
        except Exception:
            log.exception("a streamed answer failed")
            return self._fail(RequestFailed("internal error", code="internal_error"))

    def _fail(self, error: RequestError) -> bytes:
        self._ended = True
        self._watch.failed(error)
        return encode_event(error_object(error))

    async def _next(self) -> bytes:
        if not self._opened:
            self._opened = True
            opening = b"".join(map(encode_event, self._renderer.opening()))
            first, self._first = self._first, None
            return opening + (self._render(first) if first is not None else COMMENT)
        while True:
            event = await self._request.next_event(self._answers, self._patience_s())
            if event is None:
                return COMMENT
            if data := self._render(event):
                return data

    def _patience_s(self) -> float:
        """How long to be silent.

        A client that ended its sending may read on or be gone, and only writes tell; so a few
        follow soon after it.
        """
        if self._exchange.half_closed and self._num_probes < len(PROBES_S):
            self._num_probes += 1
            return min(PROBES_S[self._num_probes - 1], self._heartbeat_s)
        return self._heartbeat_s

    def _render(self, event: tuple[int, TextDelta]) -> bytes:
        choice, delta = event
        self._watch.delta(delta)
        chunk = self._renderer.chunk(choice, delta)
        data = encode_event(chunk) if chunk is not None else b""
        if delta.finish_reason is not None:
            self._num_running -= 1
        if self._num_running:
            return data
        self._ended = True
        if self._usage is not None:
            data += encode_event(self._renderer.usage_chunk(self._usage()))
        return data + DONE
