"""Products on the tile unit of newer processors (AMX), in bfloat16 and nearly as good as float32.

A float32 value is the sum of two bfloat16 values, high and low, to 16 bits and more. So a product
of two is three products of the tile unit, low times low being left out; sums are float32. The error
is about 2^-17 of the terms, far below that of rounding weights to float16. One instruction
multiplies 16 rows by 16 columns over 32 inputs, so this is for many rows; even three of them do
more than the vector unit in the same time.

Rows of x are split once a product, by all threads; a panel of weights is split by the thread that
works on it, into tiles as the unit wants them: pairs of inputs side by side.
"""

from __future__ import annotations

import ctypes
import platform

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import blocks, simd
from trioserve.kernels.cpu.blocks import Q4_BYTES, Q8_BYTES
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8
from trioserve.kernels.cpu.runtime import FASTMATH

ROWS = 16  # of a tile
DEPTH = 32  # inputs of a tile
COLUMNS = 32  # of a panel: two tiles
GROUP_BYTES = 4 * 1024  # a panel's DEPTH inputs: high and low parts of two tiles
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XTILEDATA = 0x1023, 18
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES = _I8.as_pointer()
_LINE, _HALF_LINE = ir.VectorType(simd.F32, COLUMNS), ir.VectorType(simd.I32, COLUMNS // 2)
_WORDS = ir.VectorType(simd.I32, COLUMNS)


_features = llvm.get_host_cpu_features()
PRESENT = bool(
    platform.machine() == "x86_64"
    and simd.PANEL == COLUMNS
    and _features.get("amx-tile")
    and _features.get("amx-bf16")
)


def allow() -> bool:
    """Whether the tile unit is there and the kernel lets this process use it; asks for it, which
    has to be done before threads that use it begin."""
    request = ctypes.CDLL(None, use_errno=True).syscall
    return PRESENT and request(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0


def configuration() -> np.ndarray:
    """Eight tiles of 16 rows of 64 bytes, uint8 [64]: what ``begin`` loads."""
    made = np.zeros(64, np.uint8)
    made[0] = 1
    for tile in range(8):
        made[16 + 2 * tile] = 64
        made[48 + tile] = ROWS
    return made


# ------------------------------------------------------------------------------ code


def _call(builder, name, *args):
    if not PRESENT:  # LLVM has no code for it here, and it is never run
        return
    kinds = [arg.type for arg in args]
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name=name)
    builder.call(function, args)


def _tile(number):
    return ir.Constant(_I8, number)


def _load(builder, tile, address, stride):
    pointer = builder.inttoptr(address, _BYTES)
    _call(builder, "llvm.x86.tileloadd64", _tile(tile), pointer, stride)


@intrinsic
def begin(typing_context, configuration):
    """Set the calling thread's tiles up."""

    def codegen(context, builder, signature, args):
        _call(builder, "llvm.x86.ldtilecfg", builder.inttoptr(args[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def end(typing_context):
    """Let the calling thread's tiles go."""

    def codegen(context, builder, signature, args):
        _call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _halves(builder, value):
    """High and low part of float32 vectors, both rounded, as words whose upper 16 bits are the
    bfloat16; the lower ones of the low part are not cleared."""
    half = ir.Constant(_WORDS, [0x8000] * COLUMNS)
    high = builder.and_(builder.add(builder.bitcast(value, _WORDS), half), _upper())
    rest = builder.fsub(value, builder.bitcast(high, _LINE))
    return high, builder.add(builder.bitcast(rest, _WORDS), half)


def _upper():
    return ir.Constant(_WORDS, [-0x10000] * COLUMNS)


def _store_pair(builder, first, second, target):
    """Two lines of weights, float32 [32] each, to one row of a group's four tiles: high parts of
    columns 0 to 15 and 16 to 31, then low parts."""
    shift = ir.Constant(_WORDS, [16] * COLUMNS)
    parts = zip(_halves(builder, first), _halves(builder, second), strict=True)
    for part, (even, odd) in enumerate(parts):
        pair = builder.or_(builder.lshr(even, shift), builder.and_(odd, _upper()))
        for half in range(2):
            lanes = [half * 16 + i for i in range(16)]
            mask = ir.Constant(ir.VectorType(simd.I32, 16), lanes)
            line = builder.shuffle_vector(pair, pair, mask)
            place = builder.add(target, simd._index((2 * part + half) * 1024))
            builder.store(line, builder.inttoptr(place, _HALF_LINE.as_pointer()), align=4)


def _load_floats(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)


@intrinsic
def split_rows(typing_context, source, high, low):
    """32 values of a row to bfloat16, high and low parts."""

    def codegen(context, builder, signature, args):
        shift = ir.Constant(_WORDS, [16] * COLUMNS)
        narrow = ir.VectorType(_I16, COLUMNS)
        parts = _halves(builder, _load_floats(builder, args[0]))
        for part, address in zip(parts, args[1:], strict=True):  # high, then low
            part = builder.trunc(builder.lshr(part, shift), narrow)
            builder.store(part, builder.inttoptr(address, narrow.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def split_half(typing_context, source, tiles):
    """32 lines of a float16 panel to a group's tiles."""

    def codegen(context, builder, signature, args):
        source, tiles = args

        def pair(at, nothing):
            place = builder.add(source, builder.mul(at, simd._index(2 * COLUMNS * 2)))
            lines = [
                simd._load_line(builder, builder.add(place, simd._index(offset)), _LINE, True)
                for offset in (0, COLUMNS * 2)
            ]
            _store_pair(builder, *lines, builder.add(tiles, builder.mul(at, simd._index(64))))
            return []

        simd._emit_loop(builder, simd._index(0), simd._index(DEPTH // 2), 1, [], pair)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _split_block(bits: int):
    """An intrinsic: one line of blocks (``trioserve.kernels.cpu.blocks``) to a group's tiles."""

    @intrinsic
    def split(typing_context, line, tiles):
        def codegen(context, builder, signature, args):
            line, tiles = args
            if not PRESENT:
                return context.get_dummy_value()
            index = simd._index
            scale = simd._load_line(builder, line, _LINE, True)
            minimum = None
            if bits == Q4:
                place = builder.add(line, index(COLUMNS * 2))
                minimum = simd._load_line(builder, place, _LINE, True)
            codes = builder.add(line, index(COLUMNS * (2 if bits == Q8 else 4)))

            def weights(at):
                """The lines of codes at ``at``, one or two of weights."""
                place = builder.add(codes, builder.mul(at, index(COLUMNS)))
                for values in blocks.load_codes(builder, place, bits):
                    values = builder.fmul(values, scale, ("contract",))
                    if minimum is not None:
                        values = builder.fadd(values, minimum, ("contract",))
                    yield values

            def pair(at, nothing):
                first = builder.mul(at, index(2))
                evens, odds = weights(first), weights(builder.add(first, index(1)))
                for half, (even, odd) in enumerate(zip(evens, odds, strict=True)):
                    row = builder.add(at, index(half * BLOCK // 4))
                    target = builder.add(tiles, builder.mul(row, index(64)))
                    _store_pair(builder, even, odd, target)
                return []

            pairs = BLOCK // 2 if bits == Q8 else BLOCK // 4
            simd._emit_loop(builder, index(0), index(pairs), 1, [], pair)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return split


split_q8, split_q4 = _split_block(Q8), _split_block(Q4)


def _block(row_tiles: int):
    """An intrinsic: C[16 * row_tiles, 32] (+)= A · B over ``groups`` times 32 inputs.

    Arguments: addresses of A's high and low parts and their row stride in bytes, of B's tiles, of C
    and its row stride in bytes, groups, and whether to add to C.
    """

    @intrinsic
    def block(typing_context, high, low, stride, b, c, c_stride, groups, accumulate):
        def codegen(context, builder, signature, args):
            _emit_block(builder, row_tiles, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return block


def _emit_block(builder, row_tiles, high, low, stride, b, c, c_stride, groups, accumulate):
    """Tiles 0 to 3 hold C, row by row; 4 and 5 a part of B, 6 and 7 a part of A."""
    index = simd._index
    line = index(64)

    def c_tiles():
        for row in range(row_tiles):
            base = builder.add(c, builder.mul(c_stride, index(row * ROWS)))
            for half in range(2):
                yield 2 * row + half, builder.add(base, index(half * 64))

    adding = builder.icmp_signed("!=", accumulate, index(0))
    with builder.if_else(adding) as (then, otherwise):
        with then:
            for tile, address in c_tiles():
                _load(builder, tile, address, c_stride)
        with otherwise:
            for tile, _ in c_tiles():
                _call(builder, "llvm.x86.tilezero", _tile(tile))

    def multiply(row, a_tile):
        for half in range(2):
            _call(
                builder, "llvm.x86.tdpbf16ps", _tile(2 * row + half), _tile(a_tile), _tile(4 + half)
            )

    def group(at, nothing):
        tiles = builder.add(b, builder.mul(at, index(GROUP_BYTES)))
        offset = builder.mul(at, index(DEPTH * 2))

        def load_a(part, row, tile):
            base = builder.add(builder.add(part, offset), builder.mul(stride, index(row * ROWS)))
            _load(builder, tile, base, stride)

        for half in range(2):
            _load(builder, 4 + half, builder.add(tiles, index(half * 1024)), line)
        for row in range(row_tiles):
            load_a(high, row, 6)
            multiply(row, 6)
            load_a(low, row, 7)
            multiply(row, 7)
        for half in range(2):
            _load(builder, 4 + half, builder.add(tiles, index((2 + half) * 1024)), line)
        for row in range(row_tiles):
            load_a(high, row, 6)
            multiply(row, 6)
        return []

    simd._emit_loop(builder, index(0), groups, 1, [], group)
    for tile, address in c_tiles():
        pointer = builder.inttoptr(address, _BYTES)
        _call(builder, "llvm.x86.tilestored64", _tile(tile), pointer, c_stride)


_block1, _block2 = _block(1), _block(2)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def split_x(x, x_stride, first, last, rows, inputs, high, low):
    """Split rows [first, last) of x; those from ``rows`` on become zeros."""
    for row in range(first, last):
        target = row * inputs * 2
        if row >= rows:
            for address in (high, low):
                words = numba.carray(simd.int32s(address + target), inputs // 2)
                for i in range(inputs // 2):
                    words[i] = 0
            continue
        for i in range(0, inputs, DEPTH):
            source = x + (row * x_stride + i) * 4
            split_rows(source, high + target + i * 2, low + target + i * 2)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def split_panel(kind, panel, first, groups, tiles):
    """Groups of 32 inputs of a panel, from number ``first`` on, to tiles."""
    for group in range(groups):
        at, target = first + group, tiles + group * GROUP_BYTES
        if kind == Q4:
            split_q4(panel + at * Q4_BYTES, target)
        elif kind == Q8:
            split_q8(panel + at * Q8_BYTES, target)
        else:
            split_half(panel + at * DEPTH * COLUMNS * 2, target)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def product(rows, high, low, stride, tiles, c, c_stride, groups, accumulate, spare):
    """C[rows, 32] (+)= A · one panel's tiles; ``spare`` has room for a tile row of C."""
    row = 0
    while rows - row >= 2 * ROWS:
        a = row * stride
        _block2(high + a, low + a, stride, tiles, c + row * c_stride, c_stride, groups, accumulate)
        row += 2 * ROWS
    if rows - row >= ROWS:
        a = row * stride
        _block1(high + a, low + a, stride, tiles, c + row * c_stride, c_stride, groups, accumulate)
        row += ROWS
    if row < rows:  # a tile has all its rows, C has not
        a = row * stride
        _block1(high + a, low + a, stride, tiles, spare, COLUMNS * 4, groups, 0)
        for i in range(rows - row):
            source = numba.carray(simd.floats(spare + i * COLUMNS * 4), COLUMNS)
            target = numba.carray(simd.floats(c + (row + i) * c_stride), COLUMNS)
            for j in range(COLUMNS):
                target[j] = source[j] + (target[j] if accumulate != 0 else np.float32(0.0))
