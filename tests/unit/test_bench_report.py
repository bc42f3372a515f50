"""The script of bench/ that runs all others, and the tables that it makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_bench import BENCH

sys.path.insert(0, str(BENCH))
try:
    import report
    from lib import proc, report_tables
finally:
    sys.path.remove(str(BENCH))

MODEL = "random:llama?num_layers=1&hidden_size=32&max_position=8192"
RUN = ("--set", f"model.source={MODEL}", "--set", "device.kind=simulated")
PARTS = {"schedule": 0.1, "inputs": 0.3, "rest": 1.0, "sample": 0.4, "emit": 0.1}


def report_of(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(BENCH / "report.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_short_report_measures_and_can_be_printed_again(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    code, text, err = report_of(
        *("--short", "--only", "memory,soak", "--out", str(out), "--", *RUN)
    )
    found = json.loads(out.read_text())
    assert set(found["sections"]) == {"memory", "soak"}
    assert (code, found["failures"]) == (0, {}), err
    assert found["conditions"]["processors"] > 0
    assert set(found["others_share"]) == set(found["took_s"]) == {"memory", "soak"}
    filled = found["sections"]["memory"]["filled"]["median"]
    assert filled["server"]["worker_memory"]["cache_mib"] == report.CACHE_MIB
    assert "| worker's memory beyond weights and cache, MB | ≤ 450 | -" in text
    assert "| command to ready, page cache warm, s | ≤ 3.0 | - |" in text
    assert "Memory over many requests:" in text
    assert "soak: " in err
    assert report_of("--render", str(out)) == (0, text, "")


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    code, text, _ = report_of(
        *("--short", "--only", "startup,memory", "--out", str(out)),
        *("--", "--model", "nowhere/at/all", "--device", "simulated"),
    )
    assert code == 1
    assert set(json.loads(out.read_text())["failures"]) == {"startup", "memory"}
    assert "NOT MEASURED: startup: startup, status 1" in text
    assert "NOT MEASURED: memory: " in text


def test_failed_requests_are_a_failure_of_their_load() -> None:
    loads = {"a": {"failures": {}}, "b": {"failures": {"timeout": 2}}, "c": {"failed": "gone"}}
    assert report.faults_of_loads("server", loads) == {
        "server: b": 'requests failed: {"timeout": 2}',
        "server: c": "gone",
    }


def test_only_takes_names_of_sections_in_any_order() -> None:
    assert report.sections("soak,startup") == ["startup", "soak"]
    code, _, err = report_of("--only", "startup,sock")
    assert code == 2
    assert "no sock; there are startup, server" in err


def test_others_use_what_is_neither_idle_nor_ours() -> None:
    assert proc.foreign_share((100.0, 10.0, 5.0), (120.0, 20.0, 9.0)) == pytest.approx(0.3)
    assert proc.foreign_share((100.0, 10.0, 5.0), (120.0, 12.0, 9.0)) == 0
    assert proc.foreign_share((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) == 0
    whole, used, own = proc.processor_times()
    assert whole > used > 0
    assert own > 0


# ------------------------------------------------------------------------------- the tables


def ms(median: float) -> dict[str, float]:
    return {"median": median, "p90": 2 * median, "p99": 3 * median}


def load(**changes: Any) -> dict[str, Any]:
    settings = {"rate": None, "concurrency": 1, "prompt_tokens": 128, "max_tokens": 64}
    median = {"output_tokens_per_s": 100.0, "requests_per_s": 1.5, "ttft_ms": ms(100.0)}
    return {"settings": settings, "median": median | changes}


def step(case: str, streams: int, context: int, total: float, kv_mb: float) -> dict[str, Any]:
    attention = total - 10 - sum(PARTS.values())
    times = {"total": total, "products": 10.0, "attention": attention, **PARTS}
    line = {"case": case, "streams": streams, "context": context, "ms": times, "kv_mb": kv_mb}
    return line | {"tokens_per_s": 1e3 * streams / total}


SECTIONS = {
    "startup": {"median": {"warm": {"ready_s": 2.5}}},
    "server": {
        "decode": load(tpot_ms=ms(8.0)),
        "prefill": load(prompt_tokens=9 * 1024, completed=9, ttft_ms=ms(1024.0)),
        "full": load(output_tokens_per_s=301.0, itl_ms=ms(50.0)),
        "prefix": load(prefix={"ratio": 0.08}),
        "idle": load(idle={"slower_ms": 1.25}),
    },
    "memory": {"filled": {"median": {"server": {"worker_memory": {"beyond_mib": 300.0}}}}},
    "step": {
        "machine": {"copy_gb_per_s": 20.0},
        "results": [
            step("decode 1 at 128", 1, 128, 12.4, 8.0),
            step("decode 1 at 7950", 1, 7950, 48.4, 368.0),
            step("decode 32 at 128", 32, 128, 50.0, 200.0),
        ],
    },
}


def test_the_targets_are_found_in_what_was_measured() -> None:
    found = {what: value for what, _, value in report_tables.targets(SECTIONS)[1:]}
    assert list(found.values()) == [
        2.5,
        125.0,
        pytest.approx(1000.0),
        301.0,
        640.0,
        8.0,
        "1.90 (with attention 2.40), 1.90 (with attention 40.00)",
        "36.0 ms more at 7,950 than at 128: 10.0 GB/s, 0.50 of a copy's 20.0",
        pytest.approx(314.57, abs=0.01),
        150.0,
        1.25,
    ]


def test_the_targets_with_avx2_alone_are_those_that_were_measured_so() -> None:
    step = SECTIONS["step"] | {"results": SECTIONS["step"]["results"][::2]}
    server = {name: SECTIONS["server"][name] for name in report.AVX2_LOADS}
    section = {"startup": SECTIONS["startup"], "step": step, **server}
    found = [row[-1] for row in report_tables.with_avx2({"avx2": section})]
    beyond = "1.90 (with attention 2.40), 1.90 (with attention 40.00)"
    assert found == ["found", 2.5, 125.0, pytest.approx(1000.0), 301.0, 640.0, beyond, 150.0]
    title, rows = next(iter(report_tables.tables({"avx2": section})))
    assert "avx2" in title
    assert len(rows) == len(found)


def test_one_context_tells_nothing_of_longer_ones() -> None:
    step = SECTIONS["step"] | {"results": SECTIONS["step"]["results"][:1]}
    found = {what: value for what, _, value in report_tables.targets({"step": step})[1:]}
    assert found["context of 8 K against 128"] == "-"
    assert found["decode alone at 32 rows, tokens/s"] is None


def test_figures_that_were_not_measured_are_dashes() -> None:
    rows = report_tables.targets({"startup": SECTIONS["startup"]})[1:]
    assert [value for _, _, value in rows] == [2.5, *[None] * 10]
    lines = report_tables.as_markdown([("what", "found"), ("a", None), ("b", 1234.5), ("c", 0.125)])
    assert lines == [
        "| what | found |",
        "| --- | --- |",
        "| a | - |",
        "| b | 1,234 |",
        "| c | 0.125 |",
    ]


def test_a_comparison_has_a_ratio_for_each_other_engine() -> None:
    figures = dict.fromkeys(report_tables.COMPARED, 100.0)
    other = dict.fromkeys(report_tables.COMPARED, 80.0)
    compare = {"median": {"trioserve": figures, "x": other}, "ready_s": {"trioserve": 2.0, "x": 4}}
    head, first, *_, last = report_tables.compared({"compare": compare})
    assert head == ("figure", "trioserve", "x", "ratio")
    assert first[1:] == (100.0, 80.0, "1.25")
    assert last == ("seconds until ready", 2.0, 4, None)
