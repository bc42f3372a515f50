"""A request over HTTP/1.1 on its short way between connection and app.

hypercorn gives each piece of a request to the app through a channel, and takes each part of the
answer as a message: three tasks and a dozen turns of the loop for a small request. Here the
connection calls the request and the request calls the connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import trio
from hypercorn.protocol.events import Body, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID
from hypercorn.typing import HTTPScope
from hypercorn.utils import suppress_body

from trioserve.http.asgi import App, RequestConnection
from trioserve.http.errors import internal_error_reply
from trioserve.http.exchange import Exchange
from trioserve.http.reply import JSON

if TYPE_CHECKING:
    from trioserve.http.connection import H11Only

log = logging.getLogger(__name__)


class DirectStream:
    """One request and its answer, in place of hypercorn's HTTPStream.

    ``handle`` is called by the connection's reader; all else by the request's own task, which
    belongs to the connection's task group.
    """

    def __init__(self, protocol: H11Only, app: App, exchange: Exchange) -> None:
        self._protocol = protocol
        self._app = app
        self._exchange = exchange
        self._scope = trio.CancelScope()
        self._request: RequestConnection | None = None
        self._method = ""
        self._status: int | None = None  # once the answer has begun
        self._sends_body = True
        self._ended = False  # by the end of the answer

    @property
    def idle(self) -> bool:
        """hypercorn's; a request is never idle."""
        return False

    async def handle(self, event: Event) -> None:
        """Take in a part of the request, or that its client has left. Not a checkpoint."""
        if isinstance(event, Body):
            assert self._request is not None
            self._request.body.append(bytes(event.data))
        elif isinstance(event, EndBody):
            assert self._request is not None
            self._request.body.end()
        elif isinstance(event, Request):
            self._begin(event)
        elif isinstance(event, StreamClosed) and not self._ended:
            self._scope.cancel()

    def _begin(self, event: Request) -> None:
        protocol = self._protocol
        path, _, query = event.raw_path.partition(b"?")
        self._method = event.method
        scope = {
            "type": "http",
            "http_version": event.http_version,
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": event.method,
            "scheme": "https" if protocol.ssl else "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": event.headers,
            "client": protocol.client,
            "server": protocol.server,
            "state": {},
            "extensions": {},
        }
        self._request = RequestConnection(self._app, cast(HTTPScope, scope), self._exchange)
        protocol.task_group.spawn(self._run)

    async def _run(self) -> None:
        """Answer the request; whatever goes wrong ends it and its connection alone."""
        assert self._request is not None
        try:
            with self._scope:
                await self._request.run(self)
        except Exception as error:
            log.error("a request failed", exc_info=error)
            await self._give_up()
        except BaseExceptionGroup as group:
            faults, rest = group.split(Exception)
            if faults is not None:
                log.error("a request failed", exc_info=faults)
            if rest is not None:
                raise rest from None  # the connection is cancelled

    async def _give_up(self) -> None:
        """Answer 500 if nothing was sent yet; then the connection closes."""
        if self._ended:
            return
        if self._status is None:
            body = internal_error_reply().body
            assert isinstance(body, bytes)
            length = b"%d" % len(body)
            head = [(b"content-type", JSON.encode()), (b"content-length", length)]
            await self.whole(500, [*head, (b"connection", b"close")], body)
        else:
            self._ended = True
            await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    # ------------------------------------------------------------------- a Sender's methods

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """As Sender's."""
        self._status = status
        self._sends_body = not suppress_body(self._method, status)
        await self._protocol.stream_send(
            Response(stream_id=STREAM_ID, headers=headers, status_code=status)
        )

    async def write(self, data: bytes) -> None:
        """As Sender's."""
        if not self._sends_body:
            return
        if (write := self._exchange.write) is not None:
            await write(data)
        else:
            await self._protocol.stream_send(Body(stream_id=STREAM_ID, data=data))

    async def end(self) -> None:
        """As Sender's."""
        self._ended = True  # first: what follows lets the client's leaving be seen
        await self._protocol.stream_send(EndBody(stream_id=STREAM_ID))
        await self._protocol.stream_send(StreamClosed(stream_id=STREAM_ID))

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """As Sender's."""
        self._status, self._ended = status, True
        if suppress_body(self._method, status):
            body = b""
        await self._protocol.send_whole(status, headers, body)


def direct_stream(protocol: H11Only, app: App, exchange: Exchange) -> Any:
    """A DirectStream where hypercorn's types ask for one of its own."""
    return DirectStream(protocol, app, exchange)
