"""What a service manager is told, and when."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config.schema import Config, EngineConfig
from trioserve.engine.api import EngineStatus, Phase, StageStatus
from trioserve.engine.engine import Engine
from trioserve.errors import RequestFailed
from trioserve.ipc.messages import Stage
from trioserve.notify import (
    Limits,
    Told,
    describe,
    due,
    notify_manager,
    send,
    watchdog_seconds,
)

LIMITS = Limits(watchdog_s=10.0, silence_s=60.0, drain_s=20.0)
LOADING = EngineStatus(
    phase=Phase.LOADING,
    incarnation=1,
    stages=[StageStatus("spawn", "done"), StageStatus("weights", "running", 0.47)],
    cause=None,
    model_name="m",
    info=None,
    stats=None,
    num_requests=0,
    uptime_s=1.0,
    ready_after_s=None,
)


def at(phase: Phase, cause: str | None = None) -> EngineStatus:
    return attrs.evolve(LOADING, phase=phase, cause=cause)


def test_loading_extends_the_start_with_each_progress_and_pings() -> None:
    first, told = due(Told(), LOADING, LIMITS, 100.0, 100.0)
    assert first == [
        "EXTEND_TIMEOUT_USEC=90000000",
        "STATUS=loading: weights 40 %",
        "WATCHDOG=1",
    ]
    assert due(told, LOADING, LIMITS, 101.0, 100.0) == ([], told)
    assert due(told, LOADING, LIMITS, 100.5, 100.4)[0] == [], "not for every percent"
    assert due(told, LOADING, LIMITS, 101.0, 100.4)[0] == ["EXTEND_TIMEOUT_USEC=90000000"]


def test_ready_is_told_once_with_the_process() -> None:
    ready = at(Phase.READY)
    first, told = due(Told(), ready, LIMITS, 5.0, 0.0)
    assert first == ["READY=1", f"MAINPID={os.getpid()}", "STATUS=ready: m", "WATCHDOG=1"]
    assert due(told, ready, LIMITS, 6.0, 0.0) == ([], told)
    again, told = due(told, at(Phase.RESTARTING, "died"), LIMITS, 7.0, 0.0)
    assert again == ["STATUS=restarting: weights 40 %"]
    assert due(told, ready, LIMITS, 7.1, 0.0)[0] == ["STATUS=ready: m"]


@pytest.mark.parametrize("phase", list(Phase))
def test_pings_come_twice_a_timeout_while_the_engine_is_well(phase: Phase) -> None:
    told = Told(ready=True, stopping=True, text=describe(at(phase)), ping_s=100.0, extended_s=1e9)
    assert due(told, at(phase), LIMITS, 101.0, 101.0)[0] == []
    well = phase not in (Phase.FAILED, Phase.CLOSED)
    assert due(told, at(phase), LIMITS, 105.0, 105.0)[0] == ["WATCHDOG=1"] * well


def test_loading_without_progress_is_not_pinged_for() -> None:
    told = Told(text=describe(LOADING), extended_s=10.0)
    assert due(told, LOADING, LIMITS, 70.0, 10.0)[0] == ["WATCHDOG=1"]
    assert due(told, LOADING, LIMITS, 70.1, 10.0)[0] == []
    assert due(told, at(Phase.READY), LIMITS, 999.0, 10.0)[0][-1] == "WATCHDOG=1"


@pytest.mark.parametrize(
    ("phase", "status"),
    [
        (Phase.DRAINING, "draining: shutting down"),
        (Phase.FAILED, "failed: it died of this"),
        (Phase.CLOSED, "closed: shutting down"),
    ],
)
def test_the_end_is_told_once_with_the_time_it_may_take(phase: Phase, status: str) -> None:
    cause = "it died\nof this" if phase is Phase.FAILED else None
    first, told = due(Told(ready=True), at(phase, cause), LIMITS, 5.0, 0.0)
    assert first[:3] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=50000000", f"STATUS={status}"]
    assert due(told, at(phase, cause), LIMITS, 6.0, 0.0)[0] == []


def test_without_a_watchdog_nothing_pings() -> None:
    limits = attrs.evolve(LIMITS, watchdog_s=None)
    assert "WATCHDOG=1" not in due(Told(), LOADING, limits, 5.0, 5.0)[0]


def test_a_status_is_always_one_line() -> None:
    assert describe(attrs.evolve(LOADING, stages=[])) == "loading"
    assert describe(attrs.evolve(LOADING, stages=[StageStatus("x", "running")])) == "loading: x"
    assert "\n" not in describe(at(Phase.FAILED, "a\n\nb"))


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "7"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "x"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_the_watchdogs_timeout(environment: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environment, 7) == seconds


def test_sending_never_waits_and_never_fails(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    assert not send(str(path), ["READY=1"])
    path.write_text("not a socket")
    assert not send(str(path), ["READY=1"])
    assert not send("/" + "x" * 200, ["READY=1"])
    assert not send("/a\0b", ["READY=1"])
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        sent = 0
        while send(str(path), ["WATCHDOG=1"]):  # until its queue is full: never read
            sent += 1
            assert sent < 100_000
        assert sent
    assert not send(str(path), ["READY=1"]), "its owner has closed it"


def test_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0trioserve-unit-{os.getpid()}")
        systemd.setblocking(False)
        assert send(f"@trioserve-unit-{os.getpid()}", ["READY=1", "STATUS=up"])
        assert systemd.recv(100) == b"READY=1\nSTATUS=up"


async def test_a_message_that_cannot_be_sent_is_sent_later(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "notify"
    engine = Engine(Config(engine=EngineConfig(startup_silence_s=10.0, drain_timeout_s=3.0)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notify_manager, engine, {"NOTIFY_SOCKET": str(path)})
        await wait_all_tasks_blocked()
        engine.on_stage(Stage("weights", "start"))
        await trio.sleep(3)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(path))
            systemd.setblocking(False)
            await trio.sleep(2)
            first = systemd.recv(4096).decode()
            engine.begin_drain()
            await wait_all_tasks_blocked()
            second = systemd.recv(4096).decode()
        nursery.cancel_scope.cancel()
    assert first == "EXTEND_TIMEOUT_USEC=40000000\nSTATUS=loading: weights"
    assert second == "STOPPING=1\nEXTEND_TIMEOUT_USEC=33000000\nSTATUS=draining: shutting down"


async def test_each_progress_extends_the_start_if_only_a_tick_later(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    engine = Engine(Config(engine=EngineConfig(startup_silence_s=10.0)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)

        def said() -> list[str]:
            try:
                return systemd.recv(4096).decode().split("\n") + said()
            except BlockingIOError:
                return []

        async with trio.open_nursery() as nursery:
            environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
            nursery.start_soon(notify_manager, engine, environment)
            await trio.sleep(5)
            extension = "EXTEND_TIMEOUT_USEC=40000000"
            assert said() == [extension, "STATUS=loading"]
            await trio.sleep(5)
            assert said() == []
            engine.on_stage(Stage("weights", "progress", fraction=0.5))
            await wait_all_tasks_blocked()
            assert said() == [extension]
            await trio.sleep(0.1)
            engine.on_stage(Stage("weights", "progress", fraction=0.51))
            await wait_all_tasks_blocked()
            assert said() == []
            await trio.sleep(2)
            assert said() == [extension]
            nursery.cancel_scope.cancel()


async def test_the_last_message_too_is_sent_later(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing changes any more that would make us look again."""
    path = tmp_path / "notify"
    engine = Engine(Config())
    engine.begin_drain()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notify_manager, engine, {"NOTIFY_SOCKET": str(path)})
        await trio.sleep(3)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(path))
            systemd.setblocking(False)
            await trio.sleep(2)
            assert systemd.recv(4096).startswith(b"STOPPING=1\n")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1"])
async def test_without_a_manager_there_is_no_task(address: str) -> None:
    environment = {"NOTIFY_SOCKET": address} if address else {}
    with trio.fail_after(1):
        await notify_manager(Engine(Config()), environment)


async def test_the_task_ends_with_the_engine(tmp_path: Path) -> None:
    engine = Engine(Config())
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notify_manager, engine, {"NOTIFY_SOCKET": str(tmp_path / "none")})
            await wait_all_tasks_blocked()
            engine.end_incarnation(Phase.FAILED, RequestFailed("it died"), "it died")
