"""Readings as text: rows for a screen, a line for a log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from trioserve.progress import draw_stages, format_bytes
from trioserve.top.reading import QUANTILES, Latency, Reading

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NONE = "-"
STARTING = ("loading", "restarting")
STYLES = {"ready": "bold green", "failed": "bold red", "closed": "bold red"}


class View(Protocol):
    """Shows what the last look has brought."""

    def show(self, reading: Reading) -> None: ...
    def gone(self, address: str, why: str, reading: Reading | None) -> None:
        """The server did not answer; ``reading`` is the last there was."""

    def close(self) -> None: ...


class LinesView:
    """A line for each look; one more when the server goes, and none until it is back."""

    def __init__(self) -> None:
        self._why: str | None = None

    def show(self, reading: Reading) -> None:
        """Print the line."""
        self._why = None
        print(line(reading), flush=True)

    def gone(self, address: str, why: str, reading: Reading | None) -> None:
        """Print why, once."""
        if why != self._why:
            print(lost(address, why), flush=True)
        self._why = why

    def close(self) -> None:
        """Nothing is open."""


class LiveView:
    """Redrawn in place at each look, by whoever calls and never by a thread."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def show(self, reading: Reading) -> None:
        """Draw it."""
        self._live.update(draw(reading), refresh=True)

    def gone(self, address: str, why: str, reading: Reading | None) -> None:
        """Draw why, above what was last known."""
        from rich.console import Group
        from rich.text import Text

        message = Text(lost(address, why), "bold red")
        parts = [message] if reading is None else [message, draw(reading, "dim")]
        self._live.update(Group(*parts), refresh=True)

    def close(self) -> None:
        """Leave the last drawing on the screen, and the cursor as it was."""
        self._live.stop()


def make_view() -> View:
    """For stdout: a live view on a terminal, lines elsewhere."""
    if not sys.stdout.isatty():
        return LinesView()
    from rich.console import Console

    return LiveView(Console(file=sys.stdout))


def draw(reading: Reading, style: str = "") -> RenderableType:
    """Title, then the stages while they run, then the rows."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    heading = Text(title(reading), style or STYLES.get(reading.phase, "bold yellow"))
    parts: list[RenderableType] = [heading]
    if reading.phase in STARTING:
        parts.append(draw_stages(reading.stages))
    if reading.phase != "loading":
        table = Table.grid(padding=(0, 2))
        for name, text in rows(reading):
            table.add_row(Text(name, "dim"), Text(text, style))
        parts.append(table)
    return Group(*parts)


def snapshot(reading: Reading) -> str:
    """All there is to say, as plain text of several lines."""
    lines = [title(reading)]
    if reading.phase != "ready":
        lines += [
            f"  {stage.name:<12} {stage.state}"
            + (f" {stage.fraction:.0%}" if stage.state == "running" and stage.fraction else "")
            + (f" {stage.seconds:.2f} s" if stage.seconds is not None else "")
            + (f" {format_bytes(stage.num_bytes)}" if stage.num_bytes else "")
            + (f" {stage.detail}" if stage.detail else "")
            for stage in reading.stages
        ]
    if reading.phase != "loading":
        lines += [f"  {name:<12} {text}" for name, text in rows(reading)]
    return "\n".join(lines)


def title(reading: Reading) -> str:
    """Model, phase, how long it is up; what it died of."""
    text = f"{reading.model}: {reading.phase}, up {duration(reading.uptime_s)}"
    if reading.incarnation > 1:
        text += f", incarnation {reading.incarnation}"
    return f"{text}; {reading.cause}" if reading.cause else text


def rows(reading: Reading) -> list[tuple[str, str]]:
    """Names and texts of all figures."""
    r = reading
    tokens = f" of {r.kv_tokens} tokens" if r.kv_tokens else ""
    shown = [
        ("requests", f"{r.running} running, {r.waiting} waiting, {r.open} open"),
        ("answered", f"{number(r.requests_per_s)}/s; " + counts(r.answered)),
        ("ended by", counts(r.finished)),
        ("prompt", f"{number(r.prompt_per_s)} tokens/s"),
        ("output", f"{number(r.output_per_s)} tokens/s"),
        ("KV cache", f"{r.kv_share:.1%}{tokens}, {r.preemptions} preemptions"),
        ("prefix hits", NONE if r.hit_share is None else f"{r.hit_share:.0%}"),
    ]
    shown += [(latency.name, quantile_text(latency)) for latency in r.latencies]
    lag = "" if r.lag_s is None else f", p99 of a loop's pass {seconds(r.lag_s)}"
    shown.append(("measured", measured(r)))
    shown.append(("server", f"{r.connections} connections, blocked {r.blocked} times{lag}"))
    return shown


def line(reading: Reading) -> str:
    """The most important figures on one line."""
    r = reading
    if r.phase != "ready":
        running = [stage for stage in r.stages if stage.state in ("running", "failed")]
        if not running or r.phase not in (*STARTING, "failed"):
            return title(r)
        stage = running[-1]
        done = "" if stage.fraction is None else f" {stage.fraction:.0%}"
        return f"{title(r)}; stage {stage.name}{done}"
    hits = NONE if r.hit_share is None else f"{r.hit_share:.0%}"
    first, following = r.latencies[:2]
    return (
        f"{r.model}: running {r.running}, waiting {r.waiting}, "
        f"{number(r.requests_per_s)} requests/s, prompt {number(r.prompt_per_s)} tokens/s, "
        f"output {number(r.output_per_s)} tokens/s, KV cache {r.kv_share:.1%}, prefix hits {hits}, "
        f"{first.name} {seconds(first.quantiles[0])}, {following.name} "
        f"{seconds(following.quantiles[0])}; {measured(r)}"
    )


def measured(reading: Reading) -> str:
    """``rates over 5.0 s, the rest over 1:00``: both are shorter when the look has just begun."""
    rates_s, latencies_s = reading.rates_s, reading.latencies_s
    rates = "no rates yet" if rates_s is None else f"rates over {duration(rates_s)}"
    rest = "since the start" if latencies_s is None else f"over {duration(latencies_s)}"
    return f"{rates}, quantiles and hits {rest}"


def lost(address: str, why: str) -> str:
    """What is said of a server that does not answer."""
    return f"no answer from {address}: {why}; trying on"


def counts(values: dict[str, int]) -> str:
    """``2xx 5, 4xx 1``: those that are not 0."""
    said = [f"{name} {value}" for name, value in values.items() if value]
    return ", ".join(said) or "none"


def quantile_text(latency: Latency) -> str:
    """``p50 12 ms, p90 20 ms, p99 31 ms``."""
    pairs = zip(QUANTILES, latency.quantiles, strict=True)
    return ", ".join(f"p{share * 100:.0f} {seconds(value)}" for share, value in pairs)


def number(value: float | None) -> str:
    """One decimal."""
    return NONE if value is None else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """Milliseconds below a second."""
    if value is None:
        return NONE
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def duration(value: float) -> str:
    """``3.2 s``, ``4:05``, ``1:02:03``."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
