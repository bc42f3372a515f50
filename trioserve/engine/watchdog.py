"""The watchdog: tells a worker that is busy within its budget from one that is stuck.

Owns nothing. Reads the status page, which the worker's main thread writes, and the process's CPU
time, which the kernel writes even while the GIL is held for ever.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import trio

from trioserve.config.schema import Config
from trioserve.errors import StartupError, WorkerStalled
from trioserve.ipc.process import Worker
from trioserve.ipc.status_page import IDLE, PAUSED, Status, explain, judge, process_cpu_seconds

logger = logging.getLogger("trioserve.watchdog")

DUMP_WAIT_S = 1.0  # for the stacks to arrive on stderr
LAST_DUMP_WAIT_S = 0.2


class Watched(Protocol):
    """What the watchdog may know of an incarnation."""

    unanswered_s: float | None

    @property
    def progress_s(self) -> float: ...

    @property
    def ready(self) -> bool: ...

    @property
    def stage(self) -> str: ...


async def watch_worker(worker: Worker, config: Config, watched: Watched) -> None:
    """Look at the worker every ``watchdog.interval_s``; ends only by raising or cancellation.

    Before Ready the limit is silence: no event for ``engine.startup_silence_s``. After it, the
    limit is the budget that the worker itself declared for what it is doing.

    Raises:
        StartupError: start-up made no progress.
        WorkerStalled: an operation is over its budget.
    """
    interval_s = config.watchdog.interval_s
    cpu_s = process_cpu_seconds(worker.pid) or 0.0
    while True:
        await trio.sleep(interval_s)
        cpu_before, cpu_s = cpu_s, process_cpu_seconds(worker.pid) or cpu_s
        if not watched.ready:
            silent_s = trio.current_time() - watched.progress_s
            if silent_s > config.engine.startup_silence_s:
                await _dump_stacks(worker)
                if watched.ready or trio.current_time() - watched.progress_s < DUMP_WAIT_S:
                    logger.warning("the worker goes on: it was slow, or this process was")
                    continue
                await _dump_more(worker)
                raise StartupError(
                    watched.stage,
                    f"no progress for {silent_s:.0f} s; raise engine.startup_silence_s if this "
                    "stage may take so long",
                )
            continue
        if not config.watchdog.enabled:
            continue
        status = worker.status.read()
        if stuck := _stuck(status, watched, cpu_s, cpu_before, config):
            await _dump_stacks(worker)
            if worker.status.read()[1:] != status[1:]:
                logger.warning("the worker goes on: it was slow, or this process was")
                continue
            await _dump_more(worker)
            raise WorkerStalled(f"the worker is stuck: {stuck} (watchdog.step_budget_s)")


def _stuck(
    status: Status, watched: Watched, cpu_s: float, cpu_before: float, config: Config
) -> str:
    """What the worker is stuck in; empty where it is not. It also is if it does not begin."""
    now = time.monotonic()
    if judge(status, cpu_s, cpu_before, now) == "over budget":
        return explain(status, cpu_s, cpu_before, config.watchdog.interval_s, now)
    if status.operation in (IDLE, PAUSED) and watched.unanswered_s is not None:
        waited_s = trio.current_time() - watched.unanswered_s
        if waited_s > config.watchdog.step_budget_s:
            return f"it has not taken up a request in {waited_s:.1f} s"
    return ""


async def _dump_stacks(worker: Worker) -> None:
    """Have the worker's stacks written to the log; cancellation changes nothing."""
    logger.error("worker %d seems stuck; its stacks follow", worker.pid)
    worker.dump_stacks()
    await trio.sleep(DUMP_WAIT_S)


async def _dump_more(worker: Worker) -> None:
    """The same once it is to be killed, by the way that sees into native code too."""
    worker.dump_stacks_and_die()
    await trio.sleep(LAST_DUMP_WAIT_S)
