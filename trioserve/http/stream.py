"""A client's stream: what is used of a socket, with a deadline on every send."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any, Protocol

import trio

SEND_PIECE_BYTES = 16 * 1024  # what a client must take within the send deadline
NO_LINGER = struct.pack("ii", 1, 0)  # close with a reset, dropping what was not sent


class SocketLike(Protocol):
    """What is used of a stream's socket."""

    @property
    def family(self) -> int: ...
    def getpeername(self) -> Any: ...
    def getsockname(self) -> Any: ...
    def setsockopt(self, level: int, option: int, value: bytes) -> None: ...
    def close(self) -> None: ...


class StreamLike(Protocol):
    """What is used of a stream: ``trio.SocketStream`` has it."""

    @property
    def socket(self) -> SocketLike: ...
    async def send_all(self, data: bytes | memoryview) -> None: ...
    async def send_eof(self) -> None: ...
    async def receive_some(self, max_bytes: int) -> bytes | bytearray: ...
    async def aclose(self) -> None: ...


class ClientStream:
    """A stream whose sends have a deadline and that can be aborted from synchronous code.

    hypercorn shields its sends from cancellation, so the deadline must live inside the stream.
    """

    is_tls = False

    def __init__(self, stream: StreamLike, send_timeout_s: float) -> None:
        self.socket = stream.socket
        self._stream = stream
        self.send_timeout_s = send_timeout_s
        self.timed_out = False

    async def start(self) -> None:
        """What comes before the first byte of HTTP: nothing here. Cancellation leaves a stream
        that can only be closed."""

    @property
    def has_rest(self) -> bool:
        """Whether ``try_send`` took more than the kernel did; ``send_all`` sends the rest first."""
        return False

    def try_send(self, data: bytes) -> int:
        """Send what the kernel takes at once; returns how many bytes that was.

        Zero also where the client is gone: ``send_all`` then says so. Skips all that makes a send
        wait well, which costs more than the send itself.
        """
        fileno = getattr(self.socket, "fileno", None)
        if fileno is None:
            return 0
        try:
            return os.write(fileno(), data)
        except OSError:
            return 0

    async def send_all(self, data: bytes) -> None:
        """Send everything; each piece has the deadline to itself.

        Raises:
            trio.BrokenResourceError: the client is gone, or took nothing for too long; in the
                latter case the connection is aborted.
            trio.ClosedResourceError: the connection was closed or aborted meanwhile.
        """
        if len(data) <= SEND_PIECE_BYTES:
            await self._send(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), SEND_PIECE_BYTES):
            await self._send(view[start : start + SEND_PIECE_BYTES])

    async def _send(self, data: bytes | memoryview) -> None:
        with trio.move_on_after(self.send_timeout_s) as deadline:
            await self._write(data)
        if deadline.cancelled_caught:
            self.timed_out = True
            self.abort()
            raise trio.BrokenResourceError("the client took nothing for too long")

    async def _write(self, data: bytes | memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        """As the stream's own; cancellation loses nothing.

        Waits before it reads: a read that finds nothing costs more, and a client has seldom sent
        its next request before it has this one's answer.
        """
        fileno = getattr(self.socket, "fileno", None)
        if fileno is not None and fileno() >= 0:
            await trio.lowlevel.wait_readable(fileno())
            # Whatever is wrong, the stream's own read finds it again and says it well.
            with contextlib.suppress(OSError):
                return os.read(fileno(), max_bytes)
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        """As the stream's own."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close; what was sent is still delivered."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close at once with a reset; tasks that wait on the stream get ClosedResourceError."""
        with contextlib.suppress(OSError):  # closed already
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.socket.close()
