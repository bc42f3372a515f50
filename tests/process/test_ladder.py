"""Leaving ``open_worker``: each rung of the kill ladder, and nothing left after any of them."""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

import trioserve
from trioserve.errors import WorkerDied, WorkerStalled
from trioserve.ipc.fake import FakeProcess, FakeWorker, fake_endpoints
from trioserve.ipc.messages import PROTOCOL, Check, Checked, Exit, Hello, Stage
from trioserve.ipc.pipes import ReadPipe
from trioserve.ipc.process import Worker, attach, available_memory_bytes, open_worker
from trioserve.ipc.spawn import Endpoints, adopt, spawn
from trioserve.ipc.status_page import create_page, group_members, process_cpu_seconds, process_state

pytestmark = pytest.mark.usefixtures("nothing_left")

Env = Callable[[str], dict[str, str]]
HELLO = Hello(PROTOCOL, trioserve.__version__, FakeProcess.pid)


async def round_trip(worker: Worker, token: int = 1) -> None:
    await worker.send(Check(token))
    while not isinstance(answer := await anext(worker.events), Checked):
        pass
    assert answer.token == token


# ------------------------------------------------------------- rungs, on a fake and its clock


async def leave(play: Callable[[FakeWorker], Awaitable[None]], **kwargs: bool) -> FakeProcess:
    """Enter with a fake worker that plays ``play`` after Hello, and leave without an error."""
    endpoints, fake = fake_endpoints(FakeProcess(**kwargs))
    try:
        async with trio.open_nursery() as nursery:
            await fake.send(HELLO)
            nursery.start_soon(play, fake)
            async with attach(endpoints):
                pass
            nursery.cancel_scope.cancel()
    finally:
        fake.status.close()
    assert fake.process.closed
    return fake.process


async def never_leave(fake: FakeWorker) -> None:
    await trio.sleep_forever()


async def leave_when_asked(fake: FakeWorker, after_s: float = 0) -> None:
    with pytest.raises(StopAsyncIteration):
        await anext(fake.commands)
    await trio.sleep(after_s)
    await fake.exit(0)


async def test_rung_1_a_polite_worker_is_not_signalled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = trio.current_time()
    process = await leave(leave_when_asked)
    assert trio.current_time() == started
    assert process.signals == []
    assert process.exit_code() == 0


async def test_rung_1_a_worker_has_its_grace(autojump_clock: trio.testing.MockClock) -> None:
    started = trio.current_time()
    process = await leave(lambda fake: leave_when_asked(fake, after_s=4.5))
    assert trio.current_time() == started + 4.5
    assert process.signals == []
    assert process.exit_code() == 0


async def test_rung_2_a_worker_that_leaves_after_the_dump(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = trio.current_time()
    process = await leave(lambda fake: leave_when_asked(fake, after_s=5.5))
    assert process.signals == [(signal.SIGUSR1, started + 5)]
    assert trio.current_time() == started + 5.5
    assert process.exit_code() == 0


async def test_rung_3_a_deaf_worker_is_dumped_then_killed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = trio.current_time()
    process = await leave(never_leave)
    dumps = [(signal.SIGUSR1, started + 5), (signal.SIGUSR2, pytest.approx(started + 5.8))]
    assert process.signals == dumps
    assert process.killed_at == started + 6
    assert trio.current_time() == started + 6


async def test_rung_4_one_that_outlives_sigkill_is_an_error_and_not_a_hang(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = trio.current_time()
    with pytest.RaisesGroup(pytest.RaisesExc(WorkerStalled, match="still there 10 s after")):
        await leave(never_leave, killable=False)
    assert trio.current_time() == started + 16


@pytest.mark.parametrize("killable", [True, False])
async def test_an_error_in_the_body_kills_at_once(
    autojump_clock: trio.testing.MockClock, killable: bool
) -> None:
    endpoints, fake = fake_endpoints(FakeProcess(killable=killable))
    await fake.send(HELLO)
    started = trio.current_time()
    with pytest.raises(WorkerDied if killable else WorkerStalled):
        async with attach(endpoints):
            raise WorkerDied("it did")
    assert fake.process.killed_at == started
    assert fake.process.signals == []
    assert trio.current_time() == started + (0 if killable else 10)
    fake.status.close()


async def test_a_cancel_while_waiting_for_grace_goes_on_with_the_kill(
    autojump_clock: trio.testing.MockClock,
) -> None:
    endpoints, fake = fake_endpoints()
    await fake.send(HELLO)
    started = trio.current_time()
    with trio.move_on_after(2) as scope:
        async with attach(endpoints):
            pass
    assert scope.cancelled_caught
    assert fake.process.killed_at == started + 2
    assert fake.process.signals == []
    fake.status.close()


async def test_an_error_of_on_stderr_is_not_lost_and_leaves_nothing(child_env: Env) -> None:
    def fail(line: str) -> None:
        raise KeyError(line)

    with pytest.raises(KeyError):
        async with open_worker("child", env=child_env("deaf"), on_stderr=fail):
            await trio.sleep_forever()


async def test_an_error_of_the_body_comes_out_as_itself(child_env: Env) -> None:
    error = WorkerDied("it did")
    with pytest.raises(WorkerDied) as caught:
        async with open_worker("child", env=child_env("")):
            raise error
    assert caught.value is error
    group = ExceptionGroup("of the body", [error])
    with pytest.raises(ExceptionGroup) as caught_group:
        async with open_worker("child", env=child_env("")):
            raise group
    assert caught_group.value.message == "of the body"
    assert caught_group.value.exceptions == (error,)


# ------------------------------------------------------------------------- real processes


async def test_a_deaf_worker_leaves_its_stacks_and_goes(child_env: Env) -> None:
    env = child_env("deaf")
    async with open_worker("child", env=env, grace_s=0.2) as worker:
        pass
    assert worker.returncode == -signal.SIGKILL
    assert worker.describe_exit() == "was killed by signal 9 (SIGKILL)"  # by us: no hint
    lines = worker.last_stderr()
    assert any("most recent call first" in line for line in lines)
    assert any("sleep_for_ever" in line for line in lines)


@pytest.mark.parametrize("fault", ["GIL held", "GIL held in a regex"])
async def test_st_08_stacks_come_also_while_the_gil_is_held(child_env: Env, fault: str) -> None:
    env = child_env(fault)
    lines: list[str] = []
    found = trio.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        if "hold_gil" in line:
            found.set()

    async with open_worker("child", env=env, on_stderr=on_line, grace_s=0.01) as worker:
        assert isinstance(await anext(worker.events), Stage)
        if fault == "GIL held":
            assert worker.status.read().operation == "a native call"
        with trio.fail_after(20):
            while not found.is_set():  # the first may come before it is there
                if fault == "GIL held":
                    worker.dump_stacks_and_die()
                else:
                    worker.dump_stacks()
                with trio.move_on_after(0.1):
                    await found.wait()
    assert worker.returncode == -signal.SIGKILL


async def test_sd_02_exit_after_hello_ends_the_events_and_wakes_every_waiter(
    child_env: Env,
) -> None:
    async with open_worker("child", env=child_env("exit 5")) as worker:
        with trio.fail_after(5):
            assert [event async for event in worker.events] == []
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(worker.wait)
        assert worker.returncode == 5
        assert worker.describe_exit() == "exited with code 5"
        assert worker.last_stderr() == ["last words"]
        with pytest.raises(trio.BrokenResourceError):
            await worker.send(Exit())


async def test_st_08_c_sigkill_names_memory_with_its_sizes(child_env: Env) -> None:
    async with open_worker("child", env=child_env("kill self later")) as worker:
        with trio.fail_after(1):
            assert await worker.wait() == -9
        hint = r"was killed by signal 9 \(SIGKILL\); often the kernel's out-of-memory killer: "
        size = r"[\d.]+ [GM]iB"
        assert re.fullmatch(f"{hint}available {size}", worker.describe_exit())
        assert re.fullmatch(
            f"{hint}needed 3.0 GiB, available {size}",
            worker.describe_exit(needed_bytes=3 * 2**30),
        )


def test_available_memory_is_what_the_kernel_says_and_unknown_where_it_says_nothing(
    tmp_path: Path,
) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory_bytes(meminfo) is None
    meminfo.write_text("MemTotal: 4 kB\n")
    assert available_memory_bytes(meminfo) is None
    meminfo.write_text("MemTotal: 4 kB\nMemAvailable:     3 kB\n")
    assert available_memory_bytes(meminfo) == 3 * 1024


async def test_kill_ends_the_worker_without_leaving_the_scope(child_env: Env) -> None:
    async with open_worker("child", env=child_env("GIL held")) as worker:
        worker.kill()
        with trio.fail_after(2):
            assert await worker.wait() == -9
        assert worker.describe_exit() == "was killed by signal 9 (SIGKILL)"


async def test_a_worker_blocked_on_a_full_event_pipe_still_hears_the_end(child_env: Env) -> None:
    endpoints = spawn("child", env=child_env("event flood"))
    assert isinstance(endpoints.events, ReadPipe)
    async with attach(endpoints, hello_timeout_s=30, grace_s=30) as worker:
        with trio.fail_after(20):
            # A pipe holds 65,536 bytes; what is in it cannot be awaited.
            while num_unread(endpoints.events.fileno()) < 60_000:  # noqa: ASYNC110
                await trio.sleep(0.01)
        left = trio.current_time()
    assert trio.current_time() - left < 20
    assert worker.returncode == 0
    assert worker.last_stderr() == ["saw the end"]


def num_unread(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("leave_by", ["end", "error", "exit of the leader"])
async def test_sd_01_a_grandchild_goes_with_the_group(child_env: Env, leave_by: str) -> None:
    grandchild = 0
    try:
        async with open_worker("child", env=child_env("grandchild")) as worker:
            event = await anext(worker.events)
            assert isinstance(event, Stage)
            grandchild = int(event.detail)
            assert process_state(grandchild) in ("R", "S", "D")
            if leave_by == "exit of the leader":
                await worker.send(Exit())
                assert await worker.wait() == 0
                assert group_members(worker.pid) == [grandchild]
            if leave_by == "error":
                raise WorkerDied("it did")
    except WorkerDied:
        pass
    assert group_members(worker.pid) == []
    assert process_state(grandchild) in (None, "Z")  # a zombie of init is not ours


async def test_sd_07_signals_of_a_terminal_and_of_a_service_manager_are_ignored(
    child_env: Env,
) -> None:
    async with open_worker("child", env=child_env("")) as worker:
        assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
        for signum in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, signum)
            await round_trip(worker)
    assert worker.returncode == 0


async def test_pf_04_an_idle_worker_uses_no_processor_time(child_env: Env) -> None:
    async with open_worker("child", env=child_env("")) as worker:
        await round_trip(worker)
        before = process_cpu_seconds(worker.pid)
        switches = voluntary_switches(worker.pid)
        time.sleep(0.5)  # noqa: ASYNC251 - the parent must not wake it either
        assert process_cpu_seconds(worker.pid) == before
        assert voluntary_switches(worker.pid) - switches <= 2


def voluntary_switches(pid: int) -> int:
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status") as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith("voluntary"))
    return total


async def test_twenty_workers_in_turn_and_at_once_leave_nothing(child_env: Env) -> None:
    pids = []

    async def one(fault: str) -> None:
        async with open_worker("child", env=child_env(fault), hello_timeout_s=60) as worker:
            pids.append(worker.pid)
            if not fault:
                await round_trip(worker)

    for _ in range(10):
        await one("")
    async with trio.open_nursery() as nursery:
        for fault in ["", "exit 5"] * 5:
            nursery.start_soon(one, fault)
    assert len(set(pids)) == 20
    assert [pid for pid in pids if group_members(pid)] == []


class CancelAfter(trio.abc.Instrument):
    """Cancels a scope after the n-th step of any task of the test."""

    def __init__(self, num_steps: float, scope: trio.CancelScope) -> None:
        self.num_left = num_steps
        self._scope = scope

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            self._scope.cancel()


async def test_a_cancel_at_any_step_leaves_nothing(child_env: Env) -> None:
    async def life(num_steps: float) -> float:
        """Steps that were left when the life of a worker was over."""
        with trio.CancelScope() as scope:
            instrument = CancelAfter(num_steps, scope)
            trio.lowlevel.add_instrument(instrument)
            try:
                async with open_worker("child", env=env, hello_timeout_s=60) as worker:
                    pids.append(worker.pid)
                    await round_trip(worker)
            finally:
                trio.lowlevel.remove_instrument(instrument)
        assert scope.cancel_called == (instrument.num_left <= 0)
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222
        assert len(os.listdir("/proc/self/fd")) == num_fds
        assert [pid for pid in pids if group_members(pid)] == []
        return instrument.num_left

    env = child_env("grandchild")
    pids: list[int] = []
    num_fds = len(os.listdir("/proc/self/fd"))
    assert await life(math.inf) == math.inf
    num_steps = 1
    while await life(num_steps) <= 0:
        num_steps += 1
    assert num_steps > 10


def start_otherwise(env: dict[str, str], stdout: int) -> tuple[subprocess.Popen[bytes], Endpoints]:
    """Start a worker as somebody else would, and take it over."""
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    page = create_page()
    fds = (command_read, event_write, lifeline_read, page)
    other = subprocess.Popen(
        [sys.executable, "-P", "-m", "child", "--fds", ",".join(map(str, fds))],
        env=env,
        pass_fds=fds,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )
    for fd in (command_read, event_write, lifeline_read):
        os.close(fd)
    endpoints = adopt(
        pid=other.pid,
        pidfd=os.pidfd_open(other.pid),
        commands_fd=command_write,
        events_fd=event_read,
        lifeline_fd=lifeline_write,
        status_fd=page,
    )
    return other, endpoints


async def test_what_is_printed_stays_off_stdout_whoever_starts_the_worker(child_env: Env) -> None:
    read, write = os.pipe()
    other, endpoints = start_otherwise(child_env("prints"), stdout=write)
    os.close(write)
    async with attach(endpoints, hello_timeout_s=30) as worker:
        await round_trip(worker)
    assert os.read(read, 1000) == b""
    os.close(read)
    assert other.wait() == 0


@pytest.mark.parametrize("fault", ["", "deaf"])
async def test_sd_01_an_adopted_worker_is_put_down_without_its_group(
    child_env: Env, fault: str
) -> None:
    """It is in the group of this very test, which must not be killed along with it."""
    other, endpoints = start_otherwise(child_env(fault), stdout=subprocess.DEVNULL)
    grace_s = 0.1 if fault else 30  # it is deaf, or leaves by itself
    async with attach(endpoints, hello_timeout_s=30, grace_s=grace_s) as worker:
        assert worker.pid == other.pid
        assert os.getpgid(worker.pid) == os.getpgrp()
        if not fault:
            await round_trip(worker)
    assert worker.last_stderr() == []
    assert worker.returncode == other.wait() == (-9 if fault else 0)
