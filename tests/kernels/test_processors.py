"""What other processors report decides which code is made: nothing that they do not have."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import platform, sys
import llvmlite.binding as llvm

machine, *features = sys.argv[1:]
platform.machine = lambda: machine
llvm.get_host_cpu_features = lambda: dict.fromkeys(features, True)

import numpy as np
import torch
from trioserve.kernels.cpu import amx, digits, simd
from trioserve.kernels.cpu.codes import quantize_q8, Q4, Blocks
from trioserve.kernels.cpu.paged_attention import PagedAttention
from trioserve.kernels.cpu.panel_product import PanelProduct, Panels
from trioserve.kernels.cpu.runtime import Team

team = Team(1, None, rounded=True)
product = PanelProduct(team)
attention = PagedAttention(team, kv_heads=1, group=3, head_dim=64, block_size=16)
attention.compile()
for kernel in (product._kernel, attention._attend):
    code = kernel._compiled.inspect_llvm()
    print("llvm.x86" in code, end=" ")
weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
codes = torch.randint(0, 16, (70, 96), dtype=torch.uint8)
four = Blocks(Q4, codes, torch.full((70, 3), 0.5).half(), torch.full((70, 3), -4.0).half())
eight = quantize_q8(weight)
for panels, plain in (
    (Panels.half(weight), weight.half().float()),
    (Panels.of_blocks(eight), eight.dequantized()),
    (Panels.of_blocks(four), four.dequantized()),
):
    for rows in (1, 20):
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(product(x, panels), x @ plain.T, atol=1e-3, rtol=1e-4)
print(simd.PANEL, amx.PRESENT, digits.PRESENT, team.parts, team.describe().split(", ", 3)[3])
"""


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (["aarch64", "neon", "fullfp16"], "16 False False 2 torch's OpenMP"),
        (["x86_64", "avx2", "fma", "f16c"], "16 False False 2 torch's OpenMP"),
        (["x86_64", "avx2", "fma", "f16c", "avx512f"], "32 False False 2 torch's OpenMP, AVX-512"),
    ],
    ids=["aarch64", "AVX2", "AVX-512"],
)
def test_nothing_is_made_that_the_processor_lacks(report: list[str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *report], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"False False {expected}"
