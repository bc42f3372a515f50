"""Requests being answered: what a drain waits for and, at its deadline, ends."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import attrs
import trio

from trioserve.engine.api import RequestStream, TextDelta
from trioserve.errors import DeadlineExceeded, RequestCut, RequestError, RequestFailed

T = TypeVar("T")


@attrs.frozen
class Limits:
    """How long a request may take from its head on, in seconds; infinite for no limit."""

    total_s: float  # to its last token
    queue_s: float  # to the first step that works on it

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return min(self.total_s, self.queue_s) < math.inf

    def at_most(self, other: Limits) -> Limits:
        """The stricter of both."""
        return Limits(min(self.total_s, other.total_s), min(self.queue_s, other.queue_s))


class OpenRequest:
    """One request being answered.

    Read by its handler's task; ``wake`` and ``end`` are called by others and never wait.

    Attributes:
        id: as clients know it; several requests may have one id, for clients choose them.
        opened_s: when it came, by trio's clock.
        streams: what was submitted for it.
        other_id: what its answer is called, where that is not made from ``id``.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.opened_s = trio.current_time()
        self.streams: list[RequestStream] = []
        self.other_id = ""
        self._error: RequestError | None = None  # that ends it
        self._woken = False
        self._waits = False  # and may be cancelled: nothing is half done
        self._scope: trio.CancelScope | None = None

    def wake(self) -> None:
        """End the present wait for an event, or the next one if there is none."""
        self._woken = True
        if self._waits and self._scope is not None:
            self._scope.cancel()

    def end(self, error: RequestError) -> None:
        """End the request: its work is aborted now, and its handler gets ``error`` at the present
        or next wait. Only the first call counts."""
        if self._error is None:
            self._error = error
            self.wake()  # first, or a waiting handler would be given the end of the closed stream
            for stream in self.streams:
                stream.close()

    def check(self) -> None:
        """Raise what ended the request, if anything has."""
        if self._error is not None:
            raise self._error

    async def keep(self, limits: Limits) -> None:
        """End the request when a limit is reached.

        A task of the request's own nursery, so that the work ends on time also while the handler
        is inside a write that cannot be cancelled. Returns when no limit is left.
        """
        if limits.queue_s < limits.total_s:
            await trio.sleep_until(self.opened_s + limits.queue_s)
            if not any(stream.started for stream in self.streams):
                self.end(
                    DeadlineExceeded(
                        f"the request was not begun within {limits.queue_s:g} s; the server is busy"
                    )
                )
                return
        if limits.total_s < math.inf:
            await trio.sleep_until(self.opened_s + limits.total_s)
            self.end(DeadlineExceeded(f"the request was not done within {limits.total_s:g} s"))

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()``; the request's end cancels it.

        Raises:
            RequestError: what ended the request.
        """
        self.check()
        with trio.CancelScope() as self._scope:
            self._waits = True
            try:
                result = await work()
            except RequestError:
                self.check()
                raise
            finally:
                self._waits = False
            # The end may have come while the task was about to go on; what an aborted stream has
            # given by then is no whole answer, nor is its error the reason.
            self.check()
            return result
        self.check()
        raise AssertionError("woken while not waiting for events")

    async def first_event(self, answers: Answers, timeout_s: float) -> tuple[int, TextDelta] | None:
        """The first of ``answers``, or None after silence or a call of ``wake``.

        Cancellation loses nothing.

        Raises:
            RequestError: the answer failed, or what ended the request.
        """
        with self.interruptible(trio.current_time() + timeout_s):
            return await self.wait_for(answers)
        self.was_woken()
        return None

    def interruptible(self, deadline_s: float) -> trio.CancelScope:
        """A scope in which ``wait_for`` is ended by the deadline, ``wake`` or ``end``."""
        self._scope = trio.CancelScope(deadline=deadline_s)
        return self._scope

    async def wait_for(self, answers: Answers) -> tuple[int, TextDelta]:
        """The next of ``answers``; being woken cancels the present ``interruptible`` scope.

        Cancellation loses nothing.

        Raises:
            RequestError: the answer failed, or what ended the request.
        """
        self.check()
        if self._woken:
            assert self._scope is not None
            self._scope.cancel()
        self._waits = True
        try:
            return await answers.next()
        except RequestError:
            self.check()
            raise
        finally:
            self._waits = False

    def was_woken(self) -> bool:
        """Whether ``wake`` was called since this was last asked.

        Raises:
            RequestError: what ended the request.
        """
        self.check()
        woken, self._woken = self._woken, False
        return woken


class OpenRequests:
    """All requests being answered."""

    def __init__(self) -> None:
        self._requests: set[OpenRequest] = set()
        self._none: trio.Event | None = None  # of a drain that waits

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._requests)

    @contextmanager
    def opened(self, id: str = "") -> Iterator[OpenRequest]:
        """A request that is open until the ``with`` ends."""
        request = OpenRequest(id)
        self._requests.add(request)
        try:
            yield request
        finally:
            self._requests.discard(request)
            if self._none is not None and not self._requests:
                self._none.set()

    def find(self, id: str) -> list[OpenRequest]:
        """The open requests with this id, the oldest first."""
        found = [request for request in self._requests if id in (request.id, request.other_id)]
        return sorted(found, key=lambda request: request.opened_s)

    async def wait_none(self) -> None:
        """Wait until no request is open."""
        while self._requests:
            self._none = trio.Event()
            await self._none.wait()

    def cut_all(self) -> int:
        """End every open request with RequestCut; returns how many there were."""
        for request in self._requests:
            request.end(
                RequestCut("the server is shutting down; the request was cut at its deadline")
            )
        return len(self._requests)


class Answers:
    """The streams of one request read as one sequence of (choice, delta).

    With several streams, one task per stream waits in the request's own nursery and holds at most
    one delta; what comes meanwhile coalesces behind it.
    """

    def __init__(self, streams: list[RequestStream]) -> None:
        self.streams = streams
        self._channel: trio.MemoryReceiveChannel[tuple[int, TextDelta | Exception]] | None = None

    @classmethod
    async def open(
        cls, streams: list[RequestStream], nursery: Callable[[], Awaitable[trio.Nursery]]
    ) -> Answers:
        """Begin to read them; ``nursery`` is only asked for if there are several. Cancellation is
        the request's."""
        answers = cls(streams)
        if len(streams) > 1:
            tasks = await nursery()
            send, answers._channel = trio.open_memory_channel[tuple[int, TextDelta | Exception]](0)
            for index, stream in enumerate(streams):
                tasks.start_soon(_pump, index, stream, send)
        return answers

    async def next(self) -> tuple[int, TextDelta]:
        """The next delta of any choice. Cancellation loses nothing."""
        if self._channel is None:
            delta = await self.streams[0].__anext__()
            refuse_abort(delta)
            return 0, delta
        index, item = await self._channel.receive()
        if isinstance(item, Exception):
            raise item
        return index, item


def refuse_abort(delta: TextDelta) -> None:
    """Raise RequestFailed if the delta ends an answer that was aborted under its reader.

    No finish reason of OpenAI's stands for that, and it must not look like a whole answer.
    """
    if delta.finish_reason == "abort":
        raise RequestFailed("the request was aborted by the server", code="aborted")


async def _pump(
    index: int,
    stream: RequestStream,
    channel: trio.MemorySendChannel[tuple[int, TextDelta | Exception]],
) -> None:
    try:
        async for delta in stream:
            refuse_abort(delta)
            await channel.send((index, delta))
    except Exception as error:  # raised again where it can become an answer
        await channel.send((index, error))
