"""``/metrics`` read by the parsers of ``prometheus-client``, both formats."""

from __future__ import annotations

import math
from typing import Any

import httpx
from checks import TIMEOUT_S, Table, Target, equal

PACKAGES = ("prometheus-client",)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def run(target: Target, table: Table) -> None:
    from prometheus_client.openmetrics.parser import (
        text_string_to_metric_families as openmetrics,
    )
    from prometheus_client.parser import text_string_to_metric_families as text

    with table.check("text format: every family has help and a type"):
        families = list(text(read(target, "text/plain")))
        names = {family.name for family in families}
        assert "trioserve_requests_running" in names, names
        for family in families:
            assert family.documentation, family.name
            assert family.type != "unknown", family.name
    with table.check("histograms: buckets grow, the last is the count"):
        histograms = [family for family in families if family.type == "histogram"]
        assert len(histograms) >= 5
        for family in histograms:
            check_histogram(family)
    with table.check("OpenMetrics: the same families"):
        other = list(openmetrics(read(target, OPENMETRICS)))
        equal(sample_names(other), sample_names(families))
    with table.check("counters count a request and its tokens"):
        before = counters(text(read(target, "text/plain")))
        answer = httpx.post(
            f"{target.v1}/completions",
            json={"model": target.model, "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True},
            headers=target.headers,
            timeout=TIMEOUT_S,
        )
        assert answer.is_success
        after = counters(text(read(target, "text/plain")))
        for name, by in {"generation_tokens": 3, "prompt_tokens": 2}.items():
            name = f"trioserve_{name}_total"
            equal(after[name] - before[name], by)


def read(target: Target, accept: str) -> str:
    answer = httpx.get(
        f"{target.url}/metrics", headers=target.headers | {"Accept": accept}, timeout=TIMEOUT_S
    )
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    return answer.text


def sample_names(families: Any) -> set[str]:
    """Those of OpenMetrics without ``_created``; families of infos have other names there."""
    samples = [sample for family in families for sample in family.samples]
    return {sample.name for sample in samples if not sample.name.endswith("_created")}


def counters(families: Any) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in families
        if family.type == "counter"
        for sample in family.samples
        if not sample.labels
    }


def check_histogram(family: Any) -> None:
    series: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    counts: dict[tuple[Any, ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
        if sample.name.endswith("_bucket"):
            series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[labels] = sample.value
    for labels, buckets in series.items():
        assert buckets == sorted(buckets), family.name
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert math.isinf(buckets[-1][0])
        equal(buckets[-1][1], counts[labels])
