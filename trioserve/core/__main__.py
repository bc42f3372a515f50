"""The worker process: ``python -P -m trioserve.core --fds commands,events,lifeline,status``.

Started by the parent only. Says Hello before anything heavy is imported, imports it while the
parent looks for the model, then loads and serves.
Exit codes: 0 asked to leave, 1 a fault (said in Fatal and on stderr).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trioserve import __version__
from trioserve.config.schema import FAULTS_VARIABLE, Config
from trioserve.core.batch import Executor
from trioserve.core.engine_core import EngineCore
from trioserve.core.stages import StageReporter
from trioserve.errors import TrioserveError
from trioserve.ipc.child import Channel
from trioserve.ipc.messages import PROTOCOL, Command, Exit, Fatal, Hello, Init, Load, Stage
from trioserve.models.spec import ResolvedModel

if TYPE_CHECKING:
    from trioserve.core.faults import Faults


def main() -> int:
    """Run the worker to its end and return its exit code."""
    # What start-up makes stays, and to walk it again and again is a fifth of an import.
    gc.disable()
    channel = Channel.open(sys.argv[1:])
    faults = _faults()
    hello = Hello(PROTOCOL, __version__, os.getpid())
    channel.send(hello if faults is None else faults.change_hello(hello))
    init = channel.inbox.get()
    if isinstance(init, Exit):
        return 0  # the parent left before it said anything
    if not isinstance(init, Init):
        raise RuntimeError(f"first command is {type(init).__name__}, not Init")
    config = msgspec.convert(init.config, Config)
    logging.basicConfig(
        stream=sys.stderr, level=config.log.level.upper(), format="%(levelname)s %(message)s"
    )
    early: list[Command] = []  # what came while a stage ran: Load at most

    def send_stage(stage: Stage) -> None:
        early.extend(channel.inbox.drain())
        if any(isinstance(command, Exit) for command in early):
            raise SystemExit(0)  # the parent is closing
        channel.send(stage)

    report = StageReporter(send_stage if faults is None else faults.watch_stages(send_stage))
    try:
        make_executor = _import_executor(config, report)
        gc.freeze()
        load = early.pop(0) if early else channel.inbox.get()
        if isinstance(load, Exit):
            return 0
        if not isinstance(load, Load):
            raise RuntimeError(f"second command is {type(load).__name__}, not Load")
        model = msgspec.convert(load.model, ResolvedModel)
        executor = make_executor(model, config)
        if faults is not None:
            executor = faults.wrap(executor)
        core = EngineCore(config, model, executor, channel, report)
        core.start()
        report.current = "serving"
        core.run()
    except Exception as error:
        channel.send(_fatal(report.current, error))
        return 1
    return 0


def _faults() -> Faults | None:
    """Faults on purpose, which only a parent whose configuration allows them asks for."""
    value = os.environ.pop(FAULTS_VARIABLE, None)
    if value is None:
        return None
    from trioserve.core.faults import Faults

    return Faults.from_environment(value, sys.argv)


def _import_executor(
    config: Config, report: StageReporter
) -> Callable[[ResolvedModel, Config], Executor]:
    """Import what the device needs: the stage "python". Gives what makes its executor."""
    with report.stage("python") as stage:
        if config.device.kind == "simulated":
            from trioserve.devices.simulated import SimulatedExecutor

            return SimulatedExecutor
        from trioserve.devices.cpu import prepare_environment

        prepare_environment(config)  # threads, before the libraries read the environment
        import torch

        stage.detail = f"torch {torch.__version__}"
        stage.progress()
        from trioserve.core.model_runner import ModelRunner

        if config.kernels.attention != "torch":
            # What is wrong with it is found, and said, where its kernels are made.
            with contextlib.suppress(Exception):
                importlib.import_module("numba")
        return ModelRunner


def _fatal(stage: str, error: Exception) -> Fatal:
    if isinstance(error, TrioserveError):
        text = getattr(error, "cause", None) or str(error)
        return Fatal(stage, text, "", "user")
    if isinstance(error, MemoryError):
        text = f"out of memory: {error}" if str(error) else "out of memory"
        return Fatal(stage, text, traceback.format_exc())
    return Fatal(stage, f"{type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
