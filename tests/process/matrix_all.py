"""Runs cases of the kill matrix, some at a time, and collects what became of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from .matrix_cases import Case
from .matrix_parts import Result, Wrong, flat
from .matrix_run import Run


async def run_case(case: Case, directory: Path, model: str) -> Result:
    """Run it. Cancellation kills all of its processes."""
    result = Result(case)
    run = Run(case, directory, model)
    try:
        async with run.started():
            await run.play()
            result.exit_code = await run.ended()
            result.outcome_s = run.outcome_s
            await run.check_nothing_left()
            run.check_end(result.exit_code)
            run.check_answers()
    except* Wrong as group:
        result.problems += [str(error) for error in flat(group)]
    except* trio.TooSlowError as group:
        result.problems += [f"too slow: {error!r}" for error in flat(group)]
    finally:
        run.kill_all()
    result.log = run.log
    result.problems += run.problems
    return result


async def run_cases(
    cases: list[Case], directory: Path, model: str, at_once: int, on_result: Callable[[Result], Any]
) -> list[Result]:
    """Run cases, some at a time. Cancellation ends them all."""
    results: list[Result] = []
    limiter = trio.CapacityLimiter(at_once)

    async def one(number: int, case: Case) -> None:
        async with limiter:
            place = directory / str(number)
            place.mkdir()
            result = await run_case(case, place, model)
            results.append(result)
            on_result(result)

    async with trio.open_nursery() as nursery:
        for number, case in enumerate(cases):
            nursery.start_soon(one, number, case)
    return results
