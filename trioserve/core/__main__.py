"""The worker process: ``python -P -m trioserve.core --fds commands,events,lifeline,status``.

Started by the parent only. Says Hello before anything heavy is imported, then loads and serves.
Exit codes: 0 asked to leave, 1 a fault (said in Fatal and on stderr).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

import msgspec

from trioserve import __version__
from trioserve.config.schema import FAULTS_VARIABLE, Config
from trioserve.core.batch import Executor
from trioserve.core.engine_core import EngineCore
from trioserve.core.stages import StageReporter
from trioserve.errors import TrioserveError
from trioserve.ipc.child import Channel
from trioserve.ipc.messages import PROTOCOL, Exit, Fatal, Hello, Init, Stage
from trioserve.models.spec import ResolvedModel

if TYPE_CHECKING:
    from trioserve.core.faults import Faults


def main() -> int:
    """Run the worker to its end and return its exit code."""
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
    model = msgspec.convert(init.model, ResolvedModel)
    logging.basicConfig(
        stream=sys.stderr, level=config.log.level.upper(), format="%(levelname)s %(message)s"
    )

    def send_stage(stage: Stage) -> None:
        # Before Ready nothing comes but the end of the pipe: the parent is closing.
        if channel.inbox.drain():
            raise SystemExit(0)
        channel.send(stage)

    report = StageReporter(send_stage if faults is None else faults.watch_stages(send_stage))
    try:
        executor = _executor(config, model, report)
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


def _executor(config: Config, model: ResolvedModel, report: StageReporter) -> Executor:
    """Import what the device needs: the stage "python"."""
    with report.stage("python") as stage:
        if config.device.kind == "simulated":
            from trioserve.devices.simulated import SimulatedExecutor

            return SimulatedExecutor(model, config)
        from trioserve.devices.cpu import prepare_environment

        prepare_environment(config)  # threads, before the libraries read the environment
        import torch

        stage.detail = f"torch {torch.__version__}"
        from trioserve.core.model_runner import ModelRunner

        return ModelRunner(model, config)


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
