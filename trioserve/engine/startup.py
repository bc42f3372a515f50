"""The stage tree of one incarnation: pure bookkeeping over Stage events."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from trioserve.engine.api import StageStatus
from trioserve.ipc.messages import STAGES, Stage


class StageTree:
    """Status of every stage, in order. Owned by the Engine.

    Args:
        keep: stages whose outcome is taken over from ``of``: those the parent runs once for all
            incarnations.
        clock: seconds, monotonic; for how long a stage has run that has not ended.
    """

    def __init__(
        self,
        keep: tuple[str, ...] = (),
        of: StageTree | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._started_s: dict[str, float] = {}
        self._stages = {name: StageStatus(name) for name in STAGES}
        if of is not None:
            for name in keep:
                self._stages[name] = attrs.evolve(of._stages[name])

    def apply(self, event: Stage) -> None:
        """Take one event in. A stage of an unknown name is shown at the end."""
        stage = self._stages.setdefault(event.name, StageStatus(event.name))
        stage.detail = event.detail or stage.detail
        if event.num_bytes is not None:
            stage.num_bytes = event.num_bytes
        match event.state:
            case "start":
                stage.state = "running"
                stage.fraction = event.fraction
                self._started_s[stage.name] = self._clock()
            case "progress":
                stage.fraction = event.fraction if event.fraction is not None else stage.fraction
            case "end":
                stage.state = "done"
                stage.fraction = 1.0
                stage.seconds = event.seconds

    def finish(self) -> None:
        """Ready: nothing is left to run."""
        for stage in self._stages.values():
            if stage.state == "running":
                stage.state = "done"

    def fail(self, name: str | None = None) -> None:
        """The stage of that name has failed, or the one that runs; others that ran beside it are
        cut short, and are pending again."""
        for stage in self._stages.values():
            if stage.state == "running":
                stage.seconds = self._elapsed_s(stage) if name in (None, stage.name) else None
                stage.state = "failed" if name in (None, stage.name) else "pending"
        if name in self._stages:
            self._stages[name].state = "failed"

    @property
    def current(self) -> str:
        """Name of the stage that runs (or failed), else of the first that is still to come."""
        for wanted in (("running", "failed"), ("pending",)):
            for stage in self._stages.values():
                if stage.state in wanted:
                    return stage.name
        return "ready"

    def snapshot(self) -> list[StageStatus]:
        """Copies, in order; a stage that runs has the seconds it has taken so far."""
        return [
            attrs.evolve(stage, seconds=self._elapsed_s(stage))
            if stage.state == "running"
            else attrs.evolve(stage)
            for stage in self._stages.values()
        ]

    def _elapsed_s(self, stage: StageStatus) -> float | None:
        started_s = self._started_s.get(stage.name)
        return None if started_s is None else self._clock() - started_s
