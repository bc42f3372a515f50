"""The kill matrix: every state × faults of the worker × what happens to the parent.

``scripts/test tests/process/test_kill_matrix.py`` runs it alone and prints a report at its end.
Settings, as variables of the environment: MATRIX_REPORT names a file for the report as JSON,
MATRIX_AT_ONCE sets how many servers run at a time, MATRIX_ONLY keeps the cases whose names hold
this text. Deadlines stretch by as much as a server takes longer to listen than it should.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .matrix_all import run_cases
from .matrix_cases import FAULTS, PARENTS, REAL_STATES, STATES, Case, all_cases, choose, real_cases
from .matrix_parts import Result

ONLY = os.environ.get("MATRIX_ONLY", "")
AT_ONCE = int(os.environ.get("MATRIX_AT_ONCE", "3"))
SIMULATED = choose(all_cases())
REAL = real_cases()


def test_the_selection_covers_what_it_should() -> None:
    cases = SIMULATED + REAL
    assert len(cases) >= 150
    assert len(REAL) >= 20
    assert len({case.name for case in cases}) == len(cases)
    assert {case.state for case in SIMULATED} == set(STATES)
    assert {case.state for case in REAL} == set(REAL_STATES)
    assert {case.fault for case in SIMULATED} == set(FAULTS)
    assert {case.parent for case in SIMULATED} == set(PARENTS) == {case.parent for case in REAL}
    possible = {pair for case in all_cases() for pair in case.pairs}
    assert possible == {pair for case in SIMULATED for pair in case.pairs}
    assert choose(all_cases()) == SIMULATED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from ..e2e.test_bad_input import make_model

    return str(make_model(tmp_path_factory.mktemp("model") / "tiny"))


async def run(cases: list[Case], tmp_path: Path, model: str, report: list[Result]) -> None:
    kept = [case for case in cases if ONLY in case.name]
    results = await run_cases(kept, tmp_path, model, AT_ONCE, report.append)
    bad = [result.describe() for result in results if result.problems]
    assert not bad, f"{len(bad)} of {len(results)} cases:\n" + "\n\n".join(bad)


@pytest.mark.parametrize("state", STATES)
async def test_simulated(state: str, tmp_path: Path, matrix_report: list[Result]) -> None:
    await run([case for case in SIMULATED if case.state == state], tmp_path, "", matrix_report)


@pytest.mark.parametrize("state", REAL_STATES)
async def test_real_model(
    state: str, tmp_path: Path, model: str, matrix_report: list[Result]
) -> None:
    await run([case for case in REAL if case.state == state], tmp_path, model, matrix_report)
