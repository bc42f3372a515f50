"""silu(gate) * up on whole vectors.

A loop that LLVM makes into vectors by itself takes twice as long (measured): it divides, and its
vectors are half as wide.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import simd

LANES = 32 if simd.AVX512 else 16
_LINE, _WORDS = ir.VectorType(simd.F32, LANES), ir.VectorType(simd.I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_HALF = ir.VectorType(simd.F32, 16)

# exp(f) on [-ln(2)/2, ln(2)/2]: least squares with weights that even out the relative error, 2e-9.
_TERMS = (
    *(0.0013836835319117223, 0.008374824055051506, 0.041668226196890486),
    *(0.1666642007205173, 0.49999992075054994, 1.0000000363447357, 1.0000000005546097),
)
_ROUND = 12582912.0  # 1.5 * 2^23: added, it leaves the nearest whole number in the low bits
_MOST = 87.0  # exp of it, and the inverse, are still normal numbers


def reference(gate, up):
    """float64; gate / (1 + exp(-gate)) * up."""
    gate = gate.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up


def _filled(value):
    return ir.Constant(_LINE, [value] * LANES)


def _exp(builder, x):
    """exp of float32 vectors between -_MOST and _MOST."""
    shifted = simd.fused(builder, x, _filled(1.4426950408889634), _filled(_ROUND))
    whole = builder.fsub(shifted, _filled(_ROUND))
    rest = simd.fused(builder, whole, _filled(-0.693145751953125), x)
    rest = simd.fused(builder, whole, _filled(-1.428606765330187e-06), rest)
    value = _filled(_TERMS[0])
    for term in _TERMS[1:]:
        value = simd.fused(builder, value, rest, _filled(term))
    power = builder.shl(builder.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(value, _WORDS), power), _LINE)


def _inverse(builder, x):
    """1 / x to about 1 ulp, for x from 1 to exp(_MOST)."""
    if not simd.AVX512:
        return builder.fdiv(_filled(1.0), x)
    mask, nothing = ir.Constant(ir.IntType(16), -1), ir.Constant(_HALF, [0.0] * 16)
    halves = []
    for first in (0, 16):
        lanes = ir.Constant(ir.VectorType(simd.I32, 16), list(range(first, first + 16)))
        half = builder.shuffle_vector(x, x, lanes)
        halves.append(
            simd.call(builder, "llvm.x86.avx512.rcp14.ps.512", _HALF, half, nothing, mask)
        )
    guess = builder.shuffle_vector(*halves, ir.Constant(_WORDS, list(range(LANES))))
    missing = simd.fused(builder, builder.fneg(x), guess, _filled(1.0))
    return simd.fused(builder, missing, guess, guess)


def _emit(builder, gate, up):
    low, high = _filled(-_MOST), _filled(_MOST)
    x = builder.fneg(gate)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)  # NaN becomes low, and comes back
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    sigmoid = _inverse(builder, builder.fadd(_exp(builder, x), _filled(1.0)))
    return builder.fmul(builder.fmul(gate, sigmoid), up)


@intrinsic
def silu_mul(typing_context, gate, up, out, count):
    """out = silu(gate) * up for ``count`` float32 values; addresses of all. To about 3 ulp, and
    to the bit the same whatever stands beside a value. NaN and infinities do not vanish."""

    def codegen(context, builder, signature, args):
        gate, up, out, count = args
        index = simd._index

        def pointer(base, at):
            address = builder.add(base, builder.mul(at, index(4)))
            return builder.inttoptr(address, _LINE.as_pointer())

        def whole(at, nothing):
            values = [builder.load(pointer(base, at), align=4) for base in (gate, up)]
            builder.store(_emit(builder, *values), pointer(out, at), align=4)
            return []

        end = builder.and_(count, index(-LANES))
        simd._emit_loop(builder, index(0), end, LANES, [], whole)
        with builder.if_then(builder.icmp_signed("<", end, count)):
            left = builder.trunc(builder.sub(count, end), simd.I32)
            numbers = ir.Constant(_WORDS, list(range(LANES)))
            mask = builder.icmp_signed("<", numbers, simd._splat(builder, left, _WORDS))
            four, name = ir.Constant(simd.I32, 4), f"v{LANES}f32.p0"
            values = [
                simd.call(
                    builder,
                    f"llvm.masked.load.{name}",
                    _LINE,
                    pointer(base, end),
                    four,
                    mask,
                    _filled(0.0),
                )
                for base in (gate, up)
            ]
            value = _emit(builder, *values)
            nothing = ir.VoidType()
            simd.call(
                builder, f"llvm.masked.store.{name}", nothing, value, pointer(out, end), four, mask
            )
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen
