"""Modules that wait until they are touched, and a worker that leaves the heavy ones be."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve.core.lazy_imports import LAZY, lazily

NOT_IN_A_WORKER = (
    "sympy", "torch._dynamo", "torch._inductor", "torch._prims", "torch._refs", "transformers",
    "torch._native.registry", "yaml.scanner", "scipy", "pandas",
)  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that leaves a mark when it is run."""
    name = "waits_until_touched"
    (tmp_path / f"{name}.py").write_text("import builtins\nbuiltins.touched = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.touched", False, raising=False)
    yield name
    sys.modules.pop(name, None)


def is_touched() -> bool:
    import builtins

    return bool(builtins.touched)  # type: ignore[attr-defined]


def test_a_named_module_is_run_by_its_first_attribute(module: str) -> None:
    with lazily(frozenset({module})):
        found = __import__(module)
        assert not is_touched()
    assert found.value == 3
    assert is_touched()


def test_other_modules_are_run_as_ever(module: str) -> None:
    with lazily(frozenset({"another"})):
        __import__(module)
    assert is_touched()


def test_after_the_block_a_named_module_is_run_as_ever(module: str) -> None:
    with lazily(frozenset({module})):
        pass
    __import__(module)
    assert is_touched()


def test_a_name_that_is_not_there_is_the_usual_error() -> None:
    with lazily(frozenset({"no_such_module"})), pytest.raises(ModuleNotFoundError):
        __import__("no_such_module")


def test_a_fault_in_a_module_is_said_where_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with lazily(frozenset({"faulty"})):
        found = __import__("faulty")
    assert isinstance(found, types.ModuleType)
    with pytest.raises(ZeroDivisionError):
        found.anything  # noqa: B018


STEP = """
import sys, importlib
from trioserve.core.lazy_imports import lazily
with lazily():
    import torch
    import numba
    import trioserve.core.model_runner, trioserve.models.panels, trioserve.models.llama
with torch.inference_mode():
    x = torch.randn(4, 64)
    torch.nn.functional.linear(x, torch.randn(8, 64)).softmax(-1).topk(3)
print(*sys.modules)
print(*(name for name, module in sys.modules.items() if type(module).__name__ == "_LazyModule"))
importlib.import_module("torch._meta_registrations").linalg_cross
print(torch.empty(2, 3, device="meta").sum(0).shape)
"""


def test_a_worker_has_nothing_of_what_compiles_and_traces() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", STEP], capture_output=True, text=True, check=True
    )
    loaded, waiting, of_meta = done.stdout.splitlines()
    assert not set(NOT_IN_A_WORKER) & set(loaded.split())
    assert set(waiting.split()) >= LAZY - {"yaml"}  # of which numba may do without
    assert of_meta == "torch.Size([3])"
