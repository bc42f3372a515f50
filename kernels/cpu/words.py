"""Rows times codes of 8 or 4 bits, in whole numbers on products of 16-bit words.

A row of x is cut into blocks like the weights. Each value becomes an integer of 16 bits with sign
times the block's own scale. One instruction multiplies pairs of them with pairs of codes and adds
up the two products, twice as many a time as a float32 multiply-add does. Sums of a block are exact:
a value is at most 32,767, a code at most 128, and 32 products of them stay below 2^28 where 2^31
would fit. All that is rounded is x, to 2^-16 of the largest value of its block.

A row's blocks are added up in their order, by the same operations, however many rows there are and
however wide the registers: what a row gets is the same to the bit in any company, and on any
processor that does its products in this way.

Few rows are multiplied with the codes as they are read; for many a panel's codes are widened to
words once.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import blocks, processor, simd
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8
from trioserve.kernels.cpu.runtime import FASTMATH

PANEL = blocks.PANEL
LIMIT = 32767  # of an integer
RECORD = 72  # bytes of a block of x: integers int16 [32], scale and sum float32
_SCALE, _SUM = 2 * BLOCK, 2 * BLOCK + 4
LINE_BYTES = (BLOCK // 2 * 4 + 8) * PANEL
"""Of a block line as words: int16 [16 pairs of inputs, PANEL, 2], scales and minima float32."""
_SCALES, _MINIMA = BLOCK // 2 * 4 * PANEL, (BLOCK // 2 + 1) * 4 * PANEL
_SMALLEST = 1e-30  # below it a block counts as zeros; its inverse would not be finite
_ROUND = 1.5 * 2**23
"""Added to a float32 of fewer than 22 bits it leaves the nearest integer in the lowest bits."""

LANES = 16 if simd.AVX512 else 8  # outputs in a register
_PARTS = range(PANEL // LANES)
_X86 = processor.MACHINE == "x86_64"
PRESENT = _X86 and processor.has("avx2", "fma", "f16c")
_FUSED = simd.AVX512 and processor.has("avx512vnni")  # product and sum in one instruction

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_INTS = ir.VectorType(simd.I32, LANES)
_LINE = ir.VectorType(simd.F32, LANES)
_X, _X_INTS = ir.VectorType(simd.F32, BLOCK), ir.VectorType(simd.I32, BLOCK)


def _add_products(builder, total, codes, factors):
    """total + products of pairs of words, added up by twos."""
    if _FUSED:
        return simd.call(builder, "llvm.x86.avx512.vpdpwssd.512", _INTS, total, codes, factors)
    name = "llvm.x86.avx512.pmaddw.d.512" if simd.AVX512 else "llvm.x86.avx2.pmadd.wd"
    words = ir.VectorType(_I16, 2 * LANES)
    codes, factors = (builder.bitcast(pairs, words) for pairs in (codes, factors))
    return builder.add(total, simd.call(builder, name, _INTS, codes, factors))


# --------------------------------------------------------------------------- rows of x


@intrinsic
def _write_block(typing_context, source, record):
    """A block of x, float32 [32], to a RECORD."""

    def codegen(context, builder, signature, args):
        _emit_record(builder, *args)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _emit_record(builder, source, record):
    def const(value):
        return ir.Constant(simd.F32, value)

    x = simd.load(builder, source, _X)
    # Without its sign a float32 compares as a whole number does, and a NaN is the largest of all.
    absolute = builder.and_(builder.bitcast(x, _X_INTS), simd.filled(_X_INTS, 0x7FFFFFFF))
    bits = simd.call(builder, "llvm.vector.reduce.umax.v32i32", simd.I32, absolute)
    finite = builder.icmp_unsigned("<", bits, ir.Constant(simd.I32, 0x7F800000))
    largest = builder.bitcast(bits, simd.F32)
    some = builder.fcmp_ordered(">", largest, const(_SMALLEST))
    inverse = builder.select(some, builder.fdiv(const(float(LIMIT)), largest), const(0.0))
    scale = builder.select(some, builder.fmul(largest, const(1.0 / LIMIT)), const(0.0))
    scale = builder.select(finite, scale, const(float("nan")))
    whole = simd.fused(builder, x, simd._splat(builder, inverse, _X), simd.filled(_X, _ROUND))
    words = builder.trunc(builder.bitcast(whole, _X_INTS), ir.VectorType(_I16, BLOCK))
    simd.store(builder, words, record)
    total = builder.sext(words, _X_INTS)
    total = simd.call(builder, "llvm.vector.reduce.add.v32i32", simd.I32, total)
    simd.store(builder, scale, simd.at(builder, record, _SCALE))
    total = builder.fmul(builder.sitofp(total, simd.F32), scale)
    simd.store(builder, total, simd.at(builder, record, _SUM))


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def write_rows(rows, x, x_stride, lines, records):
    """Rows of x, float32 [rows, 32 * lines], to records [rows, lines]."""
    for row in range(rows):
        for line in range(lines):
            source = x + (row * x_stride + line * BLOCK) * 4
            _write_block(source, records + (row * lines + line) * RECORD)


# --------------------------------------------------------------------------- codes


def _codes(builder, codes, bits):
    """A block's codes as words, two inputs of an output side by side: pairs of (first of the two
    inputs, the panel's parts)."""
    bytes_ = ir.VectorType(_I8, PANEL)
    step = 2 * LANES
    for first in range(0, BLOCK if bits == Q8 else BLOCK // 2, 2):
        lines = [
            simd.load(builder, simd.at(builder, codes, (first + i) * PANEL), bytes_) for i in (0, 1)
        ]
        parts = []
        for part in _PARTS:
            lanes = [part * LANES + i // 2 + i % 2 * PANEL for i in range(step)]
            mask = ir.Constant(ir.VectorType(simd.I32, step), lanes)
            pairs = builder.shuffle_vector(*lines, mask)
            widened = builder.sext if bits == Q8 else builder.zext
            parts.append(builder.bitcast(widened(pairs, ir.VectorType(_I16, step)), _INTS))
        if bits == Q8:
            yield first, parts
            continue
        mask, four = simd.filled(_INTS, 0x000F000F), simd.filled(_INTS, 4)
        yield first, [builder.and_(part, mask) for part in parts]
        yield (
            first + BLOCK // 2,
            [builder.and_(builder.lshr(part, four), mask) for part in parts],
        )


def _scales(builder, base, bits):
    """A block line's scales and, with Q4, minima: each as the panel's parts, float32."""

    def row(start):
        places = (simd.at(builder, base, (start + part * LANES) * 2) for part in _PARTS)
        return [simd._load_line(builder, place, _LINE, True) for place in places]

    return row(0), row(PANEL) if bits == Q4 else None


def _widen(bits: int):
    """An intrinsic: one block line to LINE_BYTES of words at an address."""

    @intrinsic
    def widen(typing_context, line, target):
        def codegen(context, builder, signature, args):
            base, out = args
            head = PANEL * (2 if bits == Q8 else 4)
            for first, parts in _codes(builder, simd.at(builder, base, head), bits):
                for part, pairs in enumerate(parts):
                    place = (first // 2 * PANEL + part * LANES) * 4
                    simd.store(builder, pairs, simd.at(builder, out, place))
            scales, minima = _scales(builder, base, bits)
            for part in _PARTS:
                simd.store(builder, scales[part], simd.at(builder, out, _SCALES + part * LANES * 4))
                least = simd.filled(_LINE, 0.0) if minima is None else minima[part]
                simd.store(builder, least, simd.at(builder, out, _MINIMA + part * LANES * 4))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return widen


widen_q8, widen_q4 = _widen(Q8), _widen(Q4)


# --------------------------------------------------------------------------- the product


def _tile(rows: int, bits: int | None):
    """An intrinsic: C[rows, PANEL] (+)= rows of records · (one panel of block lines).

    Arguments: address of the records and bytes from one row's to the next, address of the panel, of
    C and its row stride in elements, number of lines, and whether to add to C. ``bits`` is None for
    a panel that was widened.
    """

    @intrinsic
    def tile(typing_context, records, stride, panel, c, ldc, lines, accumulate):
        def codegen(context, builder, signature, args):
            if PRESENT:
                _emit_tile(builder, rows, bits, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return tile


def _emit_tile(builder, rows, bits, records, stride, panel, c, ldc, lines, accumulate):
    index = simd._index
    size = LINE_BYTES if bits is None else blocks.LINE_BYTES[bits]

    def block(line, totals):
        base = builder.add(panel, builder.mul(line, index(size)))
        first = builder.add(records, builder.mul(line, index(RECORD)))
        places = [builder.add(first, builder.mul(stride, index(row))) for row in range(rows)]
        if bits is None:
            sums = _sums_of_words(builder, base, places)
        else:
            for offset in range(0, size, 64):
                simd.prefetch(builder, simd.at(builder, base, simd.AHEAD + offset))
            sums = _sums_of_codes(builder, base, places, bits)
        return _add_block(builder, base, bits, places, sums, totals)

    ldc = builder.mul(ldc, index(4))
    targets = []
    for row in range(rows):
        place = builder.add(c, builder.mul(ldc, index(row)))
        targets += [simd.at(builder, place, part * LANES * 4) for part in _PARTS]
    totals = _start(builder, targets, accumulate)
    totals = simd._emit_loop(builder, index(0), lines, 1, totals, block)
    for target, total in zip(targets, totals, strict=True):
        simd.store(builder, total, target)


def _start(builder, targets, accumulate):
    """What is in the targets or, if ``accumulate`` is 0, zeros. To begin with it, in place of
    adding it at the end, is what lets a panel be gone through in pieces with nothing changed."""
    before = builder.basic_block
    zeros = simd.filled(_LINE, 0.0)
    with builder.if_then(builder.icmp_signed("!=", accumulate, simd._index(0))):
        values = [simd.load(builder, target, _LINE) for target in targets]
        loaded = builder.basic_block
    totals = []
    for value in values:
        total = builder.phi(_LINE)
        total.add_incoming(zeros, before)
        total.add_incoming(value, loaded)
        totals.append(total)
    return totals


def _sums_of_codes(builder, base, places, bits):
    """A block's sums of products, for each row and part of the panel, from the codes themselves."""
    sums = [[simd.filled(_INTS, 0)] * len(_PARTS) for _ in places]
    head = PANEL * (2 if bits == Q8 else 4)
    for first, parts in _codes(builder, simd.at(builder, base, head), bits):
        sums = _add_pairs(builder, sums, parts, places, simd._index(first * 2))
    return sums


def _sums_of_words(builder, base, places):
    """The same from a panel that was widened."""
    parts, unroll = len(_PARTS), 4

    def pairs(at, flat):
        sums = [list(flat[i : i + parts]) for i in range(0, len(flat), parts)]
        for step in range(unroll):
            pair = builder.add(at, simd._index(step))
            line = builder.add(base, builder.mul(pair, simd._index(PANEL * 4)))
            codes = [
                simd.load(builder, simd.at(builder, line, part * LANES * 4), _INTS)
                for part in _PARTS
            ]
            sums = _add_pairs(builder, sums, codes, places, builder.mul(pair, simd._index(4)))
        return [one for row in sums for one in row]

    zeros = [simd.filled(_INTS, 0)] * (len(places) * parts)
    flat = simd._emit_loop(builder, simd._index(0), simd._index(BLOCK // 2), unroll, zeros, pairs)
    return [flat[i : i + parts] for i in range(0, len(flat), parts)]


def _add_pairs(builder, sums, parts, places, offset):
    """sums + codes of two inputs times each row's two values."""
    added = []
    for row, place in enumerate(places):
        factors = simd.broadcast(builder, builder.add(place, offset), _INTS)
        added.append(
            [
                _add_products(builder, total, codes, factors)
                for total, codes in zip(sums[row], parts, strict=True)
            ]
        )
    return added


def _add_block(builder, base, bits, places, sums, totals):
    """totals + a block's outcome: for each row and part sum · scales + sum of x · minimum."""
    if bits is None:
        scales, minima = (
            [
                simd.load(builder, simd.at(builder, base, start + part * LANES * 4), _LINE)
                for part in _PARTS
            ]
            for start in (_SCALES, _MINIMA)
        )
    else:
        scales, minima = _scales(builder, base, bits)
    results = []
    for row, place in enumerate(places):
        scale = simd.broadcast(builder, simd.at(builder, place, _SCALE), _LINE)
        weight = simd.broadcast(builder, simd.at(builder, place, _SUM), _LINE)
        for part in _PARTS:
            total = totals[row * len(_PARTS) + part]
            value = builder.sitofp(sums[row][part], _LINE)
            factor = builder.fmul(scales[part], scale)
            total = simd.fused(builder, value, factor, total)
            if minima is not None:
                total = simd.fused(builder, weight, minima[part], total)
            results.append(total)
    return results


MOST = 4  # rows of a tile
q8_product, q4_product, words_product = (
    blocks.by_rows(MOST, *(_tile(rows, bits) for rows in (1, 2, MOST))) for bits in (Q8, Q4, None)
)
