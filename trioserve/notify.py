"""Tells a service manager what the server is at, in systemd's protocol.

Does nothing unless the environment has NOTIFY_SOCKET. Nothing here can hurt the server: no call
waits for the manager, and a message that cannot be sent is tried again later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import attrs
import trio

from trioserve.engine.api import EngineStatus, Phase
from trioserve.engine.engine import Engine

TICK_S = 1.0  # how often start-up is looked at, and how soon an unsent message is tried again
MARGIN_S = 30.0  # for what follows a deadline of ours: last words, the kill ladder
GOING = (Phase.DRAINING, Phase.FAILED, Phase.CLOSED)
ENDED = (Phase.FAILED, Phase.CLOSED)


async def notify_manager(engine: Engine, environment: Mapping[str, str]) -> None:
    """Report until the engine has ended; returns at once if no manager listens.

    A blocked loop sends no pings, and neither does an engine that loads without progress: then
    the manager's watchdog ends the server. Cancellation leaves nothing.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    limits = Limits(
        watchdog_s=watchdog_seconds(environment, os.getpid()),
        silence_s=engine.config.engine.startup_silence_s,
        drain_s=engine.config.engine.drain_timeout_s,
    )
    told, progress_s = Told(), trio.current_time()
    seen: list[tuple[object, ...]] = []
    while True:
        status, now = engine.status, trio.current_time()
        positions = [stage.position for stage in status.stages]
        if positions != seen:
            seen, progress_s = positions, now
        lines, after = due(told, status, limits, now, progress_s)
        sent = not lines or send(address, lines)
        told = after if sent else told
        if status.phase in ENDED:
            return
        with trio.move_on_after(pause_s(status, limits) if sent else TICK_S):
            await engine.wait_change()


@attrs.frozen
class Limits:
    """What the manager and we allow. ``watchdog_s`` is None if the manager wants no pings."""

    watchdog_s: float | None
    silence_s: float  # of a stage without progress
    drain_s: float


@attrs.frozen
class Told:
    """What the manager knows. Times are of trio's clock."""

    ready: bool = False
    stopping: bool = False
    text: str = ""
    ping_s: float = float("-inf")
    extended_s: float = float("-inf")


def due(
    told: Told, status: EngineStatus, limits: Limits, now: float, progress_s: float
) -> tuple[list[str], Told]:
    """The lines to send now, and what the manager knows once it has them.

    Args:
        progress_s: when a stage last moved.
    """
    lines = []
    starting = status.phase is Phase.LOADING
    after = attrs.evolve(
        told,
        ready=told.ready or status.phase is Phase.READY,
        stopping=told.stopping or status.phase in GOING,
        text=describe(status),
    )
    if after.ready and not told.ready:
        lines += ["READY=1", f"MAINPID={os.getpid()}"]
    if after.stopping and not told.stopping:
        lines += ["STOPPING=1", extend(limits.drain_s)]
    elif starting and progress_s > told.extended_s and now - told.extended_s >= TICK_S:
        # Our own deadline comes first and names the stage, which the manager's cannot.
        lines.append(extend(limits.silence_s))
        after = attrs.evolve(after, extended_s=now)
    if after.text != told.text:
        lines.append(f"STATUS={after.text}")
    if limits.watchdog_s is not None and now - told.ping_s >= limits.watchdog_s / 4:
        stuck = starting and now - progress_s > limits.silence_s
        if status.phase not in ENDED and not stuck:
            lines.append("WATCHDOG=1")
            after = attrs.evolve(after, ping_s=now)
    return lines, after


def pause_s(status: EngineStatus, limits: Limits) -> float:
    """How long to wait for a change before looking again."""
    ping_s = float("inf") if limits.watchdog_s is None else limits.watchdog_s / 2
    return min(ping_s, TICK_S) if status.phase is Phase.LOADING else ping_s


def describe(status: EngineStatus) -> str:
    """One line for people. Coarse, as each change of it is a message."""
    if status.phase is Phase.READY:
        return f"ready: {status.model_name}"
    if status.phase not in (Phase.LOADING, Phase.RESTARTING):
        return " ".join(f"{status.phase}: {status.cause or 'shutting down'}".split())
    for stage in status.stages:
        if stage.state == "running":
            done = "" if not stage.fraction else f" {int(stage.fraction * 10)}0 %"
            return f"{status.phase}: {stage.name}{done}"
    return str(status.phase)


def extend(seconds: float) -> str:
    """Allow the start or the stop under way this long from now, if its timeout is shorter."""
    return f"EXTEND_TIMEOUT_USEC={int((seconds + MARGIN_S) * 1e6)}"


def watchdog_seconds(environment: Mapping[str, str], pid: int) -> float | None:
    """The longest that the manager waits for a ping of this process, if it wants any."""
    try:
        seconds = int(environment.get("WATCHDOG_USEC", "")) / 1e6
        meant = int(environment.get("WATCHDOG_PID", pid))
    except ValueError:
        return None
    return seconds if seconds > 0 and meant == pid else None


def send(address: str, lines: list[str]) -> bool:
    """Send one message; whether it has gone out. ``@`` begins an abstract address."""
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto("\n".join(lines).encode(errors="replace"), name)
    except OSError:
        return False
    return True
