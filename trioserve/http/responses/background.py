"""Responses that outlive the connection that asked for them, and their events."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import trio

from trioserve.errors import RequestError, RequestFailed
from trioserve.http.exchange import Exchange
from trioserve.http.generation import GenerationCall, GenerationService, Order
from trioserve.http.open_requests import Limits, OpenRequest
from trioserve.http.request_log import RequestRecord
from trioserve.http.request_state import RequestState
from trioserve.http.responses.render import Draft, ResponseCancelled, ResponsesRenderer
from trioserve.http.responses.store import Kept, Turn
from trioserve.http.sse import COMMENT

log = logging.getLogger(__name__)

EVENTS_PER_WRITE = 64


class EventLog:
    """The events of one response, the n-th being that with sequence number n.

    Written by the task that answers, read by any number of followers.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ended = False
        self._news = trio.Event()

    async def write(self, data: bytes) -> None:
        """Take in whole events; comments are left out. Never waits."""
        for event in data.split(b"\n\n"):
            if event and not event.startswith(b":"):
                self.events.append(event + b"\n\n")
        self._tell()

    def end(self) -> None:
        """No more will come. Idempotent."""
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def wait(self, num_events: int) -> None:
        """Wait until there are more than ``num_events``, or no more will come."""
        while len(self.events) <= num_events and not self.ended:
            await self._news.wait()

    @classmethod
    def of(cls, kept: Kept) -> EventLog | None:
        """The log of a response that has ended, if its events were kept."""
        if kept.events is None:
            return None
        log = cls()
        log.events = list(kept.events)
        log.end()
        return log


class LogStream:
    """Sends a log from one event on, also while it grows; ends with its reader.

    Args:
        first: number of the first event to send.
        heartbeat_s: a comment is sent after silence of this length.
    """

    def __init__(self, log: EventLog, first: int, heartbeat_s: float) -> None:
        self._log = log
        self._next = first
        self._heartbeat_s = heartbeat_s

    async def send_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write all events. Cancellation ends this reader alone."""
        while True:
            events = self._log.events[self._next : self._next + EVENTS_PER_WRITE]
            self._next += len(events)
            if events:
                await write(b"".join(events))
            elif self._log.ended:
                return
            else:
                await self._wait(write)

    async def _wait(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        with trio.move_on_after(self._heartbeat_s) as silence:
            await self._log.wait(self._next)
        if silence.cancelled_caught:
            await write(COMMENT)


class Run:
    """A background response that is being made.

    Written by the task that makes it; ``cancel`` is called by others and never waits.

    Attributes:
        final: the response object once it has ended.
        log: its events, if they were asked for.
        ended: set once it runs no more.
    """

    def __init__(self, draft: Draft, turn: Turn, opened: OpenRequest) -> None:
        self.draft = draft
        self.turn = turn
        self.final: dict[str, Any] | None = None
        self.log = EventLog() if draft.head.body.stream else None
        self.ended = trio.Event()
        self._opened = opened

    @property
    def id(self) -> str:
        """The response's id."""
        return self.draft.head.id

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now: queued until a step has worked on it."""
        begun = any(stream.started for stream in self._opened.streams)
        return self.final or self.draft.begun("in_progress" if begun else "queued")

    def cancel(self) -> None:
        """End it. Idempotent."""
        self._opened.end(ResponseCancelled())


class BackgroundResponses:
    """Owns the background responses of one app that have not ended.

    Their number is bounded by the engine's queue, like that of all requests.

    Args:
        on_end: given each as it ends.
    """

    def __init__(self, service: GenerationService, on_end: Callable[[Run], None]) -> None:
        self._service = service
        self._on_end = on_end
        self._runs: dict[str, Run] = {}

    def get(self, id: str) -> Run | None:
        """One that has not ended, or None."""
        return self._runs.get(id)

    async def start(self, request_id: str, draft: Draft, turn: Turn, order: Order) -> Run:
        """Submit an order and make its response in a task of the server's.

        Cancellation before this returns ends the work.

        Raises:
            RequestError: the engine refused it, or the server is ending.
        """
        tasks = self._service.context.background
        run = await tasks.start(self._make, request_id, draft, turn, order)
        assert isinstance(run, Run)
        return run

    async def _make(
        self,
        request_id: str,
        draft: Draft,
        turn: Turn,
        order: Order,
        task_status: trio.TaskStatus[Run],
    ) -> None:
        body = draft.head.body
        limits = self._service.limits.at_most(Limits(body.timeout_s, body.queue_timeout_s))
        with ExitStack() as lifetime:
            open_requests = self._service.context.open_requests
            opened = lifetime.enter_context(open_requests.opened(request_id))
            tasks = AsyncExitStack()
            state = RequestState(request_id, Exchange(), lifetime, tasks)
            if self._service.context.config.log.requests:
                state.record = RequestRecord(self._service.context.config.log)
                lifetime.callback(_log, state.record, opened)
            call = GenerationCall(self._service, state, opened)
            call.call_answer(draft.head.stem)
            call.submit(order)
            run = self._runs[draft.head.id] = Run(draft, turn, opened)
            lifetime.callback(self._end, run)
            async with tasks:
                if limits.any:
                    (await state.nursery()).start_soon(opened.keep, limits)
                await _answer(call, run, task_status)
                state.end_tasks()

    def _end(self, run: Run) -> None:
        del self._runs[run.id]
        if run.log is not None:
            run.log.end()
        try:
            self._on_end(run)
        except Exception:  # it would end the server
            log.exception("background response %s is not kept", run.id)
        run.ended.set()


def _log(record: RequestRecord, opened: OpenRequest) -> None:
    # The call that asked for it has a line of its own, which knows nothing of the answer.
    record.write(
        id=opened.id,
        method="POST",
        route="/v1/responses",
        status=200,
        seconds=trio.current_time() - opened.opened_s,
        client=("background",),
    )


async def _answer(call: GenerationCall, run: Run, task_status: trio.TaskStatus[Run]) -> None:
    """Make the response of ``run``; whatever happens becomes its end."""
    log_write = run.log.write if run.log is not None else None

    def keep(final: dict[str, Any]) -> None:
        run.final = final

    renderer = ResponsesRenderer(run.draft, keep)
    if run.log is not None:
        await run.log.write(renderer.announcement())
    task_status.started(run)
    try:
        if log_write is not None:
            events = await call.events(renderer)
            await events.send_to(log_write)
        else:
            [choice] = await call.collect()
            run.draft.take(choice)
            renderer.closing(call.usage)
    except RequestError as error:
        failed = renderer.failure(error)
    except Exception:
        log.exception("background response %s failed", run.id)
        failed = renderer.failure(RequestFailed("internal error", code="internal_error"))
    else:
        return
    if run.log is not None:
        await run.log.write(failed)
