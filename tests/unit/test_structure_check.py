"""The structure check finds what it is for, and leaves the rest alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts/structure_check.py"
    spec = importlib.util.spec_from_file_location("structure_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("trioserve/engine/x.py", "import threading\nthreading.Thread()"),
        ("trioserve/engine/x.py", "\nfrom threading import Timer as T"),
        ("trioserve/engine/x.py", "\nfrom concurrent.futures import ThreadPoolExecutor"),
        ("trioserve/models/x.py", "\nimport asyncio.events"),
        ("trioserve/http/x.py", "import trio\ntrio.lowlevel.spawn_system_task(f)"),
        ("trioserve/http/x.py", "\nfrom trio.lowlevel import spawn_system_task as go"),
        ("trioserve/core/x.py", "def f():\n    global a"),
        ("trioserve/http/x.py", "def f():\n    import torch.nn"),
        ("trioserve/main.py", "def f():\n    from numpy import array"),
        ("kernels/cpu/x.py", "import os\nos.fork()"),
    ],
)
def test_finds(check: ModuleType, name: str, source: str) -> None:
    assert [line for line, _ in check.faults(name, source)] == [2]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("trioserve/ipc/child.py", "import threading\nthreading.Thread()"),
        ("trioserve/models/weights.py", "from concurrent.futures import ThreadPoolExecutor"),
        ("trioserve/core/x.py", "import torch, numpy"),
        ("trioserve/text/convert.py", "import transformers"),
        ("trioserve/http/x.py", "import threading\nlock = threading.Lock()\nfrom . import torch"),
        ("trioserve/http/x.py", "def f():\n    def g():\n        nonlocal_ = 1\n    return g"),
    ],
)
def test_leaves_alone(check: ModuleType, name: str, source: str) -> None:
    assert list(check.faults(name, source)) == []
