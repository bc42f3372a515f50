"""The parent's ends of the two pipes: events as an async iterator, commands as a method."""

from __future__ import annotations

import select
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec
import trio

from trioserve.ipc.framing import (
    FEW_BYTES,
    READ_BYTES,
    FrameDecoder,
    FrameError,
    decode,
    encode,
    next_read,
)
from trioserve.ipc.pipes import WritePipe

M = TypeVar("M")


class FrameReader(Generic[M]):
    """Messages from a stream. One task reads; an end between two frames ends the iteration."""

    def __init__(self, stream: trio.abc.ReceiveStream, message_type: Any) -> None:
        """``message_type`` is the union of what may come, ``messages.Event`` in the parent."""
        self._stream = stream
        self._frames = FrameDecoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._ready: deque[bytes] = deque()
        self._fault: FrameError | None = None
        self._num_asked = FEW_BYTES

    def __aiter__(self) -> FrameReader[M]:
        return self

    async def __anext__(self) -> M:
        """The next message. Always a checkpoint; cancelled: nothing is lost.

        Raises:
            FrameError: the stream cannot be followed; again at every later call.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waited = False  # a read is a checkpoint, and one is enough for a message
        try:
            if self._fault is not None:
                raise self._fault
            while not self._ready:
                waited = True
                self._frames.feed(b"")  # raises where a bad length came after good frames
                data = await self._stream.receive_some(self._num_asked)
                self._num_asked = next_read(self._num_asked, len(data))
                if not data:
                    self._frames.finish()
                    raise StopAsyncIteration
                self._ready.extend(self._frames.feed(data))
            message = decode(self._decoder, self._ready.popleft())
        except FrameError as fault:
            self._fault = fault
            raise
        if not waited:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return message

    async def discard(self) -> None:
        """Read and drop everything until the end, so that the writer never waits for room.

        Ends early, without a sound, where another task reads or the stream breaks. Cancelled: the
        rest stays unread.
        """
        self._ready.clear()
        try:
            while await self._stream.receive_some(READ_BYTES):
                pass
        except (trio.BusyResourceError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def aclose(self) -> None:
        """Close at once. Cancelled: closed all the same."""
        await trio.aclose_forcefully(self._stream)


class FrameWriter:
    """Messages to a stream. One task sends."""

    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream = stream
        self._in_frame = False

    def try_send(self, message: msgspec.Struct) -> bool:
        """Send one message if it is small and takes no wait; whether it went out, in whole."""
        if self._in_frame or not isinstance(self._stream, WritePipe):
            return False
        try:
            frame = encode(message)
        except FrameError:
            return False  # ``send`` says why
        return len(frame) <= select.PIPE_BUF and self._stream.try_write(frame)

    async def send(self, message: msgspec.Struct) -> None:
        """Send one message. Cancelled: a part may have gone out, and no later send is accepted,
        so cancel only to end the worker.

        Raises:
            trio.BrokenResourceError: nobody reads any more.
            trio.ClosedResourceError: closed by us.
            FrameError: an earlier send was cut.
        """
        if self._in_frame:
            raise FrameError("an earlier command was cut off half-way, nothing can follow it")
        frame = encode(message)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._in_frame = True
        await self._stream.send_all(frame)
        self._in_frame = False

    async def aclose(self) -> None:
        """Close at once. Cancelled: closed all the same."""
        await trio.aclose_forcefully(self._stream)
