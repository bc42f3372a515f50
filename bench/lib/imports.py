"""What ``python -X importtime`` wrote, by package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHOWN = 12
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def by_package(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Own milliseconds and number of modules of each top-level package, the heaviest first.

    Packages beyond the first ``SHOWN`` are summed up as "others"; "total" is of all.
    """
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in lines:
        if found := _LINE.search(line):
            package = found[2].partition(".")[0]
            times[package] = times.get(package, 0.0) + int(found[1]) / 1e3
            counts[package] = counts.get(package, 0) + 1
    order = sorted(times, key=lambda package: -times[package])
    groups = {package: [package] for package in order[:SHOWN]}
    if order[SHOWN:]:
        groups["others"] = order[SHOWN:]
    groups["total"] = order
    return {
        name: {
            "own_ms": round(sum(times[package] for package in packages), 1),
            "modules": sum(counts[package] for package in packages),
        }
        for name, packages in groups.items()
    }
