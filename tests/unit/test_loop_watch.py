"""The watch over the server's own loop. These tests really block it: they are about just that."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

import trioserve
from trioserve.loop_watch import BUCKETS, LIMIT_S, LoopMetrics, LoopWatch, watching_loop


async def sleep_in_a_task() -> None:
    await trio.lowlevel.checkpoint()
    time.sleep(0.4)  # noqa: ASYNC251
    await trio.lowlevel.checkpoint()


async def hold_the_gil_in_a_task(seconds: float = 0.4) -> None:
    """One call into native code, which gives the GIL back to nobody until it is done."""
    await trio.lowlevel.checkpoint()
    length, took_s = 16, 0.0
    while took_s < seconds:
        began = time.monotonic()
        hold_the_gil(length)
        took_s = time.monotonic() - began
        length += 1
        await trio.lowlevel.checkpoint()


def hold_the_gil(length: int) -> None:
    re.match(r"(a+)+$", "a" * length + "b")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "trioserve.loop"]


def test_a_blocked_loop_is_counted_and_logged_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with watching_loop() as watch:
        trio.run(sleep_in_a_task, instruments=[watch])
    assert watch.num_blocked == 1
    [message] = messages(caplog)
    first, stack = message.split("\n", 1)
    assert "blocked for 0.4" in first
    assert " 0.00 s of it computing" in first
    assert "in sleep_in_a_task" in stack.splitlines()[0]
    assert stack.endswith("in sleep_in_a_task"), "what is below the task is trio's"
    assert "test_loop_watch" in stack


def test_the_stack_is_taken_while_native_code_holds_the_gil(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with watching_loop() as watch:
        trio.run(hold_the_gil_in_a_task, instruments=[watch])
    assert watch.num_blocked >= 1
    message = messages(caplog)[0]
    assert "in match" in message.splitlines()[1]
    assert "in hold_the_gil_in_a_task" in message
    lag_s, cpu_s = map(float, re.findall(r"([\d.]+) s(?: of it|,)", message)[:2])
    assert 0 < cpu_s <= lag_s + 0.1


def test_waiting_is_not_blocking(caplog: pytest.LogCaptureFixture) -> None:
    with watching_loop(limit_s=0.05) as watch:
        trio.run(trio.sleep, 0.2, instruments=[watch])
    assert watch.num_blocked == 0
    assert messages(caplog) == []
    assert 0 < sum(watch.num_passes) < 20
    assert watch.sum_s < 0.1


def test_the_timer_does_not_run_while_the_loop_waits() -> None:
    """An armed timer would end the wait with a signal, and an idle server would be woken."""
    seen = []

    class Look(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            seen.append((timeout, signal.getitimer(signal.ITIMER_REAL)[0]))

    with watching_loop() as watch:
        trio.run(trio.sleep, 0.01, instruments=[watch, Look()])
    waits = [left for timeout, left in seen if timeout]
    assert waits
    assert set(waits) == {0.0}


def test_a_busy_loop_of_short_passes_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    async def busy() -> None:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            await trio.lowlevel.checkpoint()

    with watching_loop(limit_s=0.1) as watch:
        trio.run(busy, instruments=[watch])
    assert sum(watch.num_passes) > 100
    assert watch.num_blocked == 0, messages(caplog)
    assert 0.1 < watch.sum_s < 1.0


def test_repeated_blocks_are_counted_and_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            time.sleep(0.03)

    async def block(times: int, levels: int) -> None:
        for _ in range(times):
            await trio.lowlevel.checkpoint()
            deep(levels)

    with watching_loop(limit_s=0.02, quiet_s=60.0) as watch:
        trio.run(block, 4, 10, instruments=[watch])
        assert watch.num_blocked == 4
        assert len(messages(caplog)) == 1
        watch._quiet_until_s = 0.0
        trio.run(block, 1, 0, instruments=[watch])
    assert "(3 times more since the last such line)" in messages(caplog)[1]
    assert messages(caplog)[0].count("in deep") == 11
    assert messages(caplog)[1].count("in deep") == 1, "an older stack is in it"


def test_a_long_pass_without_a_stack_says_so(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(0.0, 0.0)
    watch.after_io_wait(0.0)
    watch.before_io_wait(1.0)
    assert messages(caplog)[0].endswith("\n  (not taken: the process did not run)")


def test_nothing_is_left_of_it() -> None:
    before = set(os.listdir("/proc/self/fd"))

    async def fail() -> None:
        raise RuntimeError("an end in the middle of a pass")

    with pytest.raises(RuntimeError), watching_loop() as watch:
        trio.run(fail, instruments=[watch])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_handler_at_any_moment_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """faulthandler's, in C, ends the process sooner or later: a frame it walks may be half made."""
    taken = 0

    async def work() -> None:
        nonlocal taken
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            await trio.lowlevel.checkpoint()
            json.loads('{"a": [1, 2, 3]}', object_pairs_hook=lambda pairs: dict(pairs))
            assert sum(sorted(range(50), key=lambda value: -value)) == 1225
            taken += len(watch._stack)

    with watching_loop(limit_s=0.0003, quiet_s=60.0) as watch:
        trio.run(work, instruments=[watch])
    assert watch.num_blocked or taken


def test_only_the_servers_own_process_is_watched() -> None:
    """``open_engine`` runs in programs of others, whose signals and timers are theirs."""
    package = Path(trioserve.__file__).parent
    users = [p.name for p in package.rglob("*.py") if "loop_watch" in p.read_text()]
    assert users == ["main.py"]


def test_series() -> None:
    watch = LoopWatch(LIMIT_S, 0.0)
    watch.num_passes = [3, 2, *[0] * (len(BUCKETS) - 2), 1]
    watch.sum_s, watch.num_blocked = 7.5, 1
    registry = CollectorRegistry()
    registry.register(LoopMetrics(watch))
    text = generate_latest(registry).decode()
    assert "trioserve_event_loop_blocked_total 1.0\n" in text
    assert 'trioserve_event_loop_lag_seconds_bucket{le="0.0005"} 3.0\n' in text
    assert 'trioserve_event_loop_lag_seconds_bucket{le="0.001"} 5.0\n' in text
    assert 'trioserve_event_loop_lag_seconds_bucket{le="5.0"} 5.0\n' in text
    assert "trioserve_event_loop_lag_seconds_count 6.0\n" in text
    assert "trioserve_event_loop_lag_seconds_sum 7.5\n" in text
