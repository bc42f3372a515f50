"""docs/grafana/trioserve.json asks for series that exist, in a way that suits their type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .test_metrics_format import all_metrics, documented

PATH = Path(__file__).parents[2] / "docs/grafana/trioserve.json"
PREFIX = re.compile(r"\btrioserve_[a-zA-Z0-9_:]+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "info": ("",), "counter": ("",)}


def dashboard() -> Any:
    return json.loads(PATH.read_text())


def panels() -> Iterator[Any]:
    return (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    variables = dashboard()["templating"]["list"]
    return found + [v["definition"] for v in variables if v["type"] == "query"]


def sample_types() -> dict[str, str]:
    """Names of samples as PromQL knows them, to the type of their series."""
    return {
        name + suffix: kind
        for name, (kind, _) in documented().items()
        for suffix in SUFFIXES.get(kind, ("",))
    }


async def test_every_expression_names_only_series_that_exist() -> None:
    asked = {name for expression in expressions() for name in PREFIX.findall(expression)}
    scraped = {s.name for family in all_metrics().registry.collect() for s in family.samples}
    assert len(asked) > 40
    assert asked <= scraped
    assert asked <= sample_types().keys()


def test_counters_are_asked_for_their_growth_and_gauges_are_not() -> None:
    types = sample_types()
    for expression in expressions():
        for name in PREFIX.findall(expression):
            grows = types[name] in ("counter", "histogram")
            before = expression[: expression.index(name)]
            assert before.endswith(("rate(", "increase(")) is grows, expression


def test_labels_are_those_the_series_have() -> None:
    labels = {name: set(of) | {"instance", "le"} for name, (_, of) in documented().items()}
    for expression in expressions():
        for name, selector in re.findall(r"\b(trioserve_\w+)\{([^}]*)\}", expression):
            series = next(n for n in labels if name in (n, *(n + s for s in SUFFIXES["histogram"])))
            assert set(re.findall(r"(\w+)[!=]~?=?\"", selector)) <= labels[series], expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            known = set().union(*(labels[n] for n in labels))
            assert {label.strip() for label in by.split(",")} <= known


def test_it_can_be_imported_anywhere() -> None:
    board = dashboard()
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"], panel["title"]
        assert "unit" in panel["fieldConfig"]["defaults"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert "$instance" in target["expr"]
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Tokens", "Cache", "Scheduler", "Health"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
