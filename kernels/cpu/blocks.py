"""Weights in blocks of 32 inputs that share a scale: 8-bit codes, or 4-bit codes and a minimum.

A code stands for ``scale * code`` (``Q8``, int8) or ``scale * code + minimum`` (``Q4``, 0 to 15),
as in GGUF, whose blocks are taken over as they are. The weight [out, in] lies in panels of PANEL
outputs; a panel is one line of blocks after the other, with all that is needed of it side by side:

* Q8: scales float16 [PANEL], codes int8 [32, PANEL]
* Q4: scales float16 [PANEL], minima float16 [PANEL], codes uint8 [16, PANEL]; the low nibble of
  line i is for input i of the block, the high one for input i + 16

So at one row the memory is read once from front to back. Sums are float32, one of each block and
then one of all blocks; nothing is computed in fewer bits.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from trioserve.kernels.cpu import simd
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8, Blocks
from trioserve.kernels.cpu.runtime import FASTMATH

PANEL = simd.PANEL
HALF = 0  # no codes: float16
LINE_BYTES = {Q8: PANEL * (2 + BLOCK), Q4: PANEL * (4 + BLOCK // 2)}
Q8_BYTES, Q4_BYTES = LINE_BYTES[Q8], LINE_BYTES[Q4]
_I8 = ir.IntType(8)


def pack(weight: Blocks) -> Tensor:
    """Codes [out, in] to panels, uint8 [panels, in / 32, LINE_BYTES[bits]]."""
    outputs, inputs = weight.shape
    lines, panels = inputs // BLOCK, -(-outputs // PANEL)
    parts = [(weight.scales, 1)]
    if weight.minima is None:
        parts.append((weight.codes, BLOCK))
    else:
        halves = weight.codes.view(outputs, lines, 2, BLOCK // 2)
        nibbles = halves[:, :, 0] | (halves[:, :, 1] << 4)
        parts += [(weight.minima, 1), (nibbles.flatten(1), BLOCK // 2)]
    packed = torch.empty(panels, lines, LINE_BYTES[weight.bits], dtype=torch.uint8)
    first = 0
    for values, width in parts:  # [out, lines * width] to [panels, lines, width, PANEL]
        if outputs % PANEL:
            whole = values.new_zeros(panels * PANEL, values.shape[1])
            whole[:outputs] = values
            values = whole
        last = first + width * PANEL * values.itemsize
        target = packed[:, :, first:last].view(values.dtype).unflatten(-1, (width, PANEL))
        target.copy_(values.view(panels, PANEL, lines, width).permute(0, 2, 3, 1))
        first = last
    return packed


def _block_tile(rows: int, bits: int, unroll: int):
    """An intrinsic: C[rows, PANEL] (+)= A[rows, 32 * lines] · (one panel of block lines).

    Arguments: address of A and its row stride in elements, address of the panel, the same for C,
    number of lines, address of the sums of A's blocks and its row stride in elements (with Q4),
    and whether to add to C.
    """
    vector = ir.VectorType(simd.F32, PANEL)

    @intrinsic
    def tile(typing_context, a, lda, b, c, ldc, lines, block_sums, ldsums, accumulate):
        def codegen(context, builder, signature, args):
            _emit_block_tile(builder, vector, rows, bits, unroll, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return tile


def _emit_block_tile(
    builder, vector, rows, bits, unroll, a, lda, b, c, ldc, lines, block_sums, ldsums, accumulate
):
    index = simd._index
    lda, ldc, ldsums = (builder.mul(stride, index(4)) for stride in (lda, ldc, ldsums))
    zeros = ir.Constant(vector, [0.0] * vector.count)
    head = PANEL * (2 if bits == Q8 else 4)

    def block(line, totals):
        base = builder.add(b, builder.mul(line, index(LINE_BYTES[bits])))
        if rows == 1:
            for offset in range(0, LINE_BYTES[bits], 64):
                simd.prefetch(builder, builder.add(base, index(simd.AHEAD + offset)))
        codes = builder.add(base, index(head))
        x = builder.add(a, builder.mul(line, index(BLOCK * 4)))

        def steps(at, sums):
            results = list(sums)
            for step in range(unroll):
                column = builder.add(at, index(step))
                code_line = builder.add(codes, builder.mul(column, index(PANEL)))
                for half, values in enumerate(load_codes(builder, code_line, bits)):
                    for row in range(rows):
                        factor = builder.add(x, builder.mul(lda, index(row)))
                        factor = builder.add(factor, builder.mul(column, index(4)))
                        factor = builder.add(factor, index(half * BLOCK // 2 * 4))
                        factor = builder.load(builder.inttoptr(factor, _F32P), align=4)
                        factor = simd._splat(builder, factor, vector)
                        slot = ((step + half) % sets) * rows + row
                        results[slot] = simd.multiply_add(builder, factor, values, results[slot])
            return results

        sets = 4 if rows == 1 else 2 if rows <= 3 else 1
        count = BLOCK if bits == Q8 else BLOCK // 2
        sums = simd._emit_loop(
            builder, index(0), index(count), unroll, [zeros] * (rows * sets), steps
        )
        while len(sums) > rows:
            middle = len(sums) // 2
            sums = [builder.fadd(p, q) for p, q in zip(sums[:middle], sums[middle:], strict=True)]
        scale = simd._load_line(builder, base, vector, True)
        minimum = None
        if bits == Q4:
            minimum = simd._load_line(builder, builder.add(base, index(PANEL * 2)), vector, True)
        results = []
        for row, (total, one) in enumerate(zip(totals, sums, strict=True)):
            total = simd.multiply_add(builder, one, scale, total)
            if minimum is not None:
                place = builder.add(block_sums, builder.mul(ldsums, index(row)))
                place = builder.add(place, builder.mul(line, index(4)))
                weight = builder.load(builder.inttoptr(place, _F32P), align=4)
                weight = simd._splat(builder, weight, vector)
                total = simd.multiply_add(builder, weight, minimum, total)
            results.append(total)
        return results

    totals = simd._emit_loop(builder, index(0), lines, 1, [zeros] * rows, block)
    targets = [simd._row(builder, c, ldc, row, vector) for row in range(rows)]
    simd._emit_store(builder, targets, totals, accumulate)


_F32P = simd.F32.as_pointer()


def load_codes(builder, address, bits):
    """The codes of a line as float32 vectors: one for Q8; two for Q4, low and high nibbles."""
    narrow, wide = ir.VectorType(_I8, PANEL), ir.VectorType(simd.I32, PANEL)
    vector = ir.VectorType(simd.F32, PANEL)
    line = builder.load(builder.inttoptr(address, narrow.as_pointer()), align=1)
    if bits == Q8:
        return [builder.sitofp(builder.sext(line, wide), vector)]
    line = builder.zext(line, wide)
    low = builder.and_(line, ir.Constant(wide, [15] * PANEL))
    high = builder.lshr(line, ir.Constant(wide, [4] * PANEL))
    return [builder.sitofp(low, vector), builder.sitofp(high, vector)]


def _widen(bits: int):
    """An intrinsic: one block line to float32 [32, PANEL] at an address."""
    vector = ir.VectorType(simd.F32, PANEL)

    @intrinsic
    def widen(typing_context, line, target):
        def codegen(context, builder, signature, args):
            base, out = args
            index = simd._index
            scale = simd._load_line(builder, base, vector, True)
            minimum = None
            if bits == Q4:
                place = builder.add(base, index(PANEL * 2))
                minimum = simd._load_line(builder, place, vector, True)
            codes = builder.add(base, index(PANEL * (2 if bits == Q8 else 4)))

            def one(at, nothing):
                place = builder.add(codes, builder.mul(at, index(PANEL)))
                for half, values in enumerate(load_codes(builder, place, bits)):
                    if minimum is None:
                        values = builder.fmul(values, scale)
                    else:
                        values = simd.multiply_add(builder, values, scale, minimum)
                    row = builder.add(at, index(half * BLOCK // 2))
                    place = builder.add(out, builder.mul(row, index(PANEL * 4)))
                    builder.store(values, builder.inttoptr(place, vector.as_pointer()), align=4)
                return []

            simd._emit_loop(
                builder, index(0), index(BLOCK if bits == Q8 else BLOCK // 2), 1, [], one
            )
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return widen


q8_1, q8_2, q8_3, q8_4, q8_6 = (_block_tile(rows, Q8, 8) for rows in (1, 2, 3, 4, 6))
q4_1, q4_2, q4_3, q4_4, q4_6 = (_block_tile(rows, Q4, 4) for rows in (1, 2, 3, 4, 6))
widen_q8, widen_q4 = _widen(Q8), _widen(Q4)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def q8_product(rows, a, lda, b, c, ldc, lines, accumulate):
    """C[rows, PANEL] (+)= A[rows, 32 * lines] · one panel, few rows."""
    while rows >= 6:
        q8_6(a, lda, b, c, ldc, lines, 0, 0, accumulate)
        rows -= 6
        a += 6 * lda * 4
        c += 6 * ldc * 4
    if rows >= 4:
        q8_4(a, lda, b, c, ldc, lines, 0, 0, accumulate)
        rows -= 4
        a += 4 * lda * 4
        c += 4 * ldc * 4
    if rows == 3:
        q8_3(a, lda, b, c, ldc, lines, 0, 0, accumulate)
    elif rows == 2:
        q8_2(a, lda, b, c, ldc, lines, 0, 0, accumulate)
    elif rows == 1:
        q8_1(a, lda, b, c, ldc, lines, 0, 0, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def q4_product(rows, a, lda, b, c, ldc, lines, sums, accumulate):
    """As ``q8_product``; ``sums`` holds the sums of A's blocks, float32 [rows, lines]."""
    while rows >= 6:
        q4_6(a, lda, b, c, ldc, lines, sums, lines, accumulate)
        rows -= 6
        a += 6 * lda * 4
        c += 6 * ldc * 4
        sums += 6 * lines * 4
    if rows >= 4:
        q4_4(a, lda, b, c, ldc, lines, sums, lines, accumulate)
        rows -= 4
        a += 4 * lda * 4
        c += 4 * ldc * 4
        sums += 4 * lines * 4
    if rows == 3:
        q4_3(a, lda, b, c, ldc, lines, sums, lines, accumulate)
    elif rows == 2:
        q4_2(a, lda, b, c, ldc, lines, sums, lines, accumulate)
    elif rows == 1:
        q4_1(a, lda, b, c, ldc, lines, sums, lines, accumulate)


def by_rows(most, one, two, many):
    """Any number of rows in whole numbers by tiles of ``most``, two and one of them: a function for
    kernels, of the tiles' arguments and, before them, the number of rows.

    C[rows, PANEL] (+)= rows of records, ``stride`` bytes each, · one panel.
    """

    @numba.njit(fastmath=FASTMATH, error_model="numpy")
    def product(rows, records, stride, panel, c, ldc, lines, accumulate):
        while rows >= most:
            many(records, stride, panel, c, ldc, lines, accumulate)
            rows -= most
            records += most * stride
            c += most * ldc * 4
        if rows >= 2:
            two(records, stride, panel, c, ldc, lines, accumulate)
            rows -= 2
            records += 2 * stride
            c += 2 * ldc * 4
        if rows == 1:
            one(records, stride, panel, c, ldc, lines, accumulate)

    return product


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def block_sums(rows, a, lda, lines, sums):
    """Sums of each block of A's rows, float32 [rows, lines] at ``sums``."""
    for row in range(rows):
        x = numba.carray(simd.floats(a + row * lda * 4), lines * BLOCK)
        out = numba.carray(simd.floats(sums + row * lines * 4), lines)
        for line in range(lines):
            total = np.float32(0.0)
            for i in range(BLOCK):
                total += x[line * BLOCK + i]
            out[line] = total
