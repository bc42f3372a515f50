"""What a connection and the handler of its request must know of each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Exchange:
    """One request and its answer, as far as the connection must know about it.

    Written by the connection and by the request's handler. When the client ends its sending, a
    handler that streams goes on (``half_closed`` is set and ``on_half_close`` called), any other
    is cancelled.
    """

    def __init__(self) -> None:
        self.half_closed = False
        self.on_half_close: Callable[[], None] | None = None
        self.streams: bool | None = None  # None: not known yet
        self.write: Callable[[bytes], Awaitable[None]] | None = None
        self._ended = False
        self._changed: trio.Event | None = None  # only where somebody waits: most have nobody

    def declare(self, *, streams: bool) -> None:
        """Say whether the answer will be a stream."""
        self.streams = streams
        self._tell()

    def end(self) -> None:
        """The answer is complete, or nobody waits for it. Idempotent."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def outlast_end_of_input(self) -> None:
        """Return when the client, who has ended its sending, counts as gone."""
        while self.streams is None and not self._ended:
            await self._change()
        if self.streams and not self._ended:
            self.half_closed = True
            if self.on_half_close is not None:
                self.on_half_close()
            while not self._ended:
                await self._change()

    async def _change(self) -> None:
        self._changed = trio.Event()
        await self._changed.wait()
