"""The import budgets hold, and the script that holds them can see."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/import_budget.py"


@pytest.fixture(scope="module")
def budget() -> ModuleType:
    spec = importlib.util.spec_from_file_location("import_budget", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pf_05_budgets_hold(budget: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main() == 0, capsys.readouterr().out


def test_what_an_import_brings_is_seen_with_the_module_that_brings_it(budget: ModuleType) -> None:
    modules = ["trioserve.errors", "trioserve.config.schema", "trioserve.config.loading"]
    assert budget.over_budget(modules, {"attr", "cattrs", "torch"}) == [
        "importing trioserve.config.schema imports attr",
        "importing trioserve.config.loading imports cattrs",
    ]


def test_what_a_command_brings_is_seen(budget: ModuleType) -> None:
    [problem] = budget.help_over_budget("run", "--print-config")
    assert problem.startswith("trioserve run --print-config imports attr")


def test_the_modules_looked_at_are_those_of_the_parent(budget: ModuleType) -> None:
    parent = budget.modules_of(*budget.PARENT, "main")
    assert {"trioserve.main", "trioserve.config.loading", "trioserve.engine.api"} < set(parent)
    assert "trioserve.text.convert" not in parent
