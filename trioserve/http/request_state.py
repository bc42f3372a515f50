"""What belongs to one request, for whoever works on it in its own task."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.http.body import RequestBody
from trioserve.http.exchange import Exchange
from trioserve.http.request_log import RequestRecord

if TYPE_CHECKING:
    from trioserve.tracing.record import RequestTrace


@attrs.define
class RequestState:
    """What belongs to one request, from its first byte to its last.

    Attributes:
        lifetime: closed when it ends, however that is.
        tasks: holds the nursery of its tasks, once it has one; left before ``lifetime`` closes.
    """

    id: str
    exchange: Exchange
    lifetime: ExitStack
    tasks: AsyncExitStack
    method: str = ""
    path: str = ""
    headers: list[tuple[bytes, bytes]] = attrs.field(factory=list)  # names in small letters
    body: RequestBody = attrs.field(factory=lambda: RequestBody(0))
    status: int | None = None
    route: str | None = None
    accepted: bool | None = None  # whether anything was submitted; None: it asks for no text
    error: Exception | None = None  # that became its answer
    trace: RequestTrace | None = None
    record: RequestRecord | None = None  # for the log, if requests are logged
    _nursery: trio.Nursery | None = None

    def header(self, name: bytes, default: str = "") -> str:
        """The first header of this name, which is given in small letters."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin1")
        return default

    async def nursery(self) -> trio.Nursery:
        """The nursery of the request's tasks, opened when first asked for: most have none, and it
        costs a turn of the loop. Must be asked for outside of any scope the request enters. Not a
        checkpoint."""
        if self._nursery is None:
            self._nursery = await self.tasks.enter_async_context(trio.open_nursery())
        return self._nursery

    def end_tasks(self) -> None:
        """Cancel them: the request is answered."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()


_present: ContextVar[RequestState] = ContextVar("trioserve.http.request")


def enter_request(state: RequestState) -> None:
    """Make ``state`` that of this task."""
    _present.set(state)


def request_state() -> RequestState:
    """The state of the request being handled."""
    return _present.get()
