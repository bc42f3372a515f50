"""The options, the conditions and the tables that scripts share."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lib.stats import compare, is_number

Cell = str | float
MAX_IN_ROW = 6


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--baseline``, which ``write_result`` takes."""
    parser.add_argument("--json", metavar="FILE", help="write everything there; - for stdout")
    parser.add_argument("--baseline", metavar="FILE", help="compare with an earlier --json FILE")


def read_baseline(args: argparse.Namespace) -> dict[str, Any] | None:
    """The earlier result, or None without ``--baseline``. To be called before measuring.

    Raises:
        SystemExit: it cannot be read, or has no medians.
    """
    if not args.baseline:
        return None
    try:
        return dict(json.loads(Path(args.baseline).read_text())["median"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"--baseline {args.baseline}: not a result of this script: {error!r}"
        ) from None


def write_result(
    result: dict[str, Any],
    args: argparse.Namespace,
    baseline: dict[str, Any] | None,
    lines: Iterable[str] = (),
) -> None:
    """Print ``result["median"]`` as a table, then ``lines``; write all of ``result`` to ``--json``.

    With ``--json -`` the table goes to stderr.
    """
    if baseline is None:
        rows = list(grouped(result["median"]))
    else:
        rows = [("", "before", "now", "change"), *compare(baseline, result["median"])]
    write_lines(result, args.json, [*table(rows), *lines])


def write_lines(result: dict[str, Any], json_to: str | None, lines: Iterable[str]) -> None:
    """Print ``lines`` and write ``result`` to the file ``json_to``; "-" is stdout, and the lines
    go to stderr then."""
    for line in lines:
        print(line, file=sys.stderr if json_to == "-" else sys.stdout)
    text = json.dumps(result, indent=1)
    if json_to == "-":
        print(text)
    elif json_to:
        Path(json_to).write_text(text + "\n")


def grouped(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[Cell, ...]]:
    """Rows for nested dictionaries: a few numbers that belong together share a row."""
    for key, value in result.items():
        name = f"{prefix}{key}"
        if not isinstance(value, dict):
            yield name, value
        elif len(value) <= MAX_IN_ROW and all(map(is_number, value.values())):
            yield name, *(f"{inner} {number:,.6g}" for inner, number in value.items())
        else:
            yield from grouped(value, f"{name}.")


def table(rows: Iterable[tuple[Cell, ...]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    cells = [[cell if isinstance(cell, str) else f"{cell:,.6g}" for cell in row] for row in rows]
    columns = itertools.zip_longest(*cells, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in cells
    ]


def conditions() -> dict[str, Any]:
    """What a number is worth little without."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "revision": _revision(),
    }


def _processor() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _revision() -> str | None:
    """The commit of this checkout, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
