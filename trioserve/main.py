"""``trioserve run``: the nursery tree, from configuration to exit code. Read this first.

::

    run                                       failure → exit code
    └ keys, certificates, bind, launch        before anything heavy; a worker imports its half
      └ root nursery ── signals               first signal: drain; second: cancel this nursery
        └ open_engine                         phase LOADING at once; the worker lives in here
          ├ progress · engine end · rates · service manager · sender of spans
          └ serve_http                        answers from the first moment; returns when drained
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from typing import IO, TYPE_CHECKING, cast

import attrs
import msgspec
import trio

from trioserve.config.keys import forget_keys, without_keys
from trioserve.engine.supervisor import (
    WorkerFactory,
    after,
    first_error,
    open_engine,
    spawn_worker,
)
from trioserve.errors import DrainCut, TrioserveError
from trioserve.http.guard import Guard, check_exposure
from trioserve.http.listeners import Listener, bind, describe
from trioserve.http.tls import Tls
from trioserve.ipc.framing import encode
from trioserve.ipc.launch import Launched
from trioserve.ipc.messages import Init
from trioserve.logs import set_up_logging
from trioserve.loop_watch import LoopMetrics, LoopWatch, watching_loop
from trioserve.notify import notify_manager
from trioserve.progress import report_progress
from trioserve.rates import log_rates
from trioserve.stacks import write_stacks
from trioserve.terminal import PatientTerminal
from trioserve.tracing.tracer import TraceMetrics, open_tracer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.console import Console

    from trioserve.config import LoadedConfig
    from trioserve.engine.engine import Engine
    from trioserve.http.server import DrainReport

logger = logging.getLogger("trioserve")

FLUSH_S = 2.0  # that HTTP has to tell clients of an engine's death


class Stopping:
    """Why and how the server is to stop; the signals are written by the signals task alone."""

    def __init__(self) -> None:
        self.event = trio.Event()  # also set when the engine has ended by itself
        self.first_signal: int | None = None
        self.second_signal: int | None = None
        self.early: list[int] = []  # what came before the tree could take it
        self.signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            self.signals.append(signal.SIGHUP)

    def note(self, number: int, frame: object) -> None:
        """A signal handler for before and after the tree: what comes early waits for it, what comes
        late changes nothing, least of all the exit code."""
        self.early.append(number)


@attrs.frozen
class Entrance:
    """Where clients come in, and what they have to show."""

    listeners: list[Listener]
    addresses: list[str]
    guard: Guard
    tls: Tls | None


@attrs.frozen
class Tree:
    """What the tree is made of."""

    loaded: LoadedConfig
    entrance: Entrance
    stopping: Stopping
    console: Console | None
    watch: LoopWatch
    serve_http: Callable[..., Awaitable[DrainReport]]
    worker_factory: WorkerFactory


def run(loaded: LoadedConfig) -> int:
    """Serve until told to stop; returns the exit code of design and docs/lifecycle.md."""
    # One text at a time is tokenized, in a thread of ours: a pool per process would idle.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A loop blocked for ever gets SIGABRT from a manager's watchdog: the log then has its stack.
    faulthandler.enable(file=2)
    console = make_console(loaded)
    set_up_logging(loaded.config.log, console)
    stopping = Stopping()
    for number in stopping.signals:
        signal.signal(number, stopping.note)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # What a slip of log rotation sends would end the server; it writes its stacks instead.
        signal.signal(number, write_stacks)
    try:
        with open_entrance(loaded) as entrance, launch_worker(loaded) as launched:
            # A third of a second, before the loop, which it would block. A thread for it wins
            # nothing, as it and the loop would wait for each other's turn of the interpreter.
            serve_http = import_serve_http()
            with watching_loop() as watch:
                workers = spawn_worker if launched is None else after(launched)
                tree = Tree(loaded, entrance, stopping, console, watch, serve_http, workers)
                trio.run(serve, tree, instruments=[watch])
        logger.info("stopped")
    except* TrioserveError as group:
        error = first_error(group)
        exit_code = error.exit_code
        logger.error("%s", error)
    except* Exception:
        logger.critical("a bug in the server:\n%s", traceback.format_exc())
        exit_code = 70
    else:
        exit_code = 0
    for number in (*stopping.signals, signal.SIGUSR1, signal.SIGUSR2):
        # Python resets a handler of its own before it has ended, and then a signal would kill.
        signal.signal(number, signal.SIG_IGN)
    return exit_code if stopping.second_signal is None else 128 + stopping.second_signal


@contextlib.contextmanager
def open_entrance(loaded: LoadedConfig) -> Iterator[Entrance]:
    """Keys and certificates read, sockets bound; closed at the end, however it comes.

    Raises:
        TrioserveError: one of them cannot be had.
    """
    http = loaded.config.http
    guard, tls = Guard.from_config(http), Tls.from_config(http)
    listeners = bind(http)
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)  # a start that fails removes its socket file too
        check_exposure(listeners, guard, admin=http.admin)
        scheme = "http" if tls is None else "https"
        addresses = [describe(listener, scheme) for listener in listeners]
        if settings := loaded.describe_non_defaults():
            logger.info("settings: %s", settings)
        logger.info("listening on %s", ", ".join(addresses))
        forget_keys(os.environ)
        yield Entrance(listeners, addresses, guard, tls)


def launch_worker(loaded: LoadedConfig) -> AbstractContextManager[Launched | None]:
    """Start the first worker, which imports its half while this process imports its own.

    It has ended when the block has. None where the server has to start it, and to say what is
    wrong.
    """
    if loaded.config.test.faults:
        return contextlib.nullcontext()  # they are the server's to hand out
    init = Init(msgspec.to_builtins(without_keys(loaded.config)))
    try:
        return Launched("trioserve.core", first_frame=encode(init))
    except OSError:
        return contextlib.nullcontext()


async def serve(tree: Tree) -> None:
    """The tree below the bound sockets. Cancellation kills the worker and aborts the connections.

    Raises:
        TrioserveError: what ended the server, possibly inside exception groups.
    """
    config, entrance, stopping = tree.loaded.config, tree.entrance, tree.stopping
    async with trio.open_nursery() as root:
        await root.start(watch_signals, stopping, root.cancel_scope)
        engine_config = without_keys(config)
        async with open_engine(
            engine_config,
            wait_ready=False,
            failure_grace_s=FLUSH_S,
            worker_factory=tree.worker_factory,
        ) as engine:
            root.start_soon(report_progress, engine, entrance.addresses, tree.console)
            root.start_soon(stop_with_engine, engine, stopping)
            root.start_soon(drain_engine, engine, stopping)
            root.start_soon(log_rates, engine, config.log.stats_interval_s)
            root.start_soon(notify_manager, engine, os.environ)
            async with open_tracer(config.trace, engine) as tracer:
                traced = [] if tracer is None else [TraceMetrics(tracer)]
                report = await tree.serve_http(
                    engine,
                    entrance.listeners,
                    config,
                    stopping=stopping.event,
                    drain_deadline_s=config.engine.drain_timeout_s,
                    collectors=[LoopMetrics(tree.watch), *traced],
                    tracer=tracer,
                    guard=entrance.guard,
                    tls=entrance.tls,
                )
        root.cancel_scope.cancel()
        if report.num_cut:
            raise DrainCut(
                f"{report.num_cut} requests were cut at the drain deadline "
                f"(engine.drain_timeout_s = {config.engine.drain_timeout_s:g})"
            )


def import_serve_http() -> Callable[..., Awaitable[DrainReport]]:
    """``serve_http``, with everything it is built on."""
    from trioserve.http.server import serve_http

    # What is imported by now stays. To walk it again and again would hold every stream up for a
    # tenth of a second, each time that much has been answered.
    gc.collect()
    gc.freeze()
    return serve_http


async def watch_signals(
    stopping: Stopping,
    root: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """First SIGTERM, SIGINT or SIGHUP: drain. Second: cancel everything. Runs until cancelled."""
    with trio.open_signal_receiver(*stopping.signals) as signals:
        task_status.started()
        for number in stopping.early:
            heed(number, stopping, root)
        async for number in signals:
            heed(number, stopping, root)


def heed(number: int, stopping: Stopping, root: trio.CancelScope) -> None:
    """Act on a signal."""
    name = signal.Signals(number).name
    if stopping.first_signal is None:
        stopping.first_signal = number
        logger.info("%s: no new requests, finishing those that run; again stops at once", name)
        stopping.event.set()
    elif stopping.second_signal is None:
        stopping.second_signal = number
        logger.warning("%s again: stopping at once", name)
        root.cancel()


async def stop_with_engine(engine: Engine, stopping: Stopping) -> None:
    """When the engine has ended by itself, have HTTP flush what it still holds and return."""
    await engine.wait_ended()
    stopping.event.set()


async def drain_engine(engine: Engine, stopping: Stopping) -> None:
    """From the first signal on, the engine refuses new requests."""
    await stopping.event.wait()
    engine.begin_drain()


def make_console(loaded: LoadedConfig) -> Console | None:
    """A console for the live view, if stderr is a terminal and the format allows it."""
    if loaded.config.log.format != "auto" or not sys.stderr.isatty():
        return None
    from rich.console import Console

    try:
        terminal = PatientTerminal(sys.stderr.fileno())
    except OSError:  # of another container, or taken away: lines do, and can be dropped as well
        return None
    return Console(file=cast(IO[str], terminal), force_terminal=True)
