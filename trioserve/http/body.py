"""The body of a request while it arrives."""

from __future__ import annotations

import math

import trio
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout


class RequestBody:
    """Fed by the connection, which never waits for it; read by one task.

    Attributes:
        num_bytes: that have come.

    Args:
        max_bytes: a longer one is dropped as soon as that is known.
        timeout_s: how long a reader waits for the rest.
        announced: its length as the head tells it, if it does.
    """

    def __init__(self, max_bytes: int, timeout_s: float = math.inf, announced: int = 0) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._data: bytes | bytearray = b""
        self.num_bytes = 0
        self._too_large = announced > max_bytes
        self._complete = False
        self._wake: trio.Event | None = None

    def append(self, data: bytes) -> None:
        """Take in the next piece."""
        self.num_bytes += len(data)
        if self._too_large:
            return
        if self.num_bytes > self._max_bytes:
            self._too_large = True
            self._data = b""
            self._tell()
        elif not self._data:
            self._data = data
        elif isinstance(self._data, bytearray):
            self._data += data
        else:  # one block that grows: hundreds of pieces would leave the heap full of holes
            self._data = bytearray(self._data + data)

    def end(self) -> None:
        """All of it was given."""
        self._complete = True
        self._tell()

    def _tell(self) -> None:
        if self._wake is not None:
            self._wake.set()

    @property
    def is_here(self) -> bool:
        """Whether all of it has come, or what says that it is refused."""
        return self._complete or self._too_large

    def take(self) -> bytes:
        """All of it, once; only when it ``is_here``.

        Raises:
            RequestEntityTooLarge: it is longer than ``max_bytes``, or says so.
        """
        if self._too_large:
            raise RequestEntityTooLarge
        data, self._data = self._data, b""
        return bytes(data)

    async def read(self) -> bytes:
        """All of it, once. A checkpoint only if it has to be waited for. Cancellation loses
        nothing.

        Raises:
            RequestEntityTooLarge: it is longer than ``max_bytes``, or says so.
            RequestTimeout: it was not complete in time.
        """
        if not self.is_here:
            self._wake = trio.Event()
            with trio.move_on_after(self._timeout_s) as waiting:
                await self._wake.wait()
            if waiting.cancelled_caught:
                raise RequestTimeout
        return self.take()
