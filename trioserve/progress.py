"""What an operator sees of start-up: a live stage tree on a terminal, else a line per stage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from trioserve.engine.api import EngineStatus, Phase, StageStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trioserve.engine.engine import Engine

logger = logging.getLogger("trioserve.start")


class StageView(Protocol):
    """Shows statuses as they change."""

    def show(self, status: EngineStatus) -> None: ...
    def close(self) -> None: ...


async def report_progress(engine: Engine, addresses: list[str], console: Console | None) -> None:
    """Show start-up until the engine has ended, and one summary at each Ready.

    Cancellation leaves the terminal in order.
    """
    view: StageView = LiveView(console) if console is not None else LineView()
    summed_up = 0
    try:
        async for status in engine.watch():
            view.show(status)
            if status.phase is Phase.READY and summed_up < status.incarnation:
                summed_up = status.incarnation
                view.close()
                for line in summary(status, addresses):
                    logger.info("%s", line)
    finally:
        view.close()


class LineView:
    """A log line as each stage starts (if it lasts), advances by a quarter, and ends."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], str] = {}

    def show(self, status: EngineStatus) -> None:
        """Log what is new in this status."""
        for stage in status.stages:
            text = self._text(stage)
            key = (status.incarnation, stage.name)
            if text is not None and self._said.get(key) != text[0]:
                self._said[key] = text[0]
                logger.info("%s", text[1], extra={"stage": stage.name, "seconds": stage.seconds})

    def close(self) -> None:
        """Nothing is open."""

    @staticmethod
    def _text(stage: StageStatus) -> tuple[str, str] | None:
        """What to say of a stage, and a key that changes when it is worth saying again."""
        if stage.state == "pending" or (stage.state == "done" and stage.seconds is None):
            return None
        size = f", {format_bytes(stage.num_bytes)}" if stage.num_bytes else ""
        detail = f" ({stage.detail})" if stage.detail else ""
        if stage.state == "done":
            return "done", f"{stage.name}: {stage.seconds:.2f} s{size}{detail}"
        if stage.state == "failed":
            return "failed", f"{stage.name}: failed{size}{detail}"
        quarter = int((stage.fraction or 0.0) * 4)
        if quarter == 0:
            return "running 0", f"{stage.name} …{detail}"
        return f"running {quarter}", f"{stage.name}: {stage.fraction:.0%}{size}"


class LiveView:
    """The stage tree with bars, redrawn in place; drawn by whoever calls, never by a thread."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._open = False

    def show(self, status: EngineStatus) -> None:
        """Draw while the engine loads."""
        if status.phase not in (Phase.LOADING, Phase.RESTARTING):
            self.close()
            return
        if not self._open:
            self._live.start()
            self._open = True
        self._live.update(self._draw(status), refresh=True)

    def close(self) -> None:
        """Take the tree off the screen."""
        if self._open:
            self._live.stop()
            self._open = False

    @staticmethod
    def _draw(status: EngineStatus) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        marks = {"pending": "·", "running": "▸", "done": "✓", "failed": "✗"}
        styles = {"pending": "dim", "running": "bold cyan", "done": "green", "failed": "bold red"}
        table = Table.grid(padding=(0, 1))
        for stage in status.stages:
            style = styles[stage.state]
            bar: RenderableType = ""
            if stage.state == "running" and stage.fraction is not None:
                bar = ProgressBar(total=1.0, completed=stage.fraction, width=24)
            seconds = f"{stage.seconds:6.2f} s" if stage.seconds is not None else ""
            size = format_bytes(stage.num_bytes) if stage.num_bytes else ""
            table.add_row(
                Text(marks[stage.state], style),
                Text(stage.name, style),
                Text(seconds or ""),
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
    times = ", ".join(
        f"{stage.name} {stage.seconds:.2f}"
        for stage in status.stages
        if stage.seconds is not None and stage.seconds >= 0.005
    )
    return [
        f"{status.model_name}: {info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, "
        f"{info.weights} weights {format_bytes(info.weight_bytes)}, {info.device} with "
        f"{info.threads} threads, attention {info.attention}",
        f"KV cache {format_bytes(info.kv_cache_bytes)}: {tokens} tokens, "
        f"{tokens / info.max_model_len:.1f} requests at the full context of "
        f"{info.max_model_len} tokens",
        f"stages in s: {times}",
        f"ready after {status.uptime_s:.2f} s on {', '.join(addresses)}",
    ]


def format_bytes(num_bytes: float) -> str:
    """``93.0 MB``: decimal units, as disks and model pages count."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
