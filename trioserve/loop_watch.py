"""Watches the loop of ``trioserve run``: how long its passes take, and what blocked a long one.

Everything in the parent shares one loop; a step that does not give it back holds up every stream,
probe and deadline. A pass that lasts ``LIMIT_S`` or more is counted, and logged with the stack that
was running when the limit was reached.

The stack is taken by a signal handler between two instructions of the main thread; where native
code holds the interpreter, that is when it returns, in the frame that called it. A timer of the
kernel sends the signal; it is armed for as long as a pass runs and never while the loop waits, so
an idle server is not woken. docs/decisions/0003-loop-watch.md has the alternatives.

For the process that is ours alone: it takes SIGALRM and the process's one real-time timer.
``open_engine`` does not use it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator
from types import FrameType

import trio
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

logger = logging.getLogger("trioserve.loop")

LIMIT_S = 0.25
CPU_AGE_S = 0.01  # of the last look at the processor time: it is dear for every pass
MAX_FRAMES = 100
QUIET_S = 5.0  # after a stack was logged, others are only counted for this long
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopWatch(trio.abc.Instrument):
    """Times each pass of the loop: from the end of one wait for I/O to the beginning of the next.

    Made by ``watching_loop``. Only trio's calls write to it, in the loop's own thread.

    Attributes:
        num_passes: how many passes lasted up to each of ``BUCKETS``, each counted once, and longer.
        sum_s: of all passes.
        num_blocked: passes of ``limit_s`` and more.
    """

    def __init__(self, limit_s: float, quiet_s: float) -> None:
        self.num_passes = [0] * (len(BUCKETS) + 1)
        self.sum_s = 0.0
        self.num_blocked = 0
        self._limit_s = limit_s
        self._quiet_s = quiet_s
        self._began_s: float | None = None
        self._cpu_s = 0.0  # of this thread, when last looked at
        self._looked_s = -math.inf
        self._quiet_until_s = 0.0
        self._num_unsaid = 0
        self._stack: list[str] = []  # of the present pass, once it has lasted too long

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins."""
        self._began_s = now_s = time.monotonic()
        if now_s - self._looked_s > CPU_AGE_S:
            self._looked_s, self._cpu_s = now_s, time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def before_io_wait(self, timeout: float) -> None:
        """A pass has ended; with ``timeout`` 0 the next follows at once and arms the timer anew."""
        if timeout:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self._began_s is None:
            return  # the first call comes before anything has run
        now_s = time.monotonic()
        lag_s = now_s - self._began_s
        self.num_passes[bisect_left(BUCKETS, lag_s)] += 1
        self.sum_s += lag_s
        if lag_s >= self._limit_s:
            self.num_blocked += 1
            self._report(lag_s, min(lag_s, time.thread_time() - self._cpu_s), now_s)

    def _report(self, lag_s: float, cpu_s: float, now_s: float) -> None:
        stack = self._take_stack()
        if now_s < self._quiet_until_s:
            self._num_unsaid += 1
            return
        unsaid, self._num_unsaid = self._num_unsaid, 0
        logger.warning(
            "the event loop was blocked for %.2f s, %.2f s of it computing%s; the stack after "
            "%g s, most recent call first:\n%s",
            lag_s,
            cpu_s,
            f" ({unsaid} times more since the last such line)" if unsaid else "",
            self._limit_s,
            stack,
        )
        # By the clock, as writing to a slow stderr may be what blocks.
        self._quiet_until_s = time.monotonic() + self._quiet_s

    def note_stack(self, signum: int, frame: FrameType | None) -> None:
        """The signal's handler. It only walks the frames: what it interrupts may hold any lock."""
        lines: list[str] = []
        while frame is not None and len(lines) < MAX_FRAMES:
            code = frame.f_code
            if code.co_name == "unrolled_run":  # what is below the task is trio's
                break
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        self._stack = lines

    def _take_stack(self) -> str:
        lines, self._stack = self._stack, []
        return "\n".join(lines) or "  (not taken: the process did not run)"


class LoopMetrics(Collector):
    """The series of a LoopWatch, read at each scrape."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Both series."""
        watch = self._watch
        yield CounterMetricFamily(
            "trioserve_event_loop_blocked",
            f"Passes of the server's event loop that lasted {LIMIT_S:g} s or more.",
            value=watch.num_blocked,
        )
        buckets, total = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), watch.num_passes, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(
            "trioserve_event_loop_lag_seconds",
            "How long a pass of the server's event loop kept everything else waiting.",
            buckets=buckets,
            sum_value=watch.sum_s,
        )


@contextlib.contextmanager
def watching_loop(limit_s: float = LIMIT_S, quiet_s: float = QUIET_S) -> Iterator[LoopWatch]:
    """A LoopWatch for ``trio.run(..., instruments=[...])`` on the main thread.

    SIGALRM and the real-time timer are its own inside the block and as before after it.
    """
    watch = LoopWatch(limit_s, quiet_s)
    before = signal.signal(signal.SIGALRM, watch.note_stack)
    try:
        yield watch
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
