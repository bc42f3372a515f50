"""The table of field cases in docs/lifecycle.md names tests that exist, and all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/lifecycle.md").read_text()
ROWS = {
    found[1]: row
    for row in PAGE.split("## Cases from the field")[1].splitlines()
    if (found := re.match(r"\| ([A-Z]{2,3}-\d\d) ", row))
}
CORE = [
    *("ST-01", "ST-03", "ST-04", "ST-06", "ST-08", "ST-09", "ST-10"),
    *("SD-01", "SD-02", "SD-04", "SD-05", "SD-07"),
    *("KV-01", "KV-02", "KV-03", "KV-06", "PF-01", "PF-02", "PF-04", "PF-05"),
    *("SA-01", "SA-03", "SA-04", "SA-05"),
    *("API-01", "API-02", "API-03", "API-05", "API-07", "API-08", "API-10", "API-12", "API-14"),
    *("API-15", "OP-01", "OP-02"),
]


def files_with(case: str) -> Iterator[str]:
    mark = f"def test_{case.lower().replace('-', '_')}_"
    for path in TESTS.rglob("test_*.py"):
        if mark in path.read_text():
            yield str(path.relative_to(TESTS))


def test_every_case_has_a_row() -> None:
    assert sorted(ROWS) == sorted(CORE)


@pytest.mark.parametrize("case", CORE)
def test_the_tests_of_a_case_are_where_its_row_says(case: str) -> None:
    _, _, behaviour, tests, _ = ROWS[case].split("|")
    assert behaviour.strip()
    assert f"`test_{case.lower().replace('-', '_')}_*`" in tests
    named = set(re.findall(r"[\w/]+\.py", tests.replace("`bench/", "")))
    named -= {"soak.py", "overload.py"}
    found = set(files_with(case))
    assert named <= found, f"without a test of {case}: {named - found}"
    assert found - named <= {"process/test_status_page.py"}, f"not in the table: {found - named}"
