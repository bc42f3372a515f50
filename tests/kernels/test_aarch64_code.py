"""The instructions that LLVM makes of the tiles for aarch64, which it can do on any machine.

Whether they compute what they should is seen under emulation: scripts/test-aarch64.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import collections, json, platform, re
import llvmlite.binding as llvm
import numba
from llvmlite import ir

platform.machine = lambda: "aarch64"
numba.config.CPU_FEATURES = "+neon,+dotprod"
from trioserve.kernels.cpu import blocks, digits, simd
from trioserve.kernels.cpu.codes import Q4, Q8

module = ir.Module()
module.triple = "aarch64-linux-gnu"
line = ir.VectorType(simd.F32, simd.PANEL)

def function(name, count, emit):
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64] * count), name)
    builder = ir.IRBuilder(made.append_basic_block())
    emit(builder, *made.args)
    builder.ret_void()

def panel(builder, *args):
    simd._emit_tile(builder, line, 6, 1, False, *args)

def half(builder, *args):
    simd._emit_tile(builder, line, 1, 4, True, *args)

function("panel6", 8, panel)
function("half1", 8, half)
for bits in (Q4, Q8):
    def block(builder, *args):
        blocks._emit_block_tile(builder, line, 4, bits, 8 if bits == Q8 else 4, *args)

    def dots(builder, *args):
        digits._emit_tile(builder, 1, bits, *args)

    function(f"blocks{bits}", 9, block)
    function(f"digits{bits}", 7, dots)
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple(module.triple).create_target_machine(
    cpu="neoverse-n1", features="+dotprod", opt=3
)
code = llvm.parse_assembly(str(module))
passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
passes.getModulePassManager().run(code, passes)
counts, name = {}, ""
for text in machine.emit_assembly(code).splitlines():
    if label := re.match(r"(\\w+):", text):
        name = label[1]
        counts[name] = collections.Counter()
    elif name and (instruction := re.match(r"\\t([a-z]\\w*)", text)):
        counts[name][instruction[1]] += 1
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    """How often each instruction is in each tile, where the machine is said to be aarch64."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("tile", ["panel6", "half1", "blocks4", "blocks8"])
def test_products_are_added_in_one_instruction(counts, tile):
    """Left to itself LLVM multiplies and adds in two, on each processor of this kind."""
    assert counts[tile]["fmla"] >= 16
    assert "fmul" not in counts[tile]


def test_float16_is_widened_by_an_instruction(counts):
    assert counts["half1"]["fcvtl"] > 0
    assert "bl" not in counts["half1"]  # no call


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_multiplied_by_dot_products(counts, bits):
    """32 inputs of 16 outputs, four at a time in four registers, in three digits."""
    assert counts[f"digits{bits}"]["sdot"] == 32 // 4 * 4 * 3
