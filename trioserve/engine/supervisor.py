"""The life of an engine: ``open_engine`` and the incarnations of its worker.

::

    open_engine
    └ supervise                    one incarnation at a time
      ├ prepare                    resolve, fetch, inspect, once, beside the first worker's imports
      └ open_worker                Hello; on leaving, the kill ladder
        └ incarnation nursery      pipe writer · watchdog · engine task, which reads
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from trioserve.config import load
from trioserve.config.schema import FAULTS_VARIABLE, Config
from trioserve.core.stages import StageReporter
from trioserve.engine.api import Phase
from trioserve.engine.engine import Engine
from trioserve.engine.watchdog import watch_worker
from trioserve.errors import (
    ConfigError,
    EngineDied,
    ModelError,
    RequestCut,
    RequestFailed,
    StartupError,
    TrioserveError,
    WorkerDied,
    WorkerHandshakeError,
)
from trioserve.ipc.framing import MalformedFrame
from trioserve.ipc.launch import Launched
from trioserve.ipc.messages import (
    Check,
    Checked,
    Command,
    Control,
    Controlled,
    Event,
    Fatal,
    Init,
    Load,
    Ready,
    Stage,
    StepOutput,
    Work,
    WorkFailed,
)
from trioserve.ipc.process import Worker, attach, open_worker
from trioserve.ipc.spawn import endpoints_of
from trioserve.models.resolve import resolve_model
from trioserve.models.spec import ResolvedModel
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer

logger = logging.getLogger("trioserve.engine")
worker_logger = logging.getLogger("trioserve.worker")

WORKER_LEVELS = {
    name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}
MAX_BACKOFF_S = 30.0
DIED = "the engine died under this request; it may be sent again"  # why is for the log
SENT_AT_ONCE = 500  # tokens of a prompt; more do not fit into what a pipe takes in one piece
EXIT_WAIT_S = 1.0  # between the end of the event pipe and the end of the process

WorkerFactory = Callable[[Config], AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def open_engine(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    wait_ready: bool = True,
    failure_grace_s: float = 0.0,
    worker_factory: WorkerFactory | None = None,
) -> AsyncIterator[Engine]:
    """Serve a model for as long as the block runs.

    The worker process, and every task behind the engine, has ended when the block is left, however
    it is left. Requests still open then end with RequestCut. Installs no signal handlers, touches
    no global state; any number of engines may be open at once, in any thread that runs trio.

    Cancelling the surrounding scope kills the worker at once; leaving normally lets it finish its
    step.

    Args:
        config: a Config, nested values by section, a path to ``model.toml``, or None for the
            defaults.
        wait_ready: enter when the model is ready. False enters at once, in phase LOADING.
        failure_grace_s: seconds the block may go on after the engine has failed, before it is
            cancelled.
        worker_factory: opens the worker; for tests.

    Raises:
        ConfigError: the configuration cannot be used.
        StartupError, WorkerHandshakeError: the engine did not become ready.
        EngineDied: it died later, and ``engine.on_death`` did not restart it.
    """
    engine = Engine(as_config(config))
    block_error: BaseException | None = None
    block = trio.CancelScope()
    closing = trio.Event()
    supervisor = Supervisor(engine, closing, worker_factory or spawn_worker)

    async def supervise() -> None:
        try:
            await supervisor.run()
        except TrioserveError as error:
            supervisor.fail(error)
            block.deadline = trio.current_time() + failure_grace_s

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervise)
            with block:
                try:
                    if wait_ready:
                        await engine.wait_ready()
                    yield engine
                except Exception as error:
                    # Raised again below: the nursery would wrap it in a group, and the caller
                    # would have to know that there is a nursery in here.
                    block_error = error
                except (trio.Cancelled, GeneratorExit, BaseExceptionGroup):
                    raise  # the nursery's own business, or holding it
                except BaseException as error:  # Ctrl-C, sys.exit: no time for an orderly end
                    block_error = error
                    nursery.cancel_scope.cancel()
            closing.set()
    finally:
        supervisor.close()
    if engine.failure is not None and (block.cancelled_caught or block_error is engine.failure):
        raise engine.failure
    if block_error is not None:
        raise block_error
    if engine.failure is not None:
        raise engine.failure


def as_config(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """The Config of whatever ``open_engine`` was given. Raises ConfigError."""
    if isinstance(config, Config):
        return config
    if config is None or isinstance(config, Mapping):
        for section, values in (config or {}).items():
            if not isinstance(values, Mapping):
                raise ConfigError(f"section '{section}': expected a mapping of its keys")
        overrides = {
            f"{section}.{key}": value
            for section, values in (config or {}).items()
            for key, value in values.items()
        }
        return load(None, env={}, overrides=overrides, overrides_from="option").config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"expected a mapping, a path or None, not {type(config).__name__}")
    return load(Path(config), env=os.environ, overrides={}).config


def spawn_worker(config: Config) -> AbstractAsyncContextManager[Worker]:
    """Open a worker process for ``config``; raises WorkerHandshakeError on entry."""
    return open_worker(
        env=worker_environment(config),
        hello_timeout_s=config.engine.hello_timeout_s,
        on_stderr=log_worker_line,
    )


def after(launched: Launched) -> WorkerFactory:
    """A factory whose first worker is one that runs already, with the engine's configuration as
    its Init; the rest are as ``spawn_worker``'s."""
    waiting = [launched]

    def factory(config: Config) -> AbstractAsyncContextManager[Worker]:
        if not waiting:
            return spawn_worker(config)
        return attach(
            endpoints_of(waiting.pop()),
            hello_timeout_s=config.engine.hello_timeout_s,
            on_stderr=log_worker_line,
        )

    return factory


def worker_environment(config: Config) -> Mapping[str, str] | None:
    """The environment of a worker; None for ours as it is. Faults on purpose travel in it."""
    if config.test.faults:
        from trioserve.core import faults

        return faults.worker_environment(config)
    # Only a configuration may ask for faults, never what a caller's environment happens to hold.
    if FAULTS_VARIABLE not in os.environ:
        return None
    return {name: value for name, value in os.environ.items() if name != FAULTS_VARIABLE}


def log_worker_line(line: str) -> None:
    """A line of the worker's stderr, at the level it names; what names none is information."""
    name, _, text = line.partition(" ")
    level = WORKER_LEVELS.get(name)
    if level is None:
        worker_logger.info("%s", line)
    else:
        worker_logger.log(level, "%s", text)


class Supervisor:
    """Runs incarnations, one after another, until one may not be followed by another.

    Owns the worker; the engine's state is written through Engine's methods only.
    """

    def __init__(self, engine: Engine, closing: trio.Event, worker_factory: WorkerFactory) -> None:
        self._engine = engine
        self._config = engine.config
        self._closing = closing
        self._worker_factory = worker_factory
        self._report: Callable[[Stage], None] = engine.on_stage
        if self._config.test.faults:
            from trioserve.core import faults

            logger.warning("fault hooks are on: %s", ", ".join(self._config.test.faults))
            self._report = faults.parent_faults(self._config).watch_stages(engine.on_stage)
        self._stages = StageReporter(self._report)
        self._inspected = Inspected()

    async def run(self) -> None:
        """Find the model and load its text side, beside a worker that starts; then serve until
        ``closing``.

        Cancellation kills the worker and leaves nothing.

        Raises:
            TrioserveError: what ended the engine.
        """
        error: TrioserveError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._prepare, nursery.cancel_scope)
                await self._run_incarnations()
                nursery.cancel_scope.cancel()
        except* TrioserveError as group:
            error = first_error(group)
        if error is not None:
            raise error

    async def _run_incarnations(self) -> None:
        restarts = 0
        number = 0
        while True:
            number += 1
            self._engine.begin_incarnation(number)
            incarnation = Incarnation(self._engine, self._inspected, self._closing)
            try:
                async with self._spawn(number) as worker:
                    await incarnation.run(worker)
                return
            except TrioserveError as error:
                restarts = 0 if incarnation.num_tokens else restarts
                if not self._may_restart(error, number, restarts):
                    raise
                self._engine.num_restarts += 1
                self._engine.end_incarnation(
                    Phase.RESTARTING,
                    RequestFailed(DIED),
                    str(error),
                    stage=failed_stage(error),
                    resubmit=self._config.engine.resubmit,
                )
                pause = min(self._config.engine.restart_backoff_s * 2**restarts, MAX_BACKOFF_S)
                restarts += 1
                logger.error("%s", error)
                logger.warning("restart %d in %.1f s", restarts, pause)
                with trio.move_on_after(pause):
                    await self._closing.wait()
                    return

    def fail(self, error: TrioserveError) -> None:
        """The engine has ended by ``error``; open requests are told."""
        self._engine.failure = error
        self._engine.end_incarnation(
            Phase.FAILED, RequestFailed(DIED), str(error), stage=failed_stage(error)
        )

    def close(self) -> None:
        """The block was left; whatever is still open is cut."""
        if self._engine.phase is not Phase.FAILED:
            self._engine.end_incarnation(Phase.CLOSED, RequestCut("the engine was closed"), None)

    @asynccontextmanager
    async def _spawn(self, number: int) -> AsyncIterator[Worker]:
        """Stage spawn around the way to Hello. Cancellation, or an error, kills the worker."""
        config = self._config
        if config.test.faults:
            from trioserve.core import faults

            config = faults.of_incarnation(config, number)
        async with AsyncExitStack() as stack:
            with self._stages.stage("spawn") as stage:
                worker = await stack.enter_async_context(self._worker_factory(config))
                stage.detail = f"pid {worker.pid}"
            self._engine.worker_pid = worker.pid
            yield worker

    def _may_restart(self, error: TrioserveError, number: int, restarts: int) -> bool:
        if self._config.engine.on_death != "restart" or self._closing.is_set():
            return False
        if self._engine.phase is Phase.DRAINING:
            return False  # nobody could send it a request
        if number == 1 and not isinstance(error, EngineDied):
            return False  # it has never worked: trying again would hide the cause
        return restarts < self._config.engine.max_restarts

    async def _prepare(self, engine_scope: trio.CancelScope) -> None:
        """Stages resolve, fetch, inspect, and the tokenizer. Cancellation ends their children.

        A model that cannot be had cancels ``engine_scope`` where the engine drains already.

        Raises:
            StartupError: a stage failed.
        """
        model: ResolvedModel | None = None
        try:
            model = await resolve_model(self._config.model, report=self._report)
            tokenizer, template = await trio.to_thread.run_sync(
                load_text, model, abandon_on_cancel=True
            )
        except TrioserveError as error:
            # The tokenizer and the template belong to what was inspected, though read after it.
            stage = "inspect" if model is not None else self._engine.running_stage
            if self._engine.phase is not Phase.DRAINING:
                raise StartupError(stage, str(error)) from error
            # Told to stop already, and a Ctrl-C may have hit a child as it was started.
            logger.warning("stage %s, given up: %s", stage, error)
            engine_scope.cancel()
            return
        model = attrs.evolve(model, num_token_ids=tokenizer.num_token_ids)
        self._engine.set_model(model, tokenizer, template)
        self._inspected.set(model)


class Inspected:
    """The model, from the moment it is known. The supervisor sets it, once."""

    def __init__(self) -> None:
        self.model: ResolvedModel | None = None
        self._event = trio.Event()

    def set(self, model: ResolvedModel) -> None:
        self.model = model
        self._event.set()

    async def wait(self) -> ResolvedModel:
        """Cancellation changes nothing."""
        await self._event.wait()
        assert self.model is not None
        return self.model


class Incarnation:
    """One worker from Hello to its end. Raises what ended it; returns when asked to close."""

    def __init__(self, engine: Engine, inspected: Inspected, closing: trio.Event) -> None:
        self._engine = engine
        self._config = engine.config
        self._inspected = inspected
        self._closing = closing
        self._fatal: Fatal | None = None
        self._ready = trio.Event()
        self.num_tokens = 0
        self._stage = "python"  # that the worker is in, or comes to next
        self._idle = True  # it may wait for the model: its silence means nothing
        self._progress_s = trio.current_time()  # of the last event
        self.unanswered_s: float | None = None  # when the first request without an event went out

    async def run(self, worker: Worker) -> None:
        """Serve. Cancellation ends it; the caller's ladder ends the worker.

        Raises:
            StartupError: a stage failed, the worker died in it, or it went silent.
            WorkerDied: the worker ended after it was ready.
            WorkerStalled: the watchdog found it stuck.
        """
        error: TrioserveError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_commands, worker)
                nursery.start_soon(watch_worker, worker, self._config, self)
                nursery.start_soon(self._until_closed, worker, nursery.cancel_scope)
                self._engine.try_send = functools.partial(self._try_send, worker)
                await self._handle_events(worker)
                raise await self._death(worker)
        except* TrioserveError as group:
            error = first_error(group)
        finally:
            self._engine.try_send = None
        if isinstance(error, WorkerDied) and not self.ready:
            raise StartupError(self.stage, str(error)) from error  # a frame that cannot be read
        if error is not None:
            raise error

    @property
    def ready(self) -> bool:
        """Whether Ready has come."""
        return self._ready.is_set()

    @property
    def stage(self) -> str:
        """The worker's stage that runs."""
        return self._stage

    @property
    def progress_s(self) -> float:
        """When the worker moved on last; now, while it waits for the model."""
        return trio.current_time() if self._idle else self._progress_s

    async def _until_closed(self, worker: Worker, scope: trio.CancelScope) -> None:
        await self._closing.wait()
        if not self.ready:
            worker.kill()  # it has nothing to finish, and is deaf while it loads
        scope.cancel()

    async def _write_commands(self, worker: Worker) -> None:
        """Pipe writer. Cancellation may leave half a frame: only on the way to the ladder."""
        try:
            if not worker.init_sent:
                await worker.send(Init(msgspec.to_builtins(self._config)))
            model = await self._inspected.wait()
            self._idle = False
            self._progress_s = trio.current_time()
            await worker.send(Load(msgspec.to_builtins(model)))
            # A worker that loads takes whatever comes for the end: requests kept from the last
            # incarnation wait here.
            await self._ready.wait()
            while True:
                command = await self._engine.next_command()
                self._note_sent(command)
                try:
                    await worker.send(command)
                except MalformedFrame as error:
                    # It was refused before a byte went out; the pipe is as good as before.
                    if not isinstance(command, Work):
                        raise
                    self._engine.on_failed(WorkFailed(command.id, "invalid", str(error)))
        except trio.BrokenResourceError:
            await trio.sleep_forever()  # the worker is gone: the reader tells why

    def _try_send(self, worker: Worker, work: Work) -> bool:
        """Send a request without a turn of the loop, if it is small and nothing is in the way."""
        sent = len(work.prompt_token_ids) <= SENT_AT_ONCE and worker.try_send(work)
        if sent:
            self._note_sent(work)
        return sent

    def _note_sent(self, command: Command) -> None:
        if self.unanswered_s is None and self._is_answered_soon(command):
            self.unanswered_s = trio.current_time()

    def _is_answered_soon(self, command: Command) -> bool:
        """Whether silence after it means that the worker is stuck."""
        if isinstance(command, Work):
            return not self._engine.paused
        return isinstance(command, Check | Control)

    async def _handle_events(self, worker: Worker) -> None:
        """Engine task: the only place where events change the engine's state. Returns at the end of
        the pipe. Cancellation loses nothing."""
        async for event in worker.events:
            self._progress_s = trio.current_time()
            self.unanswered_s = None
            self._handle(event)

    def _handle(self, event: Event) -> None:
        engine = self._engine
        match event:
            case StepOutput():
                self.num_tokens += sum(len(delta.token_ids) for delta in event.deltas)
                engine.on_step(event)
            case WorkFailed():
                engine.on_failed(event)
            case Stage():
                if event.state == "start":
                    self._stage = event.name
                if event.name == "python":
                    self._idle = event.state == "end" and self._inspected.model is None
                engine.on_stage(event)
            case Ready():
                engine.on_ready(event)
                self._ready.set()
            case Checked() | Controlled():
                engine.on_answer(event)
            case Fatal():
                self._fatal = event
            case _:
                raise WorkerDied(f"the worker sent {type(event).__name__} out of turn")

    async def _death(self, worker: Worker) -> TrioserveError:
        """The error that says why the event pipe has ended."""
        with trio.move_on_after(EXIT_WAIT_S):
            await worker.wait()
        if self._fatal is not None:
            if self._fatal.traceback:
                logger.error("worker traceback:\n%s", self._fatal.traceback.rstrip())
            cause = self._fatal.error
        else:
            model = self._inspected.model
            needed_bytes = None if model is None else model.weight_bytes
            ended = worker.describe_exit(needed_bytes=needed_bytes)
            cause = f"the worker {ended}; {worker.last_words()}"
        if self.ready:
            return WorkerDied(f"the worker died: {cause}" if self._fatal else cause)
        stage = self._fatal.stage if self._fatal else self._stage
        return StartupError(stage, cause)


def load_text(model: ResolvedModel) -> tuple[Tokenizer, ChatTemplate | None]:
    """The parent's half of a model. Raises ModelError."""
    tokenizer = Tokenizer(model.tokenizer_path)
    if tokenizer.decoder_fault is not None and "generate" in model.spec.tasks:
        raise ModelError(tokenizer.decoder_fault)
    if model.chat_template is None:
        return tokenizer, None
    return tokenizer, ChatTemplate(model.chat_template, model.bos_token, model.eos_token)


def first_error(group: BaseExceptionGroup[TrioserveError]) -> TrioserveError:
    """The first single error in a group: a later one is a consequence."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TrioserveError)
    return error


def failed_stage(error: TrioserveError) -> str | None:
    """The stage of start-up that ``error`` ended; None where it was none."""
    if isinstance(error, StartupError):
        return error.stage
    return "spawn" if isinstance(error, WorkerHandshakeError) else None
