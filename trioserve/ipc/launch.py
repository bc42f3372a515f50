"""A worker process as it is started: its pid and our ends of its pipes, before anything reads them.

Of the standard library alone, so that ``trioserve run`` can start a worker before it imports what
a server is made of; ``trioserve.ipc.spawn`` makes it into something a trio program supervises.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

from trioserve.ipc import FDS_FLAG
from trioserve.ipc.status_page import StatusReader, create_page


class Launched:
    """A process of ours that nobody supervises yet. ``take`` what it has, or ``close`` it.

    Attributes:
        popen: the process; its zombie stays until somebody waits for it.
        pidfd, commands_fd, events_fd, stderr_fd, lifeline_fd: our ends, closed on exec.
        status: its status page.
        first_frame_sent: whether it was given one.
    """

    popen: subprocess.Popen[bytes]
    pidfd: int
    commands_fd: int
    events_fd: int
    stderr_fd: int
    lifeline_fd: int
    status: StatusReader

    def __init__(
        self, module: str, env: Mapping[str, str] | None = None, *, first_frame: bytes = b""
    ) -> None:
        """Start ``python -P -m module`` in a session of its own.

        ``first_frame`` lies in its command pipe from the start, and has to fit in there.

        Raises:
            OSError: it cannot be started; nothing is left.
        """
        self.first_frame_sent = bool(first_frame)
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as ours:
            command_read, self.commands_fd = _pipe(child_ends, ours)
            self.events_fd, event_write = _pipe(ours, child_ends)
            lifeline_read, self.lifeline_fd = _pipe(child_ends, ours)
            self.stderr_fd, stderr_write = _pipe(ours, child_ends)
            page = _owned(create_page(), child_ends)
            self.status = StatusReader(page)
            ours.callback(self.status.close)
            if first_frame:
                os.set_blocking(self.commands_fd, False)
                if os.write(self.commands_fd, first_frame) < len(first_frame):
                    raise OSError("the first frame is larger than a pipe")
            fds = (command_read, event_write, lifeline_read, page)
            with _interrupts_blocked():
                self.popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, FDS_FLAG, ",".join(map(str, fds))],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr_write,
                    stderr=stderr_write,
                    env=env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            ours.callback(_put_down, self.popen)
            self.pidfd = _owned(os.pidfd_open(self.popen.pid), ours)
            self._cleanup: contextlib.ExitStack | None = ours.pop_all()

    def take(self) -> Launched:
        """Give up ownership: from here on it is the caller's. Once."""
        assert self._cleanup is not None, "it has another owner"
        self._cleanup.pop_all()
        self._cleanup = None
        return self

    def close(self) -> None:
        """Kill the process and wait for its end, unless it was taken. Idempotent."""
        if self._cleanup is not None:
            self._cleanup.close()
            self._cleanup = None

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Until it has a session of its own, a child is in the terminal's foreground group, and a
    Ctrl-C would end it. It inherits the block and lifts it once it ignores the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pipe(read_owner: contextlib.ExitStack, write_owner: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    return _owned(read, read_owner), _owned(write, write_owner)


def _owned(fd: int, owner: contextlib.ExitStack) -> int:
    owner.callback(os.close, fd)
    return fd


def _put_down(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()
