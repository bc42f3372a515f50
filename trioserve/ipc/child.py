"""The worker's end, and its first lines: run before anything heavy is imported.

``Channel.open`` makes a fresh process into one that cannot outlive its parent:

* File descriptor 1 becomes a copy of 2, so that a stray ``print`` goes to the log.
* The lifeline is a pipe on which nobody ever writes. When its last writer is gone, the kernel
  itself sends SIGKILL, to the whole process group where the worker leads one: no thread of ours
  takes part, so it works also while native code holds the GIL, and compilers that the worker
  started go along. A process that does not lead its own session kills itself alone, never a
  group that belongs to somebody else.
* A process forked off the parent without an exec would hold the lifeline open; for that case the
  inbox thread also watches the process that started us.
* SIGINT and SIGTERM are ignored: a terminal sends the one to a whole group and service managers
  send the other to all processes of a service, but it is the parent that drains and then ends the
  worker. SIGUSR1 writes the stacks of all threads to stderr, by Python. SIGUSR2 does so by C, also
  where native code does not return, and may end the process: the last thing before the kill.

Imports neither trio nor torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import attrs
import msgspec

from trioserve.ipc import FDS_FLAG
from trioserve.ipc.framing import (
    READ_BYTES,
    FrameDecoder,
    FrameError,
    decode,
    encode,
    write_frame,
)
from trioserve.ipc.messages import Command, Event, Exit
from trioserve.ipc.status_page import StatusWriter
from trioserve.stacks import write_stacks


class Inbox:
    """Commands that have arrived, in order. Filled by its own thread, emptied by the main thread.

    The thread reads as fast as commands come, so the parent's writer never waits for a step. The
    end of the command pipe arrives as ``Exit()``, and every later call gets it again.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | FrameError] = queue.SimpleQueue()
        self._end: Exit | FrameError | None = None

    def get(self, timeout_s: float | None = None) -> Command | None:
        """The next command; waits for it, without using the processor. None after ``timeout_s``.

        Raises:
            FrameError: the command pipe cannot be followed; again at every later call.
        """
        if self._end is not None:
            return self._take(self._end)
        try:
            return self._take(self._queue.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def drain(self) -> list[Command]:
        """All commands that are there now; does not wait.

        Raises:
            FrameError: as ``get``, once the commands ahead of it are handed out.
        """
        commands: list[Command] = []
        while self._end is None and not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, FrameError) and commands:
                self._end = item
                return commands
            commands.append(self._take(item))
        return commands if commands else self._ended()

    def put(self, item: Command | FrameError) -> None:
        """Add a command, or the reason why none will follow. Safe from any thread."""
        self._queue.put(item)

    def _ended(self) -> list[Command]:
        return [] if self._end is None else [self._take(self._end)]

    def _take(self, item: Command | FrameError) -> Command:
        if isinstance(item, FrameError):
            self._end = item
            raise item
        if isinstance(item, Exit):
            self._end = item
        return item


class EventSender:
    """The write end of the events. The thread that made it alone sends."""

    def __init__(self, fd: int) -> None:
        """``fd`` is a blocking pipe and becomes the sender's."""
        self._fd = fd
        self._thread = threading.get_ident()

    def send(self, event: Event) -> None:
        """Send one event; waits while the pipe is full.

        Raises:
            SystemExit: nobody reads any more, so nothing that the worker does can matter. Code 0.
        """
        assert threading.get_ident() == self._thread, "two threads would mix their frames"
        try:
            write_frame(self._fd, encode(event))
        except BrokenPipeError:
            raise SystemExit(0) from None


@attrs.frozen
class Channel:
    """All there is between a worker and its parent."""

    inbox: Inbox
    send: Callable[[Event], None]
    status: StatusWriter

    @classmethod
    def open(cls, argv: Sequence[str]) -> Channel:
        """Take over the descriptors that ``argv`` names and harden the process (see the module).

        Call it once, first, in the main thread. ``argv`` is ``sys.argv[1:]``.

        Raises:
            SystemExit: code 2, when started by hand.
        """
        commands, events, lifeline, page = _parse(argv)
        for fd in (commands, events, lifeline, page):
            os.set_inheritable(fd, False)  # a compiler we start must not hold our pipes open
        _redirect_stdout()
        _set_signals()
        parent = _open_parent()
        _arm_lifeline(lifeline)
        status = StatusWriter(page)
        os.close(page)
        inbox = Inbox()
        threading.Thread(
            target=_fill, args=(inbox, commands, parent), name="inbox", daemon=True
        ).start()
        return cls(inbox, EventSender(events).send, status)


def _parse(argv: Sequence[str]) -> tuple[int, int, int, int]:
    try:
        flag, value = argv
        if flag != FDS_FLAG:
            raise ValueError
        commands, events, lifeline, page = (int(fd) for fd in value.split(","))
        for fd in (commands, events, lifeline, page):
            os.fstat(fd)
    except (ValueError, OSError):
        print("this is the worker process; `trioserve run` starts it", file=sys.stderr)
        raise SystemExit(2) from None
    return commands, events, lifeline, page


def _redirect_stdout() -> None:
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _set_signals() -> None:
    faulthandler.enable(all_threads=True)
    signal.signal(signal.SIGUSR1, write_stacks)
    signal.siginterrupt(signal.SIGUSR1, False)  # a native call that is only slow goes on after it
    # Nothing else sees into native code that does not return. It can be the end of a process whose
    # threads run Python, so only a parent that is about to kill sends it.
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by ``spawn``


def _leads_session() -> bool:
    return os.getpid() == os.getpgrp() == os.getsid(0)


def _open_parent() -> int | None:
    """A pidfd of the process that started us; None where that cannot be seen."""
    parent = os.getppid()
    if parent <= 1:
        return None
    try:
        return os.pidfd_open(parent)
    except OSError:
        return None


def _arm_lifeline(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp() if _leads_session() else os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # The signal tells of changes from here on; the parent may be gone already.
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):
        _end()


def _end() -> NoReturn:
    """What the kernel does when the lifeline breaks."""
    if _leads_session():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _fill(inbox: Inbox, commands: int, parent: int | None) -> None:
    """Body of the inbox thread."""
    poll = select.poll()
    poll.register(commands, select.POLLIN)
    if parent is not None:
        poll.register(parent, select.POLLIN)
    frames = FrameDecoder()
    # One buffer for ever: a new one for each read, cut to what came, would leave a hole in the heap
    # behind each command, and the worker's memory would creep up.
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    try:
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if parent in ready:
                _end()
            num_bytes = os.readv(commands, [buffer])
            if not num_bytes:
                break  # inside a frame too: the parent left while it wrote, nobody misses it
            for payload in frames.feed(view[:num_bytes]):
                inbox.put(decode(decoder, payload))
            frames.feed(b"")  # raises where a bad length came after good frames
    except FrameError as fault:
        inbox.put(fault)
    else:
        inbox.put(Exit())
    with contextlib.suppress(OSError):
        os.close(commands)
    if parent is not None:
        _watch(parent)


def _watch(parent: int) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    _end()
