"""Frames on a pipe: 4 bytes of length, little-endian, then one msgpack message.

The decoder knows nothing of I/O; ``trioserve.ipc.streams`` is the parent's side of it and
``trioserve.ipc.child`` the worker's. Imports neither trio nor anything heavy: the worker's
first lines need it.
"""

from __future__ import annotations

import os
import struct
from typing import TypeVar

import msgspec

from trioserve.errors import WorkerDied

MAX_FRAME_BYTES = 256 * 1024 * 1024
READ_BYTES = 64 * 1024
FEW_BYTES = 4 * 1024  # asked for where the last read took all there was


def next_read(asked: int, came: int) -> int:
    """How many bytes to ask for after a read that asked for ``asked`` and got ``came``.

    A read makes a buffer of what it asks for and cuts it to what came. Cut from 64 KiB to some
    hundred bytes for each message, the heap fills with holes and memory creeps up for hours.
    """
    return READ_BYTES if came == asked else FEW_BYTES


_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


class FrameError(WorkerDied):
    """The bytes between parent and worker cannot be followed any more; ends the incarnation.

    Raised by whoever reads: a pipe that is out of step has no way back.
    """


class TruncatedFrame(FrameError):
    """The stream ended inside a frame: the other side died while it wrote."""


class MalformedFrame(FrameError):
    """A length beyond the limit, or a payload that is no message of the protocol."""


def encode(message: msgspec.Struct) -> bytes:
    """One message as a whole frame, header included.

    Raises:
        MalformedFrame: the message is larger than ``MAX_FRAME_BYTES``, or holds a value that
            msgpack cannot carry: an integer beyond 64 bits, a text that is no Unicode.
    """
    try:
        payload = _encoder.encode(message)
    except (ValueError, OverflowError, TypeError) as fault:
        raise MalformedFrame(f"a {type(message).__name__} cannot be encoded: {fault}") from None
    if len(payload) > MAX_FRAME_BYTES:
        raise MalformedFrame(
            f"a {type(message).__name__} of {len(payload)} bytes is over the limit of "
            f"{MAX_FRAME_BYTES} bytes for one message"
        )
    return _HEADER.pack(len(payload)) + payload


def decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    """One payload as a message.

    Raises:
        MalformedFrame: naming what does not fit.
    """
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as fault:  # ValidationError is one of these
        raise MalformedFrame(
            f"a frame of {len(payload)} bytes, {payload[:16]!r}…, is no message of the protocol: "
            f"{fault}"
        ) from None


class FrameDecoder:
    """Bytes in, payloads out. Holds at most one unfinished frame and what came with it."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take bytes in any split; return the payloads that are complete now, in order.

        Raises:
            MalformedFrame: a length beyond the limit, before any of its payload is waited for.
                Good frames ahead of it are returned first, the next call (``b""`` will do) raises.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0  # [0, start) is handed out, [start, len) is not yet
        while len(buffer) - start >= _HEADER.size:
            (num_bytes,) = _HEADER.unpack_from(buffer, start)
            if num_bytes > self._max_frame_bytes:
                if payloads:
                    break
                raise MalformedFrame(
                    f"a frame claims {num_bytes} bytes, over the limit of "
                    f"{self._max_frame_bytes}: the pipe is out of step or carries something else"
                )
            end = start + _HEADER.size + num_bytes
            if len(buffer) < end:
                break
            payloads.append(bytes(memoryview(buffer)[start + _HEADER.size : end]))
            start = end
        if start:
            del buffer[:start]
        return payloads

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            TruncatedFrame: unless it ended between two frames.
        """
        if self._buffer:
            raise TruncatedFrame(f"the pipe ended {len(self._buffer)} bytes into a frame")


def write_frame(fd: int, frame: bytes) -> None:
    """Write a whole frame to a blocking descriptor, however often the kernel takes a part only.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(fd, rest) :]
