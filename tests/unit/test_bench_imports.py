"""The table of imports that bench/startup.py prints."""

from __future__ import annotations

import sys

from .test_bench import BENCH

sys.path.insert(0, str(BENCH))
try:
    from lib.imports import SHOWN, by_package
finally:
    sys.path.remove(str(BENCH))

LINES = [
    "import time: self [us] | cumulative | imported package",
    "import time:      1000 |       1000 |     torch._C",
    "import time:      3500 |       4500 |   torch",
    "12:00:00 INFO    worker: import time:       200 |        200 | numpy.core",
    "a line of the log",
]


def test_own_times_are_summed_by_package_the_heaviest_first() -> None:
    assert by_package(LINES) == {
        "torch": {"own_ms": 4.5, "modules": 2},
        "numpy": {"own_ms": 0.2, "modules": 1},
        "total": {"own_ms": 4.7, "modules": 3},
    }
    assert list(by_package(LINES)) == ["torch", "numpy", "total"]


def test_light_packages_are_one_line() -> None:
    lines = [f"import time: {1000 * n} | 9 | package{n}" for n in range(1, SHOWN + 4)]
    table = by_package(lines)
    assert len(table) == SHOWN + 2
    assert table["others"] == {"own_ms": 1.0 + 2.0 + 3.0, "modules": 3}


def test_nothing_imported_is_no_time() -> None:
    assert by_package([]) == {"total": {"own_ms": 0, "modules": 0}}
