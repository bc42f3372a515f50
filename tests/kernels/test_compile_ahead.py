"""Kernels compiled before a model needs them, by processes of their own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from trioserve.kernels import cache
from trioserve.kernels.cpu import compiler
from trioserve.models import fusing
from trioserve.models.fusing import (
    ATTENTION,
    COST_OF_PROCESS,
    COSTS,
    LAYERS,
    WHOLE,
    compile_ahead,
    shares,
)

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from trioserve.kernels.cpu import best, runtime
from trioserve.models import fusing
fusing.compile_ahead(sys.argv[2:], int(sys.argv[1]), lambda text: print(text))
import torch
team = runtime.Team(1, runtime.cache_directory())
values, ids = best.FirstBest(team)(torch.tensor([[1.0, 3.0, 2.0]]))
print(values.tolist(), ids.tolist(), team.num_compiled, team.num_loaded)
"""


def run(home: Path, processes: int, *names: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(processes), *names],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_what_is_compiled_ahead_is_found_and_works(tmp_path: Path) -> None:
    """``best`` goes to this process or to its child: both are looked at."""
    for processes, home in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        home.mkdir()
        lines = run(home, processes, "best", "plan", "decoder")
        assert lines == ["compiling 3 kernels, once for this processor", "[3.0] [1] 0 1"]
        names = {path.name.partition("-")[0] for path in home.rglob("*.kernel")}
        assert names == {"best", "plan", "decoder"}
        assert run(home, processes, "best") == ["[3.0] [1] 0 1"]


def test_all_kernels_of_a_model_are_known() -> None:
    assert set(ATTENTION + LAYERS + WHOLE) == set(COSTS) == set(compiler.KERNELS)


def test_processes_take_about_as_long_and_none_has_nothing_to_do() -> None:
    names = ATTENTION + LAYERS
    for count, processes in itertools.product(range(1, 6), (1, 2, 3, 64)):
        parts = shares(names[:count], processes)
        assert sorted(name for part in parts for name in part) == sorted(names[:count])
        assert len(parts) <= processes
        assert all(parts[1:])
    first, second = shares(names, 2)
    costs = [sum(COSTS[name] for name in part) for part in (first, second)]
    assert abs(costs[0] - costs[1] - COST_OF_PROCESS) <= 2.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_child_that_fails_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusing, "_CHILD", ("trioserve.no_such_module",))
    monkeypatch.setattr(compiler, "compile_into", lambda directory, names: None)
    compile_ahead(ATTENTION + LAYERS, 2)
    assert "ended with 1" in caplog.text


def test_a_child_goes_with_a_compiler_that_fails_here(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children = []

    def fail(directory: Path, names: list[str]) -> None:
        raise RuntimeError("LLVM says no")

    class Popen(subprocess.Popen):
        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__([sys.executable, "-c", "input()"], **options)
            children.append(self)

    monkeypatch.setattr(fusing.subprocess, "Popen", Popen)
    monkeypatch.setattr(compiler, "compile_into", fail)
    with caplog.at_level("INFO"):
        compile_ahead(ATTENTION + LAYERS, 2)
    assert "not compiled ahead: RuntimeError: LLVM says no" in caplog.text
    [child] = children
    assert child.returncode is not None


def test_who_waited_compiles_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has compiled all while this one waited for its turn."""
    found = iter([["best"], []])
    monkeypatch.setattr(compiler, "missing", lambda directory, names: next(found))
    told: list[str] = []
    compile_ahead(["best"], 2, told.append)
    assert told == []
    assert next(found, None) is None


def test_nothing_is_tried_where_nothing_can_be_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "cache_directory", lambda: None)
    monkeypatch.setattr(compiler, "missing", pytest.fail)
    with caplog.at_level("INFO"):
        compile_ahead(["best"], 1)
    assert caplog.messages == []
