"""What is done to rows of float32 one by one between the products: embedding, norm, positions.

Addresses are plain integers, see ``simd``. What a row gets depends on that row alone, to the bit.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import simd
from trioserve.kernels.cpu.runtime import FASTMATH


@intrinsic
def _half(typing_context, address, index):
    """The float16 at ``address`` + 2 * ``index`` as float32."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.HalfType().as_pointer())
        value = builder.load(builder.gep(pointer, [args[1]]), align=2)
        return builder.fpext(value, simd.F32)

    return types.float32(types.intp, types.intp), codegen


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def embed(table, is_half, row, width, target):
    """Row ``row`` of a table [.., width] of float16 or float32 to float32 [width]."""
    out = numba.carray(simd.floats(target), width)
    if is_half != 0:
        source = table + row * width * 2
        for j in range(width):
            out[j] = _half(source, j)
    else:
        line = numba.carray(simd.floats(table + row * width * 4), width)
        for j in range(width):
            out[j] = line[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def copy(source, target, width):
    """Float32 [width]."""
    line, out = numba.carray(simd.floats(source), width), numba.carray(simd.floats(target), width)
    for j in range(width):
        out[j] = line[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _sum_of_squares(x, width):
    total = np.float32(0.0)
    for j in range(width):
        total += x[j] * x[j]
    return total


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def rms_norm(x, weight, eps, width, out, first, last):
    """``x / sqrt(mean(x²) + eps) * weight`` for rows [first, last) of [rows, width]."""
    factors = numba.carray(simd.floats(weight), width)
    for row in range(first, last):
        line = numba.carray(simd.floats(x + row * width * 4), width)
        target = numba.carray(simd.floats(out + row * width * 4), width)
        mean = _sum_of_squares(line, width) / width
        factor = np.float32(1.0 / math.sqrt(mean + eps))
        for j in range(width):
            target[j] = line[j] * factor * factors[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def rotate(heads, num_heads, dim, turn):
    """Turn one token's heads, float32 [num_heads, dim], pair by pair, by unit complex numbers."""
    factors = numba.carray(simd.floats(turn), dim)
    for head in range(num_heads):
        x = numba.carray(simd.floats(heads + head * dim * 4), dim)
        for i in range(dim // 2):
            real, imaginary = x[2 * i], x[2 * i + 1]
            x[2 * i] = real * factors[2 * i] - imaginary * factors[2 * i + 1]
            x[2 * i + 1] = real * factors[2 * i + 1] + imaginary * factors[2 * i]
