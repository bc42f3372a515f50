"""SD-01, SD-07: the parent is killed, forked or interrupted; the worker is gone, or unmoved."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from trioserve.ipc.status_page import create_page, process_state

pytestmark = pytest.mark.usefixtures("nothing_left")

Env = Callable[[str], dict[str, str]]
GONE_WITHIN_S = 2.0


class Parent:
    """The process of ``children/parent.py`` with a worker of its own, watched from here."""

    def __init__(self, env: dict[str, str], mode: str = "", *, shell: bool = False) -> None:
        argv = [sys.executable, "-m", "parent", mode]
        if shell:
            argv = ["/bin/sh", "-c", '"$@"; exec sleep 1000', "sh", *argv]
        self.process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pidfds: list[int] = []

    def says(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the parent ended"
        return line

    def hears(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def watch(self, *pids: int) -> None:
        self.pidfds += [os.pidfd_open(pid) for pid in pids]

    def all_gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for pidfd in self.pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def clean_up(self) -> None:
        if self.process.returncode is None:  # else the number may be somebody else's
            os.killpg(self.process.pid, signal.SIGKILL)
        for pidfd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()


@pytest.fixture
def start(nothing_left: None, child_env: Env) -> Iterator[Callable[..., Parent]]:
    parents: list[Parent] = []

    def make(fault: str, mode: str = "", *, shell: bool = False) -> Parent:
        parents.append(Parent(child_env(fault), mode, shell=shell))
        return parents[-1]

    yield make
    for parent in parents:
        parent.clean_up()


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            found += [pid for pid in map(int, children.read().split()) if process_state(pid)]
    return found


@pytest.mark.parametrize("fault", ["", "grandchild", "GIL held", "GIL held in a regex"])
def test_sd_01_parent_killed_and_all_is_gone(start: Callable[..., Parent], fault: str) -> None:
    parent = start(fault)
    pids = [int(pid) for pid in parent.says().split()]
    assert len(pids) == (2 if fault == "grandchild" else 1)
    parent.watch(*pids)
    assert not parent.all_gone_within(0)
    parent.process.kill()
    assert parent.all_gone_within(GONE_WITHIN_S)


@pytest.mark.parametrize("fault", ["silent", "silent, GIL held"])
def test_sd_01_b_parent_killed_before_hello(start: Callable[..., Parent], fault: str) -> None:
    """At the worker's first instruction, before any line of ours, and in its first native call."""
    parent = start(fault)
    deadline = time.monotonic() + 20
    while not (workers := [pid for pid in children_of(parent.process.pid) if is_worker(pid)]):
        assert time.monotonic() < deadline
        os.sched_yield()
    parent.watch(*workers)
    if fault == "silent, GIL held":
        while not has_inbox_and_sleeps(workers[0]):
            assert time.monotonic() < deadline
            os.sched_yield()
    os.kill(parent.process.pid, signal.SIGKILL)
    assert parent.all_gone_within(GONE_WITHIN_S)


def is_worker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return b"--fds" in cmdline.read()
    except OSError:  # gone again: platform detection of some library
        return False


def has_inbox_and_sleeps(pid: int) -> bool:
    return len(os.listdir(f"/proc/{pid}/task")) == 2 and process_state(pid) == "S"


def test_sd_01_e_parent_killed_under_a_shell_that_lives_on(start: Callable[..., Parent]) -> None:
    parent = start("GIL held", shell=True)
    worker = int(parent.says())
    parent.watch(worker)
    (middle,) = children_of(parent.process.pid)
    os.kill(middle, signal.SIGKILL)
    assert parent.all_gone_within(GONE_WITHIN_S)
    assert parent.process.poll() is None


def test_sd_01_a_fork_that_holds_the_lifeline_does_not_keep_the_worker(
    start: Callable[..., Parent],
) -> None:
    parent = start("", "forks")
    worker = int(parent.says())
    (fork,) = [pid for pid in children_of(parent.process.pid) if pid != worker]
    parent.watch(worker)
    parent.process.kill()
    assert parent.all_gone_within(GONE_WITHIN_S)
    os.kill(fork, 0)  # it does hold on


def test_sd_07_ctrl_c_to_the_foreground_group_does_not_reach_the_worker(
    start: Callable[..., Parent],
) -> None:
    parent = start("", "ignores SIGINT")
    worker = int(parent.says())
    parent.watch(worker)
    for _ in range(2):
        os.killpg(parent.process.pid, signal.SIGINT)
    parent.hears("check")
    assert parent.says() == "answered"
    assert not parent.all_gone_within(0)
    parent.hears("leave")
    assert parent.process.wait(10) == 0
    assert parent.all_gone_within(0)


@pytest.mark.parametrize(("fault", "presses"), [("", 1), ("", 2), ("GIL held", 1), ("GIL held", 3)])
def test_sd_07_ctrl_c_without_a_handler_ends_parent_and_worker(
    start: Callable[..., Parent], fault: str, presses: int
) -> None:
    parent = start(fault)
    parent.watch(int(parent.says()))
    os.killpg(parent.process.pid, signal.SIGINT)
    parent.hears("")  # wakes the thread that reads its stdin
    for _ in range(presses - 1):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.process.pid, signal.SIGINT)
    assert parent.process.wait(10) != 0
    assert parent.all_gone_within(0)


def test_sd_01_a_parent_gone_before_the_lifeline_is_armed(child_env: Env) -> None:
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    page = create_page()
    os.close(lifeline_write)
    fds = (command_read, event_write, lifeline_read, page)
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "child", "--fds", ",".join(map(str, fds))],
        env=child_env(""),
        pass_fds=fds,
        start_new_session=True,
    )
    assert worker.wait(10) == -signal.SIGKILL
    for fd in (*fds, command_write, event_read):
        os.close(fd)
