"""hypercorn's HTTP/2 with the faults that matter here mended."""

from __future__ import annotations

import contextlib
from typing import Any, cast
from urllib.parse import quote

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import trio
from hypercorn.events import Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    BufferCompleteError,
    H2Protocol,
    StreamBuffer,
)
from hypercorn.trio.worker_context import EventWrapper
from hyperframe.exceptions import HyperframeError

ASCII = bytes(range(0x21, 0x7F))


def mend(protocol: H2Protocol, *, max_head_bytes: int, send_timeout_s: float) -> None:
    """Put what is here in place of hypercorn's own, before the first event.

    Args:
        max_head_bytes: of a request.
        send_timeout_s: a stream whose client takes nothing for so long is reset.
    """
    protocol.streams = _Streams()
    protocol.stream_buffers = _Buffers(protocol, send_timeout_s)
    # h2 holds clients to the setting only once they have acknowledged it.
    protocol.connection.decoder.max_header_list_size = max_head_bytes
    create, close = protocol._create_stream, protocol._close_stream

    async def create_usable(request: Any) -> None:
        request.headers = _usable_head(request.headers)
        await create(request)

    async def close_and_tell(stream_id: int) -> None:
        # hypercorn tells of the end of an answer alone: after a reset nothing is idle again.
        await close(stream_id)
        await protocol.send(Updated(idle=protocol.idle))

    async def heed_no_priority(event: h2.events.PriorityUpdated) -> None:
        # HTTP/2 has given them up. hypercorn remembers them for streams that never come, and ends
        # the connection, with a traceback, over very many and over a loop of them.
        pass

    mended = cast(Any, protocol)
    mended._create_stream, mended._close_stream = create_usable, close_and_tell
    mended._priority_updated = heed_no_priority


def are_settings(header: bytes) -> bool:
    """Whether the value of HTTP2-Settings is what an upgrade can begin with."""
    probe = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    try:
        probe.initiate_upgrade_connection(header)
    except (ValueError, HyperframeError, h2.exceptions.ProtocolError):
        return False
    return True


def release(protocol: H2Protocol) -> None:
    """Drop what was to be sent, and let go of those who wait for that; nothing is sent any more.

    hypercorn leaves them waiting for ever, and its sends cannot be cancelled.
    """
    for buffer in protocol.stream_buffers.values():
        cast(_Buffer, buffer).drop()


def _usable_head(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A request's head as hypercorn can take it.

    It ends the connection, with all its streams, over what is not ASCII in a method or path and
    over a CONNECT without a path. What is no path from the root is put below it.
    """
    head = dict(headers)
    method, path = (quote(head.get(name, b""), safe=ASCII) for name in (b":method", b":path"))
    return [
        (b":method", method.encode()),
        (b":path", path.encode() if path.startswith("/") else b"/" + path.encode()),
        *(pair for pair in headers if pair[0] not in (b":method", b":path")),
    ]


class _Streams(dict[int, Any]):
    """Streams by number. What still comes for one that was answered early, as a refused request
    is, goes nowhere; hypercorn would end the connection with all its other streams."""

    def __missing__(self, stream_id: int) -> _Answered:
        return _Answered()


class _Answered:
    async def handle(self, event: StreamEvent) -> None:
        pass


class _Buffers(dict[int, StreamBuffer]):
    """What is to be sent, by stream; hypercorn's buffers are replaced as they are put here."""

    def __init__(self, protocol: H2Protocol, send_timeout_s: float) -> None:
        super().__init__()
        self._protocol = protocol
        self._send_timeout_s = send_timeout_s

    def __setitem__(self, stream_id: int, made: StreamBuffer) -> None:
        super().__setitem__(stream_id, _Buffer(self._protocol, stream_id, self._send_timeout_s))


class _Buffer(StreamBuffer):
    """Resets its stream when the client, by its flow control, takes nothing for too long.

    The socket's own deadline sees nothing of that: nothing is written to it.
    """

    _is_empty: EventWrapper
    _paused: EventWrapper

    def __init__(self, protocol: H2Protocol, stream_id: int, send_timeout_s: float) -> None:
        super().__init__(protocol.context.event_class)
        self._protocol = protocol
        self._stream_id = stream_id
        self._send_timeout_s = send_timeout_s
        self._num_taken = 0

    def drop(self) -> None:
        """As ``close``, which waits for nothing either."""
        self._complete = True
        self.buffer = bytearray()
        self._is_empty._event.set()
        self._paused._event.set()

    async def push(self, data: bytes) -> None:
        """Add to what is to be sent; waits while that is much. Cancellation stops the wait."""
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._wait(self._paused)

    async def drain(self) -> None:
        """Wait until all is sent. Cancellation stops the wait."""
        await self._wait(self._is_empty)

    async def pop(self, max_length: int) -> bytes:
        """What is to be sent next. Never waits.

        hypercorn's makes room of an empty piece, so that a client without a window gets ever more.
        """
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        self._num_taken += len(data)
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data

    async def _wait(self, event: EventWrapper) -> None:
        while True:
            num_taken = self._num_taken
            with trio.move_on_after(self._send_timeout_s):
                await event.wait()
                return
            if self._num_taken == num_taken:
                break
        self.drop()
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._protocol.connection.reset_stream(self._stream_id, h2.errors.ErrorCodes.CANCEL)
            await self._protocol._flush()
        await self._protocol._close_stream(self._stream_id)
