"""The parent's ends of the two pipes of frames: as ``trio.lowlevel.FdStream``, with fewer turns.

FdStream lets the loop go on once before every read and every write. That costs as much as the rest
of a small message's way, and whoever reads or writes here waits often enough.
"""

from __future__ import annotations

import errno
import os
import select

import trio


class ReadPipe(trio.abc.ReceiveStream):
    """The end that is read. Owns the descriptor, which becomes non-blocking."""

    def __init__(self, fd: int) -> None:
        self._pipe = trio.lowlevel.FdStream(fd)

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self._pipe.fileno()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes, none at the end. Always a checkpoint. Cancellation loses nothing.

        Raises:
            trio.ClosedResourceError: closed, before or meanwhile.
            trio.BrokenResourceError: the kernel refuses to read.
        """
        if self.fileno() < 0:
            raise trio.ClosedResourceError("the pipe is closed")
        await trio.lowlevel.wait_readable(self.fileno())
        try:
            return os.read(self.fileno(), max_bytes or 65536)
        except BlockingIOError:
            return await self._pipe.receive_some(max_bytes)
        except OSError as error:
            raise _fault(error) from error

    async def aclose(self) -> None:
        """Close. Cancellation closes all the same."""
        await self._pipe.aclose()


class WritePipe(trio.abc.SendStream):
    """The end that is written. Owns the descriptor, which becomes non-blocking."""

    def __init__(self, fd: int) -> None:
        self._pipe = trio.lowlevel.FdStream(fd)

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self._pipe.fileno()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it; lets the loop go on only where the pipe is full. Cancellation while it
        waits may leave a part sent.

        Raises:
            trio.ClosedResourceError: closed, before or meanwhile.
            trio.BrokenResourceError: nobody reads any more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        num_sent = 0
        try:
            num_sent = os.write(self.fileno(), data)
        except BlockingIOError:
            pass
        except OSError as error:
            raise _fault(error) from error
        if num_sent < len(data):
            await self._pipe.send_all(memoryview(data)[num_sent:])

    def try_write(self, data: bytes) -> bool:
        """Send at most ``select.PIPE_BUF`` bytes, all or none of them; whether they went out."""
        assert len(data) <= select.PIPE_BUF, "the kernel may take a part of more"
        try:
            return os.write(self.fileno(), data) == len(data)
        except OSError:
            return False

    async def wait_send_all_might_not_block(self) -> None:
        """As the interface says. Cancellation changes nothing."""
        await self._pipe.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close. Cancellation closes all the same."""
        await self._pipe.aclose()


def _fault(error: OSError) -> Exception:
    if error.errno == errno.EBADF:
        return trio.ClosedResourceError("the pipe is closed")
    return trio.BrokenResourceError(str(error))
