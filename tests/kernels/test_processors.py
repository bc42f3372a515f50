"""What a processor reports decides which instructions are used, and the log says which."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, platform, sys
import llvmlite.binding as llvm
import numba
import torch

class Report(dict):
    def flatten(self):
        return ",".join(f"+{name}" for name in self)

class Linux(ctypes.CDLL):
    @staticmethod
    def getauxval(kind):
        assert machine == "aarch64" and kind == 16
        return (linux_says == "asimddp") << 20

machine, linux_says, *features = sys.argv[1:]
platform.machine = lambda: machine
llvm.get_host_cpu_features = lambda: Report.fromkeys(features, True)
ctypes.CDLL = Linux

from trioserve.kernels.cpu import amx, digits, simd
from trioserve.kernels.cpu.runtime import Team

team = Team(1, None, rounded=True)
print(simd.PANEL, amx.PRESENT, digits.PRESENT, team.tiles is None, team.byte_products, team.parts)
print(team.describe())
"""
NEON, NEON_DOTS = ["aarch64", "", "neon"], ["aarch64", "asimddp", "neon"]
AVX2 = ["x86_64", "", "avx2", "fma", "f16c"]
AVX512 = [*AVX2, "avx512f"]
VNNI = [*AVX512, "avx512vnni", "avx512vbmi"]


@pytest.mark.parametrize(
    ("report", "choice", "told"),
    [
        (NEON, "16 False False True False 2", ""),
        (NEON_DOTS, "16 False True True True 2", ", byte products"),
        ([*NEON, "dotprod"], "16 False True True True 2", ", byte products"),
        ([*NEON, *VNNI[2:], "amx-tile", "amx-bf16"], "32 False False True False 2", ", AVX-512"),
        (AVX2, "16 False False True False 2", ""),
        (AVX512, "32 False False True False 2", ", AVX-512"),
        (VNNI, "32 False True True True 2", ", AVX-512, byte products"),
        ([*AVX2, "amx-tile", "amx-bf16"], "16 False False True False 2", ""),
    ],
    ids=[
        *("NEON", "NEON with dot products, says Linux", "the same, says LLVM"),
        *("aarch64 that says more", "AVX2", "AVX-512", "VNNI", "tiles without AVX-512"),
    ],
)
def test_only_what_is_reported_is_used(report: list[str], choice: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *report], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == choice
    assert second.endswith(f"torch's OpenMP{told}")
