"""A worker process as a scope: started on entry, spoken to inside, gone on exit.

``open_worker`` is the one way in. Leaving it takes the kill ladder:

1. The body ended without an error: close the command pipe, which the worker reads as "leave after
   this step", and wait ``grace_s``; then have it write its stacks to stderr, and wait a second.
   An error or a cancellation, of the body or while waiting here, goes straight on.
2. Close the lifeline, at which the kernel kills the worker's group, and kill the group ourselves.
3. Wait up to ten seconds, shielded. A process that is there even then is in the hands of the
   kernel; that is an error, and says so.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import trio

import trioserve
from trioserve.errors import WorkerHandshakeError, WorkerStalled
from trioserve.ipc.framing import FrameError, TruncatedFrame
from trioserve.ipc.messages import PROTOCOL, Command, Event, Fatal, Hello
from trioserve.ipc.spawn import Endpoints, spawn
from trioserve.ipc.status_page import StatusReader, process_state
from trioserve.ipc.stderr import StderrPump
from trioserve.ipc.streams import FrameReader, FrameWriter

GRACE_S = 5.0
DUMP_S = 1.0
LAST_DUMP_S = 0.2  # the last part of it
GONE_S = 10.0
HELLO_BYTES = 32 * 2**20  # of memory that a worker takes until then; 22 MiB were measured
_AFTER_EXIT_S = 0.1  # what was written before the exit is in the pipe
_EXIT_AFTER_END_S = 1.0  # between the end of the event pipe and the exit behind it
# What faulthandler says after the line that names the fault.
_STACK_LINES = ("  File ", "Current thread ", "Thread 0x", "Extension modules: ", "Stack (most ")
_QUIET_LINES = ("INFO ", "DEBUG ")

_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGILL: "a library uses instructions that this processor does not have",
    signal.SIGBUS: "often a model file that changed while in use, or a full disk",
}


class Worker:
    """A worker that has said Hello.

    Attributes:
        hello: what it said.
        events: its messages, for one reader. They end when the process does.
        status: its status page.
        init_sent: whether it had its Init before it was ours.
    """

    hello: Hello

    def __init__(self, endpoints: Endpoints, on_stderr: Callable[[str], object]) -> None:
        self._process = endpoints.process
        self._commands = FrameWriter(endpoints.commands)
        self.events: FrameReader[Event] = FrameReader(endpoints.events, Event)
        self.status: StatusReader = endpoints.status
        self._stderr = StderrPump(endpoints.stderr, on_stderr)
        self.init_sent = endpoints.init_sent
        self._close_lifeline = endpoints.close_lifeline
        self._exited = trio.Event()
        self._returncode: int | None = None
        self._killed = False
        self._available_bytes = available_memory_bytes()
        # Shielded, for they are needed most while the worker is being put down.
        self._watch_scope = trio.CancelScope(shield=True)
        self._pump_scope = trio.CancelScope(shield=True)

    def __repr__(self) -> str:
        return f"<Worker pid {self.pid}, {self.describe_exit()}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether the process has ended."""
        return self._exited.is_set()

    @property
    def returncode(self) -> int | None:
        """0 and above, or minus the signal; None while it runs, or if adopted from elsewhere."""
        return self._returncode

    async def send(self, command: Command) -> None:
        """Send one command. One task sends. Cancelled: see ``FrameWriter.send``.

        Raises:
            trio.BrokenResourceError: the worker is gone, or going.
        """
        await self._commands.send(command)

    def try_send(self, command: Command) -> bool:
        """Send one small command if that takes no wait; whether it went out."""
        return self._commands.try_send(command)

    async def wait(self) -> int | None:
        """Wait for the end of the process; return ``returncode``. Cancelled: nothing has changed.

        Any number of tasks may wait.
        """
        await self._exited.wait()
        return self._returncode

    def last_stderr(self) -> list[str]:
        """The last lines it wrote to stderr, oldest first; complete once it has exited."""
        if self.exited:
            self._stderr.read_rest()
        return list(self._stderr.last)

    def last_words(self) -> str:
        """What it said last on stderr, to follow a semicolon: stacks, and what it said while all
        was well, are passed over for the line that names the fault."""
        for line in reversed(self.last_stderr()):
            if line.strip() and not line.startswith((*_STACK_LINES, *_QUIET_LINES)):
                return f"it last said: {line.strip()}"
        return "nothing on its stderr"

    def describe_exit(
        self,
        moment: str = "",
        *,
        needed_bytes: int | None = None,
    ) -> str:
        """How it ended, to follow "the worker ". ``moment`` says when. With a SIGKILL go the sizes
        of memory that are known: what it needed, and what could be had when it was started."""
        if not self.exited:
            return "is still running"
        code = self._returncode
        if code is None:
            return "ended, with an exit code that its own parent knows"
        if code >= 0:
            return f"exited with code {code}{moment}"
        text = f"was killed by signal {-code} ({_signal_name(-code)}){moment}"
        if self._killed or -code not in _HINTS:
            return text
        text += f"; {_HINTS[signal.Signals(-code)]}"
        if -code == signal.SIGKILL:
            sizes = {"needed": needed_bytes, "available": self._available_bytes}
            known = [f"{name} {_size(size)}" for name, size in sizes.items() if size is not None]
            text += f": {', '.join(known)}" if known else ""
        return text

    def dump_stacks(self) -> None:
        """Have it write the stacks of all its threads to stderr, which takes it a few ms where
        Python runs. Only after Hello, before which the signal would end it."""
        self._process.signal(signal.SIGUSR1)

    def dump_stacks_and_die(self) -> None:
        """The same where native code holds Python for ever. It may end the worker by a fault, so
        only for one that is killed next."""
        self._killed = self._killed or not self.exited
        self._process.signal(signal.SIGUSR2)

    def kill(self) -> None:
        """SIGKILL to its whole group, now. ``wait`` returns soon after."""
        self._killed = self._killed or not self.exited
        self._process.kill_group()

    # ---------------------------------------------------------------- tasks of ``attach``

    async def _watch(self) -> None:
        with self._watch_scope:
            await self._process.wait()
            self._returncode = self._process.exit_code()
            self._exited.set()

    async def _pump(self) -> None:
        with self._pump_scope:
            await self._stderr.run()

    # ------------------------------------------------------------------------- handshake

    async def _shake_hands(self, timeout_s: float) -> None:
        first: Event | str | None = None
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                # The end of the pipe alone will not do: a process that the worker left behind
                # may hold it open.
                nursery.start_soon(self._give_up_after_exit, nursery.cancel_scope)
                first = await self._first_event()
                nursery.cancel_scope.cancel()
        if isinstance(first, Hello):
            self._check(first)
            self.hello = first
            return
        raise self._handshake_error(_describe_silence(self, first, timeout_s))

    async def _give_up_after_exit(self, scope: trio.CancelScope) -> None:
        await self._exited.wait()
        scope.deadline = min(scope.deadline, trio.current_time() + _AFTER_EXIT_S)

    async def _first_event(self) -> Event | str:
        try:
            return await anext(self.events)
        except StopAsyncIteration:
            await self._leaves_within(_EXIT_AFTER_END_S)
            return "it closed its event pipe"
        except TruncatedFrame as fault:
            await self._leaves_within(_EXIT_AFTER_END_S)
            return str(fault)
        except FrameError as fault:
            return str(fault)

    def _check(self, hello: Hello) -> None:
        if (hello.protocol, hello.version) != (PROTOCOL, trioserve.__version__):
            raise self._handshake_error(
                f"the worker is trioserve {hello.version} with protocol {hello.protocol}, this "
                f"process is {trioserve.__version__} with {PROTOCOL}: restart after an upgrade, "
                f"and start both from one installation"
            )

    def _handshake_error(self, problem: str) -> WorkerHandshakeError:
        return WorkerHandshakeError(f"{problem}; {self.last_words()}")

    # ------------------------------------------------------------------------ kill ladder

    async def _ask_to_leave(self, grace_s: float) -> None:
        """Cancelled: the ladder goes on with the kill."""
        await self._commands.aclose()
        async with trio.open_nursery() as nursery:
            # A worker that waits for room in the event pipe would not come to see the request.
            nursery.start_soon(self.events.discard)
            if not await self._leaves_within(grace_s):
                self.dump_stacks()
                if not await self._leaves_within(DUMP_S - LAST_DUMP_S):
                    self.dump_stacks_and_die()
                    await self._leaves_within(LAST_DUMP_S)
            nursery.cancel_scope.cancel()

    async def _leaves_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self._exited.wait()
        return self.exited

    async def _put_down(self) -> None:
        """Runs shielded and bounded.

        Raises:
            WorkerStalled: the process outlived it.
        """
        self._close_lifeline()
        self.kill()
        with trio.move_on_after(GONE_S):
            await self._exited.wait()
            while not self._process.group_is_empty():
                self.kill()
                await trio.sleep(0.01)
        await self._commands.aclose()
        await self.events.aclose()
        self._stderr.read_rest()
        if not self.exited:
            raise WorkerStalled(
                f"the worker (pid {self.pid}) is still there {GONE_S:g} s after SIGKILL, in state "
                f"{process_state(self.pid) or 'unknown'}: the kernel holds it, in a driver most "
                f"likely, and with it its memory"
            )

    def _stop_tasks(self) -> None:
        self._watch_scope.cancel()
        self._pump_scope.cancel()

    def _close(self) -> None:
        self._process.close()
        self.status.close()
        self._stderr.close()


@contextlib.asynccontextmanager
async def open_worker(
    argv_module: str = "trioserve.core",
    *,
    env: Mapping[str, str] | None = None,
    hello_timeout_s: float = 10.0,
    on_stderr: Callable[[str], object] = lambda line: None,
    grace_s: float = GRACE_S,
) -> AsyncIterator[Worker]:
    """Start a worker, wait for its Hello, and on leaving see to it that nothing of it is left.

    Args:
        argv_module: the module to run.
        env: its environment; None for ours.
        hello_timeout_s: how long it may take to say Hello.
        on_stderr: gets each line of its stderr (and stdout); it must not wait.
        grace_s: how long it may take to leave when the body has ended without an error.

    Cancelled: at whatever point, the process group is killed and waited for, at most ten seconds.

    Raises:
        WorkerHandshakeError: it could not be started, ended, stayed silent, or is another version.
        WorkerStalled: it outlived SIGKILL.
    """
    async with attach(
        spawn(argv_module, env=env),
        hello_timeout_s=hello_timeout_s,
        on_stderr=on_stderr,
        grace_s=grace_s,
    ) as worker:
        yield worker


@contextlib.asynccontextmanager
async def attach(
    endpoints: Endpoints,
    *,
    hello_timeout_s: float = 10.0,
    on_stderr: Callable[[str], object] = lambda line: None,
    grace_s: float = GRACE_S,
) -> AsyncIterator[Worker]:
    """``open_worker`` for a process that exists: adopted, or a fake. Owns ``endpoints``."""
    worker = Worker(endpoints, on_stderr)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker._watch)
            nursery.start_soon(worker._pump)
            try:
                await worker._shake_hands(hello_timeout_s)
                yield worker
                await worker._ask_to_leave(grace_s)
            finally:
                try:
                    with trio.CancelScope(shield=True):
                        await worker._put_down()
                finally:
                    worker._stop_tasks()  # also where a Ctrl-C came through the shield
    except BaseExceptionGroup as group:
        # The nursery is ours and no business of the caller: one error stays that one error.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        raise
    finally:
        worker._close()


def _describe_silence(worker: Worker, first: Event | str | None, timeout_s: float) -> str:
    if worker.exited:
        ended = worker.describe_exit(" before it said Hello", needed_bytes=HELLO_BYTES)
        text = f"the worker {ended}"
        return text if first is None or isinstance(first, str) else f"{text}, after {_name(first)}"
    if first is None:
        return (
            f"the worker did not say Hello within {timeout_s:g} s; `[engine] hello_timeout_s` "
            f"sets how long it may take"
        )
    if isinstance(first, str):
        return f"the worker did not say Hello: {first}"
    return f"the worker did not say Hello: its first message was {_name(first)}"


def _name(event: Event) -> str:
    return f"Fatal: {event.error}" if isinstance(event, Fatal) else type(event).__name__


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes could still take, as the kernel estimates it; None if untold."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "unnamed"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
