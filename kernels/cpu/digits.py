"""Few rows times codes of 8 or 4 bits, in whole numbers on the processor's byte products: VNNI of
AVX-512, or NEON's dot products.

A row of x is cut into blocks like the weights. Each value becomes an integer of 24 bits with sign
times the block's own scale, written as DIGITS bytes; one instruction multiplies a register of them
with one of codes and adds them up by fours. These sums are exact. All that is rounded is x, to
2^-24 of the largest value of its block, so a product is as good as one in float32, and reading the
weights is all that takes time.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import blocks, processor, simd
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8
from trioserve.kernels.cpu.runtime import FASTMATH

DIGITS = 3
LIMIT = 127 << 16  # of an integer: rounding may go beyond it, three digits reach further
RECORD = 128  # bytes of a block of x: digits int8 [3, 32], scale, sum, and a start for each digit
_SCALE, _SUM, _STARTS = DIGITS * BLOCK, DIGITS * BLOCK + 4, DIGITS * BLOCK + 8
_SMALLEST = 1e-30  # below it a block counts as zeros; its inverse would not be finite
_PIECE = 4 * blocks.PANEL  # bytes of codes that are put in order at once: four lines

VNNI = (
    processor.MACHINE == "x86_64"
    and blocks.PANEL == 32
    and processor.has("avx512vnni", "avx512vbmi")
)
NEON = processor.MACHINE == "aarch64" and blocks.PANEL == 16 and processor.has("dotprod")
PRESENT = VNNI or NEON
LANES = 4 if NEON else 16  # outputs in a register
REGISTERS = blocks.PANEL // LANES  # of a panel's outputs
_I8 = ir.IntType(8)
_BYTES, _WORDS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(simd.I32, LANES)
_LINE = ir.VectorType(simd.F32, LANES)
_X = ir.VectorType(simd.F32, BLOCK)


def _products(builder, total, codes, digits):
    """total + the sums by fours of codes times digits, bytes with sign; VNNI takes codes without.

    Args: int32 [LANES], bytes [4 * LANES], and as many bytes as int32 [LANES].
    """
    if NEON:
        name, digits = "llvm.aarch64.neon.sdot.v4i32.v16i8", builder.bitcast(digits, _BYTES)
        return simd.call(builder, name, _WORDS, total, codes, digits)
    codes = builder.bitcast(codes, _WORDS)
    return simd.call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, total, codes, digits)


# --------------------------------------------------------------------------- rows of x


def _to_integers(builder, values):
    """float32 [32] to the nearest int32. LLVM's own conversion leaves open what a NaN gives."""
    parts = []
    for first in range(0, BLOCK, LANES):
        lanes = ir.Constant(_WORDS, list(range(first, first + LANES)))
        parts.append(_to_words(builder, builder.shuffle_vector(values, values, lanes)))
    while len(parts) > 1:
        parts = [_joined(builder, *pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _to_words(builder, values):
    """The same of float32 [LANES]."""
    if NEON:
        return simd.call(builder, "llvm.aarch64.neon.fcvtns.v4i32.v4f32", _WORDS, values)
    name, mask = "llvm.x86.avx512.mask.cvtps2dq.512", ir.Constant(ir.IntType(16), -1)
    rounding = ir.Constant(simd.I32, 4)
    return simd.call(builder, name, _WORDS, values, simd.filled(_WORDS, 0), mask, rounding)


def _joined(builder, first, second):
    """Two vectors as one."""
    count = 2 * first.type.count
    lanes = ir.Constant(ir.VectorType(simd.I32, count), list(range(count)))
    return builder.shuffle_vector(first, second, lanes)


def _write_block(bits: int):
    """An intrinsic: a block of x, float32 [32], to a RECORD for codes of so many bits."""

    @intrinsic
    def write(typing_context, source, record):
        def codegen(context, builder, signature, args):
            if PRESENT:
                _emit_record(builder, bits, *args)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return write


def _emit_record(builder, bits, source, record):
    def const(value):
        return ir.Constant(simd.F32, value)

    def store(value, offset):
        simd.store(builder, value, simd.at(builder, record, offset), align=1)

    x = simd.load(builder, source, _X)
    # Without its sign a float32 compares as a whole number does, and a NaN is the largest of all.
    wide = ir.VectorType(simd.I32, BLOCK)
    absolute = builder.and_(builder.bitcast(x, wide), simd.filled(wide, 0x7FFFFFFF))
    largest = simd.call(builder, "llvm.vector.reduce.umax.v32i32", simd.I32, absolute)
    largest = builder.bitcast(largest, simd.F32)
    total = simd.call(
        builder, "llvm.vector.reduce.fadd.v32f32", simd.F32, const(0.0), x, flags=("reassoc",)
    )
    some = builder.fcmp_ordered(">", largest, const(_SMALLEST))
    inverse = builder.select(some, builder.fdiv(const(float(LIMIT)), largest), const(0.0))
    scale = builder.select(some, builder.fmul(largest, const(1.0 / LIMIT)), const(0.0))
    # NaN where a value is not finite: no flag allows to fold this product.
    store(builder.fadd(scale, builder.fmul(total, const(0.0))), _SCALE)
    store(total, _SUM)
    rest = _to_integers(builder, builder.fmul(x, simd._splat(builder, inverse, _X)))
    for digit in reversed(range(DIGITS)):
        low = builder.trunc(rest, ir.VectorType(_I8, BLOCK))
        store(low, digit * BLOCK)
        low = builder.sext(low, wide)
        if bits == Q8 and VNNI:  # codes get 128 added to lose their sign; this takes it off again
            start = simd.call(builder, "llvm.vector.reduce.add.v32i32", simd.I32, low)
            store(builder.mul(start, ir.Constant(simd.I32, -128)), _STARTS + digit * 4)
        rest = builder.ashr(builder.sub(rest, low), simd.filled(wide, 8))


_write_q8, _write_q4 = _write_block(Q8), _write_block(Q4)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def write_rows(bits, rows, x, x_stride, lines, records):
    """Rows of x, float32 [rows, 32 * lines], to records [rows, lines] for codes of so many bits."""
    for row in range(rows):
        for line in range(lines):
            source = x + (row * x_stride + line * BLOCK) * 4
            record = records + (row * lines + line) * RECORD
            if bits == Q4:
                _write_q4(source, record)
            else:
                _write_q8(source, record)


# --------------------------------------------------------------------------- the product


def _tile(rows: int, bits: int):
    """An intrinsic: C[rows, PANEL] (+)= rows of records · (one panel of block lines).

    Arguments: address of the records and bytes from one row's to the next, address of the panel, of
    C and its row stride in elements, number of lines, and whether to add to C.
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
    head = blocks.PANEL * (2 if bits == Q8 else 4)

    def block(line, totals):
        base = builder.add(panel, builder.mul(line, index(blocks.LINE_BYTES[bits])))
        for offset in range(0, blocks.LINE_BYTES[bits], 64):
            simd.prefetch(builder, simd.at(builder, base, simd.AHEAD + offset))
        first = builder.add(records, builder.mul(line, index(RECORD)))
        places = [builder.add(first, builder.mul(stride, index(row))) for row in range(rows)]
        sums = _emit_sums(builder, bits, simd.at(builder, base, head), places)
        of_rows = [totals[at : at + REGISTERS] for at in range(0, len(totals), REGISTERS)]
        return [
            _add_block(builder, base, place, bits, register, digits, total)
            for place, row, before in zip(places, sums, of_rows, strict=True)
            for register, (digits, total) in enumerate(zip(row, before, strict=True))
        ]

    zeros = [simd.filled(_LINE, 0.0)] * (REGISTERS * rows)
    totals = simd._emit_loop(builder, index(0), lines, 1, zeros, block)
    ldc = builder.mul(ldc, index(4))
    targets = []
    for row in range(rows):
        place = builder.add(c, builder.mul(ldc, index(row)))
        targets += [
            builder.inttoptr(simd.at(builder, place, register * LANES * 4), _LINE.as_pointer())
            for register in range(REGISTERS)
        ]
    simd._emit_store(builder, targets, totals, accumulate)


def _emit_sums(builder, bits, codes, places):
    """A block's sums of codes times digits: for each row and register a list of int32 [LANES], one
    for each digit. ``codes`` and ``places`` are where the block's codes and each row's record lie.
    """
    rows = []
    for place in places:
        starts = [simd.filled(_WORDS, 0)] * DIGITS
        if bits == Q8 and VNNI:
            starts = [
                simd.broadcast(builder, simd.at(builder, place, _STARTS + digit * 4), _WORDS)
                for digit in range(DIGITS)
            ]
        rows.append([list(starts) for _ in range(REGISTERS)])
    for inputs, lines in _codes(builder, codes, bits):
        for place, sums in zip(places, rows, strict=True):
            for digit in range(DIGITS):
                factor = simd.broadcast(
                    builder, simd.at(builder, place, digit * BLOCK + inputs), _WORDS
                )
                for line, total in zip(lines, sums, strict=True):
                    total[digit] = _products(builder, total[digit], line, factor)
    return rows


def _codes(builder, codes, bits):
    """A block's codes as bytes, four inputs of an output side by side: pairs of (first of the four
    inputs, the registers of the panel's outputs)."""
    for piece in range(8 if bits == Q8 else 4):
        lines = _by_fours(builder, simd.at(builder, codes, piece * _PIECE))
        if bits == Q8:
            if VNNI:
                lines = [builder.xor(line, simd.filled(_BYTES, -128)) for line in lines]
            yield 4 * piece, lines
            continue
        mask, four = simd.filled(_BYTES, 15), simd.filled(_BYTES, 4)
        yield 4 * piece, [builder.and_(line, mask) for line in lines]
        yield BLOCK // 2 + 4 * piece, [builder.lshr(line, four) for line in lines]


def _by_fours(builder, address):
    """Four lines of a panel, output by output: REGISTERS vectors of bytes [4 * LANES]."""

    def shuffle(first, second, order):
        mask = ir.Constant(ir.VectorType(simd.I32, 4 * LANES), order)
        return builder.shuffle_vector(first, second, mask)

    step = 4 * LANES
    lines = [
        simd.load(builder, simd.at(builder, address, offset), _BYTES, align=1)
        for offset in range(0, _PIECE, step)
    ]
    if VNNI:  # two lines in a register
        orders = [[k * 32 + start + o for o in range(16) for k in range(4)] for start in (0, 16)]
        return [shuffle(*lines, order) for order in orders]
    halves = [[half * 8 + i // 2 + i % 2 * 16 for i in range(16)] for half in range(2)]
    even, odd = ([shuffle(*lines[k::2], half) for half in halves] for k in range(2))
    return [shuffle(*pair, half) for pair in zip(even, odd, strict=True) for half in halves]


def _add_block(builder, base, place, bits, register, sums, total):
    """total + the block's outcome for one row and some outputs; the same for any number of rows,
    because nothing is left to the compiler to join or not."""

    high, middle, low = sums
    low = builder.add(builder.shl(middle, simd.filled(_WORDS, 8)), low)
    high, low = builder.sitofp(high, _LINE), builder.sitofp(low, _LINE)
    whole = simd.fused(builder, high, simd.filled(_LINE, 65536.0), low)
    offset = register * LANES * 2
    scale = simd._load_line(builder, simd.at(builder, base, offset), _LINE, True)
    scale = builder.fmul(scale, simd.broadcast(builder, simd.at(builder, place, _SCALE), _LINE))
    total = simd.fused(builder, whole, scale, total)
    if bits == Q4:
        offset += blocks.PANEL * 2
        minimum = simd._load_line(builder, simd.at(builder, base, offset), _LINE, True)
        weight = simd.broadcast(builder, simd.at(builder, place, _SUM), _LINE)
        total = simd.fused(builder, weight, minimum, total)
    return total


# Three rows are two and one: each of these costs half a second to compile. Four would leave NEON
# without registers: more would be stored and loaded again than is computed.
MOST = 2 if NEON else 4
q8_product, q4_product = (
    blocks.by_rows(MOST, *(_tile(rows, bits) for rows in (1, 2, MOST))) for bits in (Q8, Q4)
)
