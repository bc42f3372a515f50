"""Processes, as descriptors: how a worker is started or taken over, waited for and killed.

Nothing here waits for I/O except ``ProcessHandle.wait``; ``trioserve.ipc.process`` supervises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import trio

from trioserve.errors import WorkerHandshakeError
from trioserve.ipc.launch import Launched
from trioserve.ipc.pipes import ReadPipe, WritePipe
from trioserve.ipc.status_page import StatusReader, group_members

_CLOSE_S = 0.5


class ProcessHandle(Protocol):
    """What supervision needs of a process. ``Process`` is the real one."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> None:
        """Until it has ended. One task at a time. Cancelled: nothing has happened."""

    def exit_code(self) -> int | None:
        """After its end: 0 and above, or minus the signal; None where it is not ours to know."""

    def signal(self, signum: int) -> None:
        """To this process alone; nothing where it has ended."""

    def kill_group(self) -> None:
        """SIGKILL to it and all processes of its group."""

    def group_is_empty(self) -> bool:
        """Whether no live process is left, it included."""

    def close(self) -> None:
        """Collect the zombie where it has ended, close the descriptors."""


@attrs.define
class Process:
    """A process known by a pidfd: a child of ours, or one that was handed over.

    The zombie of a child is left in place until ``close``: as long as it stands, the number of
    its group can belong to nobody else, so ``kill_group`` cannot hit a stranger.
    """

    pid: int
    _pidfd: int
    _leads_group: bool
    _popen: subprocess.Popen[bytes] | None = None

    async def wait(self) -> None:
        """See ``ProcessHandle.wait``."""
        await trio.lowlevel.wait_readable(self._pidfd)

    def exit_code(self) -> int | None:
        """See ``ProcessHandle.exit_code``."""
        try:
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, signum: int) -> None:
        """See ``ProcessHandle.signal``."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def kill_group(self) -> None:
        """See ``ProcessHandle.kill_group``."""
        self.signal(signal.SIGKILL)
        if self._leads_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def group_is_empty(self) -> bool:
        """See ``ProcessHandle.group_is_empty``."""
        return not (self._leads_group and group_members(self.pid))

    def close(self) -> None:
        """See ``ProcessHandle.close``."""
        if self._popen is not None:
            try:
                # Ended, unless a Ctrl-C cut the wait short or the kernel does not let go of it.
                self._popen.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._popen.returncode = 0  # given up on: no warning when it is collected
        os.close(self._pidfd)


@attrs.frozen
class Endpoints:
    """The parent's ends of everything that ties it to a worker."""

    process: ProcessHandle
    commands: trio.abc.SendStream
    events: trio.abc.ReceiveStream
    stderr: trio.lowlevel.FdStream | None  # None where somebody else reads it
    status: StatusReader
    close_lifeline: Callable[[], None]  # once; the kernel then kills the worker's group
    init_sent: bool = False  # whether Init is in the command pipe already


@trio.lowlevel.enable_ki_protection
def spawn(module: str, *, env: Mapping[str, str] | None = None) -> Endpoints:
    """Start ``python -P -m module`` in a session of its own, with three pipes and a status page.

    Synchronous on purpose: no cancellation can come between the process and its owner, and the
    thread that starts it is trio's own. All descriptors but the child's are closed on exec.

    Args:
        module: what runs; it calls ``trioserve.ipc.child.Channel.open`` first.
        env: its environment; None for ours.

    Raises:
        WorkerHandshakeError: the process cannot be started.
    """
    try:
        launched = Launched(module, env)
    except OSError as fault:
        raise WorkerHandshakeError(
            f"the worker process could not be started ({sys.executable}): {fault}"
        ) from fault
    return endpoints_of(launched)


def endpoints_of(launched: Launched) -> Endpoints:
    """Take over a worker that was launched."""
    launched.take()
    return Endpoints(
        Process(launched.popen.pid, launched.pidfd, leads_group=True, popen=launched.popen),
        WritePipe(launched.commands_fd),
        ReadPipe(launched.events_fd),
        trio.lowlevel.FdStream(launched.stderr_fd),
        launched.status,
        lambda: os.close(launched.lifeline_fd),
        init_sent=launched.first_frame_sent,
    )


def adopt(
    *,
    pid: int,
    pidfd: int,
    commands_fd: int,
    events_fd: int,
    lifeline_fd: int,
    status_fd: int,
    stderr_fd: int | None = None,
) -> Endpoints:
    """Take over a worker that somebody else started. All descriptors become the endpoints' own.

    Its exit code is known only where it is a child of this process, and its group is killed only
    where it leads one.
    """
    status = StatusReader(status_fd)
    os.close(status_fd)
    try:
        leads_group = os.getpgid(pid) == pid
    except ProcessLookupError:
        leads_group = False
    return Endpoints(
        Process(pid, pidfd, leads_group),
        WritePipe(commands_fd),
        ReadPipe(events_fd),
        None if stderr_fd is None else trio.lowlevel.FdStream(stderr_fd),
        status,
        lambda: os.close(lifeline_fd),
    )
