"""Shared by the process tests: where the test children are, and a look at what is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHILDREN = Path(__file__).parent / "children"
MATRIX = pytest.StashKey[list[Any]]()  # results of the kill matrix


def open_fds() -> dict[str, str]:
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
    return fds


def has_children() -> bool:
    """Whether this process has a child, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a descriptor or a child behind."""
    before = open_fds()
    assert not has_children()
    yield
    assert open_fds() == before
    assert not has_children()


@pytest.fixture
def child_env() -> Callable[[str], dict[str, str]]:
    """The environment in which ``child`` and ``parent`` are found and play ``fault``."""

    def make(fault: str = "") -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return inherited | {"PYTHONPATH": str(CHILDREN), "FAULT": fault}

    return make


@pytest.fixture
def matrix_report(request: pytest.FixtureRequest) -> list[Any]:
    """Takes the results of the kill matrix; shown at the end."""
    return request.config.stash.setdefault(MATRIX, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The report of the kill matrix, and as JSON in the file that MATRIX_REPORT names."""
    results = config.stash.get(MATRIX, [])
    if not results:
        return
    good = [result for result in results if not result.problems]
    slowest = sorted(good, key=lambda result: -result.outcome_s)[:5]
    terminalreporter.section("kill matrix")
    real = sum(result.case.device == "real" for result in results)
    terminalreporter.line(f"{len(results)} cases ({real} with a real model), {len(good)} survived")
    for result in slowest:
        terminalreporter.line(f"{result.outcome_s:6.2f} s  {result.case.name}")
    for result in results:
        if result.problems:
            terminalreporter.line(f"FAILED {result.case.name}: {result.problems[0]}")
    if path := os.environ.get("MATRIX_REPORT"):
        rows = [
            {
                "case": result.case.name,
                "exit_code": result.exit_code,
                "outcome_s": round(result.outcome_s, 3),
                "problems": result.problems,
            }
            for result in results
        ]
        report = {"cases": len(results), "survived": len(good), "results": rows}
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
