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
        self._decided = trio.Event()
        self._ended = trio.Event()

    def declare(self, *, streams: bool) -> None:
        """Say whether the answer will be a stream."""
        self.streams = streams
        self._decided.set()

    def end(self) -> None:
        """The answer is complete, or nobody waits for it. Idempotent."""
        self._decided.set()
        self._ended.set()

    async def outlast_end_of_input(self) -> None:
        """Return when the client, who has ended its sending, counts as gone."""
        await self._decided.wait()
        if self.streams and not self._ended.is_set():
            self.half_closed = True
            if self.on_half_close is not None:
                self.on_half_close()
            await self._ended.wait()
