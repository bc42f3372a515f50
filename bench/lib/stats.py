"""Percentiles, medians over repeated runs, and the comparison of two results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values, or ``share`` is out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, median, p90 and p99 in milliseconds, and how many there were; None for no values."""
    values = [value * 1e3 for value in seconds]
    if not values:
        return None
    return {
        "mean": round(statistics.fmean(values), 3),
        "median": round(percentile(values, 0.5), 3),
        "p90": round(percentile(values, 0.9), 3),
        "p99": round(percentile(values, 0.99), 3),
        "count": len(values),
    }


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of the shape of ``runs``: the median of each number, over the runs that have it.

    What is no number is left out, and so is a branch that no run has a number in.
    """
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if run.get(key) is not None]
        if values and all(isinstance(value, dict) for value in values):
            if branch := median_of(values):
                result[key] = branch
        elif values and all(is_number(value) for value in values):
            result[key] = statistics.median(values)
    return result


def is_number(value: object) -> bool:
    """Whether it is one, true and false not being numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of nested dictionaries with their dotted names."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif is_number(value):
            yield f"{prefix}{key}", value


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """Name, both values and the change of every number that both have, in the order of ``now``."""
    old = dict(flatten(before))
    rows = []
    for name, value in flatten(now):
        if name in old:
            change = f"{(value / old[name] - 1) * 100:+.1f} %" if old[name] else "-"
            rows.append((name, old[name], value, change))
    return rows


def slope(points: list[tuple[float, float]]) -> float:
    """Change of y per x: the median over pairs of points a fifth of them apart; 0 for one point.

    A jump or two, as when an allocator takes a new arena, lie between too few pairs to count; a
    steady growth lies between all. Points are in the order of x, which differ.
    """
    lag = max(1, len(points) // 5)
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in zip(points[:-lag], points[lag:], strict=True)
    ]
    return statistics.median(slopes) if slopes else 0.0
