"""The worker's start-up stages, reported as they start, advance and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trioserve.ipc.messages import Stage


class StageReporter:
    """Sends Stage events. One stage at a time; ``current`` names it for error messages.

    Args:
        send: takes a Stage event; called from the worker's main thread only.
        clock: seconds, monotonic.
    """

    def __init__(
        self, send: Callable[[Stage], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self.current = ""

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[RunningStage]:
        """Run one stage: "start" on entry, "end" with its seconds on a clean exit."""
        self.current = name
        started = self._clock()
        self._send(Stage(name, "start", None, detail))
        running = RunningStage(name, self._send, self._clock, detail)
        yield running
        self._send(
            Stage(name, "end", 1.0, running.detail, running.num_bytes, self._clock() - started)
        )


class RunningStage:
    """Handle on the stage that runs: ``progress`` moves it on, at most ten times a second."""

    def __init__(
        self,
        name: str,
        send: Callable[[Stage], None],
        clock: Callable[[], float],
        detail: str,
    ) -> None:
        self._name = name
        self._send = send
        self._clock = clock
        self._last = float("-inf")
        self.detail = detail
        self.num_bytes: int | None = None

    def progress(
        self,
        fraction: float | None = None,
        *,
        detail: str | None = None,
        num_bytes: int | None = None,
    ) -> None:
        """Report how far the stage is; what is given replaces what was said before."""
        if detail is not None:
            self.detail = detail
        if num_bytes is not None:
            self.num_bytes = num_bytes
        now = self._clock()
        if now - self._last >= 0.1:
            self._last = now
            self._send(Stage(self._name, "progress", fraction, self.detail, self.num_bytes))
