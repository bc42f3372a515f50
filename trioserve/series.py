"""Counters and histograms that cost next to nothing to write.

For one writer thread: no locks, no labels, no registry. ``trioserve.http.metrics`` makes Prometheus
families of them at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Counter:
    """A total that only grows, or, with ``dec``, a level."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``."""
        self.value += amount

    def dec(self) -> None:
        """Take one away: for levels only."""
        self.value -= 1


class Histogram:
    """Counts of values by upper bound.

    Attributes:
        bounds: upper bounds, ascending; what lies above the last is counted too.
        counts: for each bound, and for what lies above, the values not counted by a lower one.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds as text, each with the number of values up to it."""
        names = (*map(_bound_text, self.bounds), "+Inf")
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


def _bound_text(bound: float) -> str:
    """As Prometheus writes a bound: always a float, never with an exponent for those in use."""
    return str(float(bound))
