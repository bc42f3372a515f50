"""What a processor has and what may be used of it decide which instructions are used; the log says
which. Kernels for less than is here run in processes of their own, whose tests are those of all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trioserve.devices import cpu
from trioserve.devices.instructions import LEVELS, limit
from trioserve.errors import ModelError

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


present = cpu.flags()
levels = [name for name, level in LEVELS.items() if present.issuperset(level.needs)]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("report", "choice", "told"),
    [
        (NEON, "16 False False True False 2", ""),
        (NEON_DOTS, "16 False True True True 2", ", byte products"),
        ([*NEON, "dotprod"], "16 False True True True 2", ", byte products"),
        ([*NEON, *VNNI[2:], "amx-tile", "amx-bf16"], "32 False False True False 2", ", AVX-512"),
        (AVX2, "16 False False True False 2", ", word products"),
        (AVX512, "32 False False True False 2", ", AVX-512, word products"),
        (VNNI, "32 False True True True 2", ", AVX-512, byte products, word products"),
        ([*AVX2, "amx-tile", "amx-bf16"], "16 False False True False 2", ", word products"),
    ],
    ids=[
        *("NEON", "NEON with dot products, says Linux", "the same, says LLVM"),
        *("aarch64 that says more", "AVX2", "AVX-512", "VNNI", "tiles without AVX-512"),
    ],
)
def test_only_what_is_reported_is_used(report: list[str], choice: str, told: str) -> None:
    first, second = run("-c", PROGRAM, *report).splitlines()
    assert first == choice
    assert second.endswith(f"torch's OpenMP{told}")


@pytest.mark.skipif("avx512" not in levels, reason="a processor without AVX-512")
def test_what_numba_is_told_by_the_user_is_kept_to():
    """Else code for wide registers would be put together from narrow ones."""
    choice = "from trioserve.kernels.cpu import simd, digits; print(simd.PANEL, digits.PRESENT)"
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,-avx512f"}
    assert run("-c", choice, **told).split() == ["16", "False"]


@pytest.mark.parametrize(
    ("missing", "fits"),
    [("amx_bf16", "vnni or auto"), ("f16c", "auto"), ("avx512f", "avx2 or auto")],
)
def test_more_than_the_processor_has_is_refused(missing, fits):
    has = frozenset(LEVELS["amx"].needs) - {missing}
    environment: dict[str, str] = {}
    with pytest.raises(ModelError, match=rf"no {missing}; set it to {fits}$"):
        limit("amx", has, environment)
    assert environment == {}


def test_auto_limits_nothing():
    environment = {"NUMBA_CPU_NAME": "generic"}
    limit("auto", frozenset(), environment)
    assert environment == {"NUMBA_CPU_NAME": "generic"}


WORKER = """
import sys
from trioserve.config.schema import Config, KernelsConfig
from trioserve.devices.cpu import detect, prepare_environment

config = Config(kernels=KernelsConfig(instructions=sys.argv[1]))
prepare_environment(config)
import torch
from trioserve.kernels.cpu import amx, digits, simd, words

print(torch.backends.cpu.get_cpu_capability(), simd.PANEL, amx.PRESENT, digits.PRESENT)
print(detect(config).describe())
"""


@pytest.mark.skipif("avx2" not in levels, reason="a processor without AVX2")
def test_a_worker_keeps_to_what_it_is_told():
    used, told = run("-c", WORKER, "avx2").splitlines()
    assert used == "AVX2 16 False False"
    assert "(avx2 fma f16c; no more by [kernels] instructions)" in told


@pytest.mark.parametrize("level", [name for name in levels[:-1] if name in ("avx2", "avx512")])
def test_kernels_of_less_than_is_here_are_right_too(level):
    """Products, and layers with their attention, few rows and many, against float64."""
    environment: dict[str, str] = {}
    limit(level, present, environment)
    here = Path(__file__).parent
    names = ("test_product_equals_float64", "test_layers_of_mixed_kinds_equal_float64")
    tests = [f"{here}/test_blocks.py::{name}[2 threads]" for name in names]
    options = ("-q", "-p", "no:cacheprovider")
    said = run("-m", "pytest", *options, *tests, f"{here}/test_words.py", **environment)
    assert " passed" in said
    assert "skipped" not in said
