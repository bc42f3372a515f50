"""A worker without a process: memory streams and a process that ends when told to. For tests."""

from __future__ import annotations

import os
import signal

import attrs
import trio
import trio.testing

from trioserve.ipc.framing import encode
from trioserve.ipc.messages import Command, Event
from trioserve.ipc.spawn import Endpoints
from trioserve.ipc.status_page import StatusReader, StatusWriter, create_page
from trioserve.ipc.streams import FrameReader


class FakeProcess:
    """A ``ProcessHandle`` that records what is done to it.

    Attributes:
        signals: what ``signal`` was called with, each with the time.
        killed_at: when ``kill_group`` was called first, or None.
        closed: whether it has been closed.
    """

    pid = 4242

    def __init__(self, *, killable: bool = True) -> None:
        self._killable = killable
        self._ended = trio.Event()
        self._code: int | None = None
        self.signals: list[tuple[int, float]] = []
        self.killed_at: float | None = None
        self.closed = False

    def exit(self, code: int) -> None:
        """End with ``code``, or by a signal where it is negative; the first call counts."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()

    async def wait(self) -> None:
        """See ``ProcessHandle.wait``."""
        await self._ended.wait()

    def exit_code(self) -> int | None:
        """See ``ProcessHandle.exit_code``."""
        return self._code

    def signal(self, signum: int) -> None:
        """See ``ProcessHandle.signal``."""
        self.signals.append((signum, trio.current_time()))

    def kill_group(self) -> None:
        """See ``ProcessHandle.kill_group``."""
        if self.killed_at is None:
            self.killed_at = trio.current_time()
        if self._killable:
            self.exit(-signal.SIGKILL)

    def group_is_empty(self) -> bool:
        """See ``ProcessHandle.group_is_empty``."""
        return self._ended.is_set()

    def close(self) -> None:
        """See ``ProcessHandle.close``."""
        self.closed = True


@attrs.frozen
class FakeWorker:
    """The worker's side of ``fake_endpoints``."""

    process: FakeProcess
    commands: FrameReader[Command]
    status: StatusWriter
    events: trio.abc.SendStream  # raw, for frames that should not be

    async def send(self, event: Event) -> None:
        """Send an event. Cancelled: a part may have gone out."""
        await self.events.send_all(encode(event))

    async def exit(self, code: int) -> None:
        """End as a process does: the pipe ends, then the process. Cancelled: ended all the same."""
        try:
            await trio.aclose_forcefully(self.events)
        finally:
            self.process.exit(code)


def fake_endpoints(process: FakeProcess | None = None) -> tuple[Endpoints, FakeWorker]:
    """What ``trioserve.ipc.process.attach`` takes, and the side that plays the worker."""
    command_send, command_receive = trio.testing.memory_stream_one_way_pair()
    event_send, event_receive = trio.testing.memory_stream_one_way_pair()
    page = create_page()
    try:
        status, writer = StatusReader(page), StatusWriter(page)
    finally:
        os.close(page)
    process = process or FakeProcess()
    endpoints = Endpoints(process, command_send, event_receive, None, status, lambda: None)
    worker = FakeWorker(process, FrameReader(command_receive, Command), writer, event_send)
    return endpoints, worker
