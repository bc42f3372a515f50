"""One client connection: hypercorn's HTTP/1.1 machinery with the faults that matter here mended.

hypercorn treats the end of a client's sending as the client being gone, cannot time out a client
that stops reading, stops reading itself when bytes follow a request, and lets any upgrade request
into code that can fail. The classes here replace those parts; docs/http.md lists each with its
test.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import attrs
import h11
import orjson
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import (
    STREAM_ID,
    H2CProtocolRequiredError,
    H2ProtocolAssumedError,
    H11Protocol,
)
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from trioserve.http.asgi import App
from trioserve.http.direct import direct_stream
from trioserve.http.errors import http_error_object
from trioserve.http.exchange import Exchange
from trioserve.http.http2 import are_settings, mend, release
from trioserve.http.stream import ClientStream
from trioserve.ipc.framing import FEW_BYTES, next_read

READ_AHEAD_BYTES = 64 * 1024  # kept of what follows a request that is still being answered
CLOSE_GRACE_S = 1.0
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
CHUNK_EXTENSION = re.compile(rb"[0-9A-Fa-f]+[ \t]*;")
HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(:\d{0,5})?")


class _EndOfInput(Exception):
    """The client counts as gone; unwinds hypercorn's event loop to our reader."""


class _ReadAhead:
    """Stands in for ``H11Protocol.can_read``, on which hypercorn waits without reading.

    h11 pauses when bytes follow a request that is being answered. Waiting here reads on, so that
    the end of input is still seen; what was read is given to h11 afterwards.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        self._read = read
        self._event = trio.Event()
        self._scope: trio.CancelScope | None = None
        self.data = bytearray()

    async def clear(self) -> None:
        self._event = trio.Event()

    async def set(self) -> None:
        self._event.set()
        if self._scope is not None:
            self._scope.cancel()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        while not self._event.is_set() and len(self.data) < READ_AHEAD_BYTES:
            with trio.CancelScope() as self._scope:
                data = await self._read()
                self.data += data
            self._scope = None
        await self._event.wait()


class _H11(h11.Connection):
    """h11 that passes over what follows a connection's last request, and is strict with line ends.

    After a request with ``Connection: close``, or one of HTTP/1.0, h11 takes further bytes, an old
    client's line end already, for a fault, and the answer would be lost to it. And it takes a bare
    line feed for a line's end, where a proxy may see a part of the line.
    """

    def receive_data(self, data: bytes) -> None:
        if not (data and self.their_state in (h11.MUST_CLOSE, h11.CLOSED)):
            super().receive_data(data)

    def next_event(self) -> Any:
        state = self.their_state
        if state is h11.DONE and not self._receive_buffer and not self._receive_buffer_closed:
            return h11.NEED_DATA  # as h11 finds out in a longer way
        if state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        if state is h11.IDLE and self._passes_over_line_ends():
            return h11.NEED_DATA
        return super().next_event()

    def _extract_next_receive_event(self) -> Any:
        if self.their_state is h11.IDLE:
            data = self._receive_buffer._data
            end = data.find(b"\r\n\r\n")
            if BARE_LINE_FEED.search(data, 0, end if end >= 0 else len(data)):
                raise h11.RemoteProtocolError("a line feed without a carriage return")
        return super()._extract_next_receive_event()

    def _passes_over_line_ends(self) -> bool:
        """Drop line ends before a request, which some clients send after a body; whether all there
        is may be the first half of one more."""
        buffer = self._receive_buffer
        while (start := buffer._data[:2]) == b"\r\n":
            buffer.maybe_extract_at_most(2)
        return start == b"\r"


@attrs.frozen
class HeadLimits:
    """How large the head of a request may be: its line and headers in bytes, headers in number."""

    num_bytes: int = 16 * 1024
    num_headers: int = 100

    def fault_of(self, request: h11.Request) -> int | None:
        """The status for a head beyond the limits. One that is not complete has met h11's own."""
        headers = request.headers
        if len(headers) > self.num_headers:
            return 431
        if len(request.target) > self.num_bytes:
            return 414
        num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in headers)
        return 431 if num_bytes > self.num_bytes else None


class H11Only(H11Protocol):
    """HTTP/1.1 without upgrades, with bodies for protocol errors and a short way for chunks.

    A request to upgrade is answered as if it had not asked, which HTTP allows.
    """

    def __init__(
        self, *args: Any, read_ahead: _ReadAhead, http2: bool, limits: HeadLimits, asked: App
    ) -> None:
        super().__init__(*args)
        self._asked = asked
        self.connection = _H11(h11.SERVER, max_incomplete_event_size=limits.num_bytes)
        self._limits = limits
        self.can_read: _ReadAhead = read_ahead
        self.exchange: Exchange | None = None
        self._http2 = http2
        self._held = b""  # a response's head, until the first of its body goes with it

    @property
    def has_all(self) -> bool:
        """Whether the last byte of the present request has arrived."""
        return self.connection.their_state not in (h11.SEND_BODY, h11.ERROR)

    async def handle(self, event: Event) -> None:
        """Feed bytes to h11, after what was read ahead of it."""
        await super().handle(event)
        if not isinstance(event, RawData):
            return
        while self.can_read.data:
            data, self.can_read.data = bytes(self.can_read.data), bytearray()
            await super().handle(RawData(data))

    async def stream_send(self, event: StreamEvent) -> None:
        """Send an event of the response."""
        if isinstance(event, Response) and event.status_code >= 200 and self.exchange is not None:
            await super().stream_send(event)
            if self._is_chunked():
                self.exchange.write = self._write_chunk
        else:
            if isinstance(event, EndBody | StreamClosed) and self.exchange is not None:
                self.exchange.write = None
            await super().stream_send(event)

    async def send_whole(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Send a response whose body is there, and be ready for the next request: as ``Response``,
        ``Body``, ``EndBody`` and ``StreamClosed`` do, at a third of their cost."""
        try:
            data = self._head_of(status, [*headers, *self.config.response_headers("h11")])
            if body:
                data += self.connection.send(h11.Data(data=body)) or b""
            data += self.connection.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
        else:
            await self.send(RawData(data))
        await self._maybe_recycle()

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        if self.connection.their_state is h11.SEND_BODY:
            # An answer before the body's end closes the connection: a client that is not told would
            # send its next request into it.
            headers = [pair for pair in headers if pair[0] != b"connection"]
            headers.append((b"connection", b"close"))
        # hypercorn gives no reason, and people read them in logs.
        reason = _REASONS.get(status, b"")
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        return self.connection.send(response) or b""

    async def _write_chunk(self, data: bytes) -> None:
        # What h11 makes of a Data event under chunked transfer coding, without its state machine:
        # a Data event changes no state. An empty chunk would be the last one.
        assert data, "an empty chunk ends the body"
        held, self._held = self._held, b""
        await self.send(RawData(b"%b%x\r\n%b\r\n" % (held, len(data), data)))

    async def _send_h11_event(self, event: Any) -> None:
        try:
            if isinstance(event, h11.Response):
                self._held = self._head_of(event.status_code, list(event.headers))
                return
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        held, self._held = self._held, b""
        if held or data:
            await self.send(RawData(held + data))

    def _is_chunked(self) -> bool:
        writer = getattr(self.connection, "_writer", None)
        return type(writer).__name__ == "ChunkedWriter"

    async def _check_protocol(self, event: h11.Request) -> None:
        if not self._http2 or not self._may_change(event):
            return
        try:
            await super()._check_protocol(event)
        except (H2CProtocolRequiredError, H2ProtocolAssumedError) as error:
            error.args = ()  # a head, which the log would show with whatever fails later
            raise

    def _may_change(self, request: h11.Request) -> bool:
        """Whether a request may go on in HTTP/2. What is wrong with one that asks for it, and one
        whose settings are, is answered in HTTP/1.1."""
        names = [name for name, _ in request.headers]
        if b"upgrade" not in names:
            return True
        settings = [value for name, value in request.headers if name == b"http2-settings"]
        return (
            request.target.startswith(b"/")
            and not self._limits.fault_of(request)
            and not _fault_of(request, request.target)
            and len(settings) == 1
            and are_settings(settings[0])
        )

    async def _create_stream(self, request: h11.Request) -> None:
        target = _origin_form(request.target)
        if status := self._limits.fault_of(request) or _fault_of(request, target):
            await self._send_error_response(status)
            await self.send(Closed())
            return
        assert target is not None
        self.exchange = Exchange()
        self.stream = direct_stream(self, self._asked, self.exchange)
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=[(k, v) for k, v in request.headers if k != b"upgrade"],
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii"),
                raw_path=target,
                state=self.connection_state,
            )
        )

    async def _close_stream(self) -> None:
        if self.exchange is not None:
            self.exchange.end()
        await super()._close_stream()

    async def _send_error_response(self, status_code: int) -> None:
        unread = self.connection.their_state is h11.ERROR
        if status_code == 431 and unread:
            rest = self.connection.trailing_data[0]
            if self.stream is not None:  # within a body: its trailers are headers, chunks are none
                status_code = 400 if CHUNK_EXTENSION.match(rest) else 431
            elif b"\n" not in rest:
                status_code = 414  # not even the first line has come to its end
        body = _ERROR_BODIES.get(status_code, _ERROR_BODIES[400])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _Protocol(ProtocolWrapper):
    """hypercorn's choice of protocol, always beginning with our HTTP/1.1."""

    def __init__(
        self,
        *args: Any,
        read_ahead: _ReadAhead,
        http2: bool,
        limits: HeadLimits,
        send_timeout_s: float,
        asked: App,
    ) -> None:
        self._limits = limits
        self._send_timeout_s = send_timeout_s
        super().__init__(*args)
        h1 = H11Only(*args, read_ahead=read_ahead, http2=http2, limits=limits, asked=asked)
        self.protocol = h1
        self.h1 = h1

    @property
    def protocol(self) -> H11Protocol | H2Protocol:
        """What is spoken now; hypercorn sets it."""
        return self._spoken

    @protocol.setter
    def protocol(self, spoken: H11Protocol | H2Protocol) -> None:
        if isinstance(spoken, H2Protocol):
            mend(spoken, max_head_bytes=self._limits.num_bytes, send_timeout_s=self._send_timeout_s)
        self._spoken = spoken

    def release(self) -> None:
        """Let go of answers that wait for a client which takes no more."""
        if isinstance(self._spoken, H2Protocol):
            release(self._spoken)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that outlives the end of input, if there may be one."""
        if self.protocol is self.h1 and self.h1.stream is not None and self.h1.has_all:
            return self.h1.exchange
        return None

    @property
    def has_all(self) -> bool:
        """Whether nothing more of a request is on its way, as far as can be told."""
        return self.protocol is self.h1 and self.h1.has_all


class Connection(TCPServer):
    """Serves one connection from its first byte to its close.

    Args:
        app: hypercorn's wrapper around the ASGI app, for HTTP/2.
        asked: the app itself, for HTTP/1.1.
        config: hypercorn's settings, see ``trioserve.http.server``.
        context: shared by all connections; once its ``terminated`` event is set, the end of an
            answer closes.
        stream: the client's stream; closed when ``run`` returns.
        http2: whether HTTP/2 may be spoken, by prior knowledge or upgrade.
        on_idle: told whether no request is being answered, at the start and at each change.
        handshake_timeout_s: for a stream that speaks TLS.
        limits: of the heads of requests.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: HypercornConfig,
        context: WorkerContext,
        stream: ClientStream,
        *,
        asked: App,
        http2: bool,
        on_idle: Callable[[Connection, bool], None],
        handshake_timeout_s: float = math.inf,
        limits: HeadLimits,
    ) -> None:
        super().__init__(app, config, context, {}, cast(Any, stream))
        self._asked = asked
        self._on_idle = on_idle
        self._num_asked = FEW_BYTES
        self._http2 = http2
        self._read_ahead = _ReadAhead(self._receive)
        self._handshake_timeout_s = handshake_timeout_s
        self._limits = limits
        self._starting = trio.CancelScope()
        self._reading = trio.CancelScope()
        self._closing = False
        self._idle = True

    async def run(self) -> None:
        """Serve until either side closes.

        Cancellation closes the connection; a send that is under way delays it by at most the send
        deadline, unless the stream is aborted first.
        """
        try:
            sock = self.stream.socket
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
            if self.stream.is_tls and not await self._start_tls():
                return
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = _Protocol(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    self.stream.is_tls,
                    client,
                    server,
                    self.protocol_send,
                    read_ahead=self._read_ahead,
                    http2=self._http2,
                    limits=self._limits,
                    send_timeout_s=self.stream.send_timeout_s,
                    asked=self._asked,
                )
                self._set_idle(True)
                await self._read_data()
        except OSError:
            pass  # the client was gone before it could be asked for its address
        finally:
            with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Carry out what the protocol asks: send, close, or mind the idle timer."""
        if isinstance(event, RawData):
            data = event.data
            if not self.send_lock.locked():
                data = data[self.stream.try_send(data) :]
            if data or self.stream.has_rest:
                # A part may have been sent: stopping here would leave half a frame.
                with trio.CancelScope(shield=True):
                    await super().protocol_send(RawData(data))
        elif isinstance(event, Closed):
            await self._begin_close()
        elif isinstance(event, Updated):
            self._set_idle(event.idle)

    def close_if_idle(self) -> None:
        """Close, unless a request is being answered: the end of its answer closes then."""
        if self._idle:
            self._starting.cancel()
            self._reading.cancel()

    async def _start_tls(self) -> bool:
        """Whether the handshake succeeded, in its time.

        Meanwhile the connection counts as idle: one that only opens is the first to make room.
        """
        self._on_idle(self, True)
        with self._starting:
            self._starting.deadline = trio.current_time() + self._handshake_timeout_s
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.start()
                return True
        return False

    def _set_idle(self, idle: bool) -> None:
        """Note whether a request is being answered; its head's arrival is idle time still.

        In place of hypercorn's idle task, which costs a task per request and stays behind when the
        client closes: the server ends those that were idle too long.
        """
        self._idle = idle
        self._on_idle(self, idle)

    async def _begin_close(self) -> None:
        """End our sending and leave the rest to the reader.

        Closing with bytes unread makes the kernel reset the connection, and the client may lose the
        answer that says why. So where the client may still be sending, the reader drops what comes
        for a moment.
        """
        self._closing = True
        grace_s = 0.0 if cast(_Protocol, self.protocol).has_all else CLOSE_GRACE_S
        self._reading.deadline = trio.current_time() + grace_s
        with contextlib.suppress(
            trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError
        ):
            await self.stream.send_eof()
        await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        try:
            with (
                self._reading,
                contextlib.suppress(
                    _EndOfInput, trio.ClosedResourceError, trio.BrokenResourceError
                ),
            ):
                while True:
                    await self.protocol.handle(RawData(await self._receive()))
            await self.protocol.handle(Closed())
        finally:
            cast(_Protocol, self.protocol).release()

    async def _receive(self) -> bytes:
        """The next bytes; raises _EndOfInput when the client counts as gone."""
        while data := await self.stream.receive_some(self._num_asked):
            self._num_asked = next_read(self._num_asked, len(data))
            if not self._closing:
                return bytes(data)
        exchange = cast(_Protocol, self.protocol).exchange
        if exchange is not None:
            await exchange.outlast_end_of_input()
        raise _EndOfInput


def _origin_form(target: bytes) -> bytes | None:
    """The path and query of a request target, or None for what this server has no use for."""
    if target.startswith(b"/"):
        return target
    for scheme in (b"http://", b"https://"):
        if target[: len(scheme)].lower() == scheme:
            host, slash, rest = target[len(scheme) :].partition(b"/")
            return slash + rest or b"/" if host and HOST.fullmatch(host) else None
    return None


def _fault_of(request: h11.Request, target: bytes | None) -> int | None:
    """The status for a head that h11 lets pass and that others may read in another way."""
    if not request.http_version.startswith(b"1."):
        return 505
    # A method in small letters is another one, which a proxy's rules may not know.
    if target is None or request.method != request.method.upper():
        return 400
    names = set()
    for name, value in request.headers:
        names.add(name)
        if name == b"host" and not HOST.fullmatch(value):
            return 400
    # A body's end told in two ways, or in one that HTTP/1.0 does not know: a proxy may go by the
    # other, and the rest of the body would be a request of its own.
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version == b"1.0"
    ):
        return 400
    return None


_ERROR_BODIES = {
    status: orjson.dumps(http_error_object(status))
    for status in (400, 413, 414, 431, 500, 501, 505)
}
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
