"""Statuses of an engine as they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.engine.api import EngineStatus, Phase

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine


class Watch:
    """Iterates over statuses; changes that come while the reader is busy are seen as one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: EngineStatus | None = None
        self._ended = False

    def __aiter__(self) -> Watch:
        """The watch is its own iterator."""
        return self

    async def __anext__(self) -> EngineStatus:
        """The next status that differs. Cancellation loses nothing."""
        await trio.lowlevel.checkpoint()
        while not self._ended:
            status = self._engine.status
            if self._last is None or self._key(status) != self._key(self._last):
                self._last = status
                self._ended = status.phase in (Phase.FAILED, Phase.CLOSED)
                return status
            await self._engine.wait_change()
        raise StopAsyncIteration

    @staticmethod
    def _key(status: EngineStatus) -> tuple[object, ...]:
        return (
            *(status.phase, status.incarnation, status.cause, status.info),
            *(stage.position for stage in status.stages),
            status.paused,
        )
