"""The scripts of bench/ that measure steps without HTTP, on a model with hardly any weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_bench import BENCH
from .test_bench_scripts import call

sys.path.insert(0, str(BENCH))
try:
    import roofline
    from lib import machine, step_loop
finally:
    sys.path.remove(str(BENCH))

FLAGS = machine.processor_flags()
TINY = "random:llama?num_layers=2&hidden_size=64&max_position=1024"
SHORT = (
    *("--source", TINY, "--seconds", "0.01", "--threads", "1", "--memory", "0.1"),
    *("--streams", "2", "--contexts", "32,9999", "--copied-bytes", "400000", "--side", "32"),
)


@pytest.mark.parametrize("kernels", [(), ("--attention", "torch", "--weights", "fp32")])
def test_a_step_is_told_by_its_parts(kernels: tuple[str, ...]) -> None:
    code, result, err = call("step", *SHORT, *kernels, timeout_s=240)
    assert code == 0, err
    lines = {line["case"]: line for line in result["results"]}
    longest = 1024 - step_loop.ROOM - 2
    assert list(lines) == [
        "decode 2 at 32",
        f"decode 2 at {longest}",
        "prefill 128",
        "prefill 4 x 128",
        "prefill 512",
        "decode 31 at 128 + prefill 256",
    ]
    for line in lines.values():
        parts = {name: line["ms"][name] for name in step_loop.PARTS}
        assert sum(parts.values()) == pytest.approx(line["ms"]["total"], abs=0.01)
        assert all(parts[name] > 0 for name in ("schedule", "inputs", "rest", "sample", "emit"))
        assert line["steps"] >= 3
    assert lines["decode 31 at 128 + prefill 256"]["new_tokens"] == 31 + 256
    read = [lines[f"decode 2 at {context}"]["kv_mb"] for context in (32, longest)]
    bytes_per_token = result["model"]["kv_bytes_per_token"]
    for context, found in zip((32, longest), read, strict=True):
        tokens = found * 1e6 / bytes_per_token / 2
        assert context < tokens <= context + step_loop.ROOM
    figures = result["machine"]
    assert all(figures[name] >= 0 for name in ("read_gb_per_s", "copy_gb_per_s", "fp32_gflops"))
    for kind, figure in (("bf16", "bf16_gflops"), ("int8", "int8_gops")):
        assert (figures[figure] is not None) == bool(machine.PRODUCTS[kind] & FLAGS)
    assert "decode 2 at 32" in err


def test_contexts_are_cut_to_the_memory_that_is_allowed() -> None:
    short = [*SHORT, "--no-prefill", "--memory", "0.0005"]
    code, result, err = call("step", *short, timeout_s=120)
    assert code == 0, err
    context = max(line["context"] for line in result["results"])
    assert 32 < context < 300
    needed = 2 * (context + step_loop.ROOM) * result["model"]["kv_bytes_per_token"]
    assert needed < 0.0005 * 2**30


def test_the_shares_of_two_parts_and_the_rest_make_the_whole() -> None:
    whole, products, attention, neither = 10.0, 4.0, 8.5, 3.0
    taken = step_loop.shares(
        dict(zip(step_loop.VARIANTS, (whole, products, attention, neither), strict=True))
    )
    assert taken == {"products": 5.75, "attention": 1.25}
    assert sum(taken.values()) + neither == whole


def test_a_typical_step_is_one_of_the_middle() -> None:
    steps = [{"total": total, "sample": total / 2} for total in (9.0, 1.0, 4.0, 3.0)]
    assert step_loop.typical(steps) == {"total": 3.5, "sample": 1.75}
    assert step_loop.typical(steps[:1]) == steps[0]


MACHINE = {"read_gb_per_s": 20.0, "copy_gb_per_s": 16.0, "fp32_gflops": 200.0, "int8_gops": None}
MODEL = {
    "product_bytes": 100e6,
    "layer_weights": 90e6,
    "head_weights": 10e6,
    "kv_bytes_per_token": 1000,
    "attention_width": 512,
    "num_layers": 2,
}


def line_of(**changes: Any) -> dict[str, Any]:
    line = {"case": "x", "streams": 0, "prompts": 0, "prompt_tokens": 0, "new_tokens": 0}
    return line | {"ms": {"total": 10.0, "products": 8.0, "attention": 0.0}} | changes


def test_decode_is_beside_what_memory_allows() -> None:
    measured = {
        "machine": MACHINE | {"bf16_gflops": None},
        "model": MODEL,
        "results": [line_of(streams=1, new_tokens=1, kv_mb=20.0)],
    }
    whole, products = roofline.roofline(measured)
    assert whole["gb_per_s"] == 12.0  # 120 MB in 10 ms
    assert whole["share_of_read"] == 0.6
    assert whole["least_ms"] == 6.0
    assert whole["share_of_bf16"] is None
    assert products["gb_per_s"] == 12.5
    assert products["gflops"] == 25.0  # twice 100 million in 8 ms
    assert products["share_of_fp32"] == 0.12


def test_prefill_is_beside_what_arithmetic_allows() -> None:
    measured = {
        "machine": MACHINE | {"bf16_gflops": 800.0},
        "model": MODEL,
        "results": [line_of(prompts=2, prompt_tokens=100, new_tokens=200)],
    }
    whole, products = roofline.roofline(measured)
    flops = 2 * (200 * 90e6 + 2 * 10e6) + 4 * 2 * (100 * 101 / 2) * 512 * 2
    assert whole["gflops"] == pytest.approx(flops / 10e-3 / 1e9, abs=0.05)
    assert whole["least_ms"] == pytest.approx(flops / 800e9 * 1e3, abs=0.001)
    assert products["share_of_bf16"] == pytest.approx(36.04e9 / 8e-3 / 800e9, abs=0.01)


def test_the_roofline_is_made_of_steps_measured_before(tmp_path: Path) -> None:
    told = MACHINE | {"bf16_gflops": None}
    lines = [line_of(case="decode 2 at 32", streams=2, new_tokens=2, kv_mb=1.0)]
    measured = {"conditions": {}, "machine": told, "model": MODEL, "results": lines}
    file = tmp_path / "step.json"
    file.write_text(json.dumps(measured))
    code, result, err = call("roofline", "--step", str(file))
    assert code == 0, err
    assert result["results"][0]["figure"] == "decode 2 at 32"
    assert "share_of_read" in err


def test_of_two_measurements_the_better_figures_count() -> None:
    figures = {"read_gb_per_s": 20.0, "copy_gb_per_s": 10.0, "fp32_gflops": 5.0}
    one = machine.Machine(**figures, bf16_gflops=None, int8_gops=7.0)
    other = machine.Machine(**figures | {"copy_gb_per_s": 12.0}, bf16_gflops=None, int8_gops=6.0)
    both = machine.Machine(**figures | {"copy_gb_per_s": 12.0}, bf16_gflops=None, int8_gops=7.0)
    assert one.or_better(other) == other.or_better(one) == both
