"""What an operator sees of start-up: a live stage tree on a terminal, else a line per stage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import trio

from trioserve.engine.api import EngineStatus, Phase, StageStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from trioserve.engine.engine import Engine

logger = logging.getLogger("trioserve.start")

TICK_S = 0.5  # how often a running stage is looked at
EVERY_S = 2.0  # how often a line says that it still runs
ONCE = ("resolve", "fetch", "inspect")  # stages that only the first incarnation has
STARTING = (Phase.LOADING, Phase.RESTARTING)


class StageView(Protocol):
    """Shows statuses as they change."""

    def show(self, status: EngineStatus) -> None: ...
    def close(self) -> None: ...


async def report_progress(engine: Engine, addresses: list[str], console: Console | None) -> None:
    """Show start-up until the engine has ended, and one summary at each Ready.

    Cancellation leaves the terminal in order.
    """
    view: StageView = LiveView(console) if console is not None else LineView(trio.current_time)
    summed_up = 0
    changes = engine.watch()
    try:
        while True:
            status = engine.status
            view.show(status)
            if status.phase is Phase.READY and summed_up < status.incarnation:
                summed_up = status.incarnation
                view.close()
                for line in summary(status, addresses):
                    logger.info("%s", line)
            with trio.move_on_after(TICK_S if status.phase in STARTING else float("inf")):
                try:
                    await anext(changes)
                except StopAsyncIteration:
                    return
    finally:
        view.close()


class LineView:
    """A log line as each stage ends; a stage that lasts also says that it runs, and how far it is.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: set[tuple[int, str]] = set()
        self._running: tuple[int, str] = (0, "")
        self._said_s = 0.0

    def show(self, status: EngineStatus) -> None:
        """Log what is new in this status."""
        for stage in status.stages:
            incarnation = 1 if stage.name in ONCE else status.incarnation
            key = (incarnation, stage.name)
            if stage.state == "running":
                self._show_running(key, stage)
                continue
            ended = stage.state == "failed" or stage.seconds is not None
            if ended and key not in self._ended:
                self._ended.add(key)
                self._log(stage, "failed" if stage.state == "failed" else "")

    def close(self) -> None:
        """Nothing is open."""

    def _show_running(self, key: tuple[int, str], stage: StageStatus) -> None:
        now = self._clock()
        if self._running != key:
            self._running = key
            self._said_s = now - EVERY_S + TICK_S  # its first line once it has lasted a tick
        elif now - self._said_s >= EVERY_S:
            self._said_s = now
            if stage.fraction is not None:
                self._log(stage, f"{stage.fraction:.0%}")
            else:
                self._log(stage, "…" if stage.seconds is None else f"{stage.seconds:.0f} s so far")

    @staticmethod
    def _log(stage: StageStatus, state: str) -> None:
        parts = [state] if state else [f"{stage.seconds:.2f} s"]
        if stage.num_bytes:
            parts.append(format_bytes(stage.num_bytes))
        if stage.detail:
            parts.append(stage.detail)
        logger.info(
            "%s: %s",
            stage.name,
            ", ".join(parts),
            extra={"stage": stage.name, "state": stage.state, "seconds": stage.seconds},
        )


class LiveView:
    """The stage tree with bars, redrawn in place; drawn by whoever calls, never by a thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def show(self, status: EngineStatus) -> None:
        """Draw while the engine loads."""
        if status.phase not in (Phase.LOADING, Phase.RESTARTING):
            self.close()
            return
        if self._live is None:
            from rich.live import Live

            # A new one each time: one that is started again rubs out the lines above it.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(draw_stages(status.stages), refresh=True)

    def close(self) -> None:
        """Take the tree off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def draw_stages(stages: list[StageStatus]) -> RenderableType:
    """The stages as a table, a row of one line each: a bar where it is known how far one is, else
    for how long it has run. Details are cut where the terminal ends."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    marks = {"pending": "·", "running": "▸", "done": "✓", "failed": "✗"}
    styles = {"pending": "dim", "running": "bold cyan", "done": "green", "failed": "bold red"}
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(5):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for stage in stages:
        style = styles.get(stage.state, "")
        bar: RenderableType = ""
        if stage.state == "running" and stage.fraction is not None:
            bar = ProgressBar(total=1.0, completed=stage.fraction, width=24)
        seconds = "" if stage.seconds is None else f"{stage.seconds:6.2f} s"
        size = format_bytes(stage.num_bytes) if stage.num_bytes else ""
        table.add_row(
            Text(marks.get(stage.state, "?"), style),
            Text(stage.name, style),
            Text(seconds),
            bar,
            Text(size),
            Text(stage.detail, "dim"),
        )
    return table


def summary(status: EngineStatus, addresses: list[str]) -> list[str]:
    """The lines that say what is served, from where, and what start-up cost."""
    info = status.info
    assert info is not None  # phase READY
    tokens = info.kv_cache_tokens
    again = status.incarnation > 1
    stages = {
        stage.name: stage.seconds
        for stage in status.stages
        if stage.seconds is not None and not (again and stage.name in ONCE)
    }
    times = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in stages.items() if seconds > 0.004
    )
    ready_s = sum(stages.values()) if again else status.uptime_s
    return [
        f"{status.model_name}: {info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, "
        f"{info.weights} weights {format_bytes(info.weight_bytes)}, {info.device} with "
        f"{info.threads} threads, attention {info.attention}",
        f"KV cache {format_bytes(info.kv_cache_bytes)}: {tokens} tokens, "
        f"{tokens / info.max_model_len:.1f} requests at the full context of "
        f"{info.max_model_len} tokens",
        f"stages in s: {times}",
        f"ready after {ready_s:.2f} s on {', '.join(addresses)}"
        + (f", incarnation {status.incarnation}" if again else ""),
    ]


def format_bytes(num_bytes: float) -> str:
    """``88.7 MiB``: powers of 1024, as memory is counted and the configuration counts."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
