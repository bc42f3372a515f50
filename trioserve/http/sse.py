"""Streamed answers as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import orjson
import trio

from trioserve.engine.api import TextDelta, Usage
from trioserve.errors import RequestError, RequestFailed
from trioserve.http.exchange import Exchange
from trioserve.http.open_requests import Answers, OpenRequest
from trioserve.http.watch import Watch

log = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
COMMENT = b": still here\n\n"
PROBES_S = (0.05, 0.2, 0.5)  # pauses between the first writes after a client ended its sending


def encode_event(data: object) -> bytes:
    """One event without a name, with ``data`` as JSON."""
    return b"data: %b\n\n" % orjson.dumps(data)


class Renderer(Protocol):
    """Turns deltas into the events of one API: bytes ready to be sent, none if there are none."""

    def opening(self) -> bytes:
        """Sent once, before any delta."""

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """What a delta has to show."""

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """Sent once all choices are finished. ``usage`` is that of the whole request."""

    def failure(self, error: RequestError) -> bytes:
        """Sent in place of the rest when the answer fails; nothing follows it."""


class EventStream:
    """A streamed answer on its way to the client.

    A failure becomes an error event, after which the stream ends without the marker of success.

    Args:
        first: the first event if it came before the response began.
        usage: gives the usage of the whole request.
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
        usage: Callable[[], Usage],
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
        self._said_s = trio.current_time()  # when something was last sent
        self._ended = False

    async def send_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write all events, each as soon as it is there; what came meanwhile is one event.

        Cancellation ends the stream where it is. One scope serves many waits, for a scope for each
        would cost as much as all else here: its deadline is that of the next heartbeat as known
        when it was entered, and when that comes too early the scope is entered again.
        """
        opening = self._renderer.opening()
        first, self._first = self._first, None
        # A first delta may have nothing to show yet: then a comment carries the headers out.
        shown = self._guarded(first) if first is not None else b""
        await write(opening + shown or COMMENT)
        while not self._ended:
            patience_s = self._patience_s()
            with self._request.interruptible(self._said_s + patience_s):
                while not self._ended:
                    await write(await self._next())
            if not self._ended and (piece := self._interrupted(patience_s)):
                await write(piece)

    async def _next(self) -> bytes:
        try:
            while True:
                event = await self._request.wait_for(self._answers)
                if data := self._guarded(event):
                    return data
        except RequestError as error:
            return self._fail(error)
        except Exception:
            return self._bug()

    def _guarded(self, event: tuple[int, TextDelta]) -> bytes:
        try:
            return self._render(event)
        except Exception:
            return self._bug()

    def _bug(self) -> bytes:
        log.exception("a streamed answer failed")
        return self._fail(RequestFailed("internal error", code="internal_error"))

    def _interrupted(self, patience_s: float) -> bytes:
        """What to send after a wait that ended without an event; may be nothing."""
        try:
            woken = self._request.was_woken()
        except RequestError as error:
            return self._fail(error)
        now = trio.current_time()
        if not woken and now < self._said_s + patience_s:
            return b""  # something was said while the scope was open
        self._said_s = now
        return COMMENT

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
        self._watch.delta(delta, choice)
        data = self._renderer.delta(choice, delta)
        if data:
            self._said_s = self._watch.last_s
        if delta.finish_reason is not None:
            self._num_running -= 1
        if self._num_running:
            return data
        self._ended = True
        return data + self._renderer.closing(self._usage)

    def _fail(self, error: RequestError) -> bytes:
        self._ended = True
        self._watch.failed(error)
        return self._renderer.failure(error)
