"""Products on the tile unit of newer processors (AMX), in bfloat16 with float32 sums.

A float32 value is the sum of two bfloat16 values, high and low, to 16 bits and more. With two
``parts`` a product of two such values is three products of the tile unit, low times low being left
out; the error is about 2^-17 of the terms, far below that of rounding weights to float16. With one
part both are rounded to bfloat16 and it is one product. One instruction multiplies 16 rows by 16
columns over 32 inputs, so this is for many rows.

Rows of x are split once a product, by all threads, into tiles that lie in memory one after the
other; a panel of weights is split by the thread that works on it, into tiles as the unit wants
them: pairs of inputs side by side. All inputs of a panel are gone through before a sum is stored:
lines of a matrix lie in few places of the cache, and stopping to store them took half the time.
"""

from __future__ import annotations

import ctypes

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import blocks, processor, simd
from trioserve.kernels.cpu.blocks import Q4_BYTES, Q8_BYTES
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8
from trioserve.kernels.cpu.runtime import FASTMATH

ROWS = 16  # of a tile
DEPTH = 32  # inputs of a tile
COLUMNS = 32  # of a panel: two tiles
TILE_BYTES = 1024
PART_BYTES = 2 * TILE_BYTES  # one part of a panel's DEPTH inputs: two tiles
GROUP_BYTES = 2 * PART_BYTES  # both parts
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XTILEDATA = 0x1023, 18
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES = _I8.as_pointer()
_LINE, _HALF_LINE = ir.VectorType(simd.F32, COLUMNS), ir.VectorType(simd.I32, COLUMNS // 2)
_WORDS = ir.VectorType(simd.I32, COLUMNS)


PRESENT = (
    processor.MACHINE == "x86_64"
    and simd.PANEL == COLUMNS
    and processor.has("amx-tile", "amx-bf16")
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
    """High and low part of float32 vectors, both rounded, halves away from zero, as words whose
    upper 16 bits are the bfloat16; the lower ones of the low part are not cleared. A NaN stays one
    in one of them."""
    half = ir.Constant(_WORDS, [0x8000] * COLUMNS)
    high = builder.and_(builder.add(builder.bitcast(value, _WORDS), half), _upper())
    rest = builder.fsub(value, builder.bitcast(high, _LINE))
    return high, builder.add(builder.bitcast(rest, _WORDS), half)


def _rounded(builder, value):
    """The high part alone, where there is no other to keep a NaN."""
    nan = ir.Constant(_WORDS, [0x7FC00000] * COLUMNS)
    number = builder.fcmp_ordered("ord", value, value)
    return builder.select(number, _halves(builder, value)[0], nan)


def _upper():
    return ir.Constant(_WORDS, [-0x10000] * COLUMNS)


def _store_pair(builder, parts, first, second, target):
    """Two lines of weights, float32 [32] each, to one row of a group's tiles: high parts of columns
    0 to 15 and 16 to 31 and, with two parts, low parts."""
    shift = ir.Constant(_WORDS, [16] * COLUMNS)
    if parts == 1:
        pairs = [(_rounded(builder, first), _rounded(builder, second))]
    else:
        pairs = zip(_halves(builder, first), _halves(builder, second), strict=True)
    for part, (even, odd) in enumerate(pairs):
        pair = builder.or_(builder.lshr(even, shift), builder.and_(odd, _upper()))
        for half in range(2):
            lanes = [half * 16 + i for i in range(16)]
            mask = ir.Constant(ir.VectorType(simd.I32, 16), lanes)
            line = builder.shuffle_vector(pair, pair, mask)
            place = builder.add(target, simd._index((2 * part + half) * TILE_BYTES))
            builder.store(line, builder.inttoptr(place, _HALF_LINE.as_pointer()), align=4)


def _load_floats(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)


@intrinsic
def split_row(typing_context, source, target, parts):
    """32 values of a row to bfloat16 at ``target``; with two parts the low ones a tile behind."""

    def codegen(context, builder, signature, args):
        source, target, parts = args
        shift = ir.Constant(_WORDS, [16] * COLUMNS)
        narrow = ir.VectorType(_I16, COLUMNS)
        value = _load_floats(builder, source)
        high, low = _rounded(builder, value), _halves(builder, value)[1]

        def store(words, address):
            words = builder.trunc(builder.lshr(words, shift), narrow)
            builder.store(words, builder.inttoptr(address, narrow.as_pointer()), align=2)

        store(high, target)
        with builder.if_then(builder.icmp_signed(">", parts, simd._index(1))):
            store(low, builder.add(target, simd._index(TILE_BYTES)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


def _split_half(parts: int):
    """An intrinsic: 32 lines of a float16 panel to a group's tiles."""

    @intrinsic
    def split(typing_context, source, tiles):
        def codegen(context, builder, signature, args):
            source, tiles = args

            def pair(at, nothing):
                place = builder.add(source, builder.mul(at, simd._index(2 * COLUMNS * 2)))
                lines = [
                    simd._load_line(builder, builder.add(place, simd._index(offset)), _LINE, True)
                    for offset in (0, COLUMNS * 2)
                ]
                target = builder.add(tiles, builder.mul(at, simd._index(64)))
                _store_pair(builder, parts, *lines, target)
                return []

            simd._emit_loop(builder, simd._index(0), simd._index(DEPTH // 2), 1, [], pair)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return split


def _split_block(bits: int, parts: int):
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
                    _store_pair(builder, parts, even, odd, target)
                return []

            pairs = BLOCK // 2 if bits == Q8 else BLOCK // 4
            simd._emit_loop(builder, index(0), index(pairs), 1, [], pair)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return split


split_q8, split_q4, split_half = _split_block(Q8, 2), _split_block(Q4, 2), _split_half(2)
round_q8, round_q4, round_half = _split_block(Q8, 1), _split_block(Q4, 1), _split_half(1)


def _block(row_tiles: int, parts: int):
    """An intrinsic: C[16 * row_tiles, 32] (+)= A · B over ``groups`` times 32 inputs.

    Arguments: address of A's tiles, bytes from one row of them to the next, address of B's tiles,
    of C and its row stride in bytes, groups, and whether to add to C.
    """

    @intrinsic
    def block(typing_context, a, a_stride, b, c, c_stride, groups, accumulate):
        def codegen(context, builder, signature, args):
            _emit_block(builder, row_tiles, parts, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return block


def _emit_block(builder, row_tiles, parts, a, a_stride, b, c, c_stride, groups, accumulate):
    """Tiles 0 to 3 hold C, row by row; 4 and 5 a part of B, 6 and 7 a part of A."""
    index = simd._index

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

    def group(at, nothing):
        weights = builder.add(b, builder.mul(at, index(parts * PART_BYTES)))
        rows = builder.add(a, builder.mul(at, index(parts * TILE_BYTES)))

        def load_b(part):
            for half in range(2):
                place = builder.add(weights, index((2 * part + half) * TILE_BYTES))
                _load(builder, 4 + half, place, index(64))

        def load_a(part):
            for row in range(row_tiles):
                place = builder.add(rows, builder.mul(a_stride, index(row)))
                _load(builder, 6 + row, builder.add(place, index(part * TILE_BYTES)), index(64))

        def multiply():
            for row in range(row_tiles):
                for half in range(2):
                    tiles = (2 * row + half, 6 + row, 4 + half)
                    _call(builder, "llvm.x86.tdpbf16ps", *map(_tile, tiles))

        if parts == 1:
            load_b(0)
            load_a(0)
            multiply()
            return []
        load_b(1)
        load_a(0)
        multiply()
        load_b(0)
        multiply()
        load_a(1)
        multiply()
        return []

    simd._emit_loop(builder, index(0), groups, 1, [], group)
    for tile, address in c_tiles():
        pointer = builder.inttoptr(address, _BYTES)
        _call(builder, "llvm.x86.tilestored64", _tile(tile), pointer, c_stride)


_rounded1, _rounded2 = _block(1, 1), _block(2, 1)
_split1, _split2 = _block(1, 2), _block(2, 2)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _product1(parts, a, a_stride, tiles, c, c_stride, groups, accumulate):
    if parts == 1:
        _rounded1(a, a_stride, tiles, c, c_stride, groups, accumulate)
    else:
        _split1(a, a_stride, tiles, c, c_stride, groups, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _product2(parts, a, a_stride, tiles, c, c_stride, groups, accumulate):
    if parts == 1:
        _rounded2(a, a_stride, tiles, c, c_stride, groups, accumulate)
    else:
        _split2(a, a_stride, tiles, c, c_stride, groups, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def split_x(x, x_stride, first, last, rows, inputs, parts, target):
    """Split rows [first, last) of x into tiles; those from ``rows`` on become zeros."""
    groups = inputs // DEPTH
    for row in range(first, last):
        line = target + row // ROWS * groups * parts * TILE_BYTES + row % ROWS * 64
        for group in range(groups):
            place = line + group * parts * TILE_BYTES
            if row < rows:
                split_row(x + (row * x_stride + group * DEPTH) * 4, place, parts)
                continue
            for part in range(parts):
                words = numba.carray(simd.int64s(place + part * TILE_BYTES), 8)
                for i in range(8):
                    words[i] = 0


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def split_panel(kind, panel, first, groups, parts, tiles):
    """Groups of 32 inputs of a panel, from number ``first`` on, to tiles."""
    for group in range(groups):
        at, target = first + group, tiles + group * parts * PART_BYTES
        if kind == Q4:
            line = panel + at * Q4_BYTES
            if parts == 1:
                round_q4(line, target)
            else:
                split_q4(line, target)
        elif kind == Q8:
            line = panel + at * Q8_BYTES
            if parts == 1:
                round_q8(line, target)
            else:
                split_q8(line, target)
        else:
            line = panel + at * DEPTH * COLUMNS * 2
            if parts == 1:
                round_half(line, target)
            else:
                split_half(line, target)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def product(rows, parts, a, a_stride, tiles, c, c_stride, groups, accumulate, spare):
    """C[rows, 32] (+)= A · one panel's tiles; ``spare`` has room for a tile row of C."""
    row = 0
    while rows - row >= 2 * ROWS:
        place = c + row * c_stride
        _product2(parts, a, a_stride, tiles, place, c_stride, groups, accumulate)
        row += 2 * ROWS
        a += 2 * a_stride
    if rows - row >= ROWS:
        place = c + row * c_stride
        _product1(parts, a, a_stride, tiles, place, c_stride, groups, accumulate)
        row += ROWS
        a += a_stride
    if row < rows:  # a tile has all its rows, C has not
        _product1(parts, a, a_stride, tiles, spare, COLUMNS * 4, groups, 0)
        for i in range(rows - row):
            source = numba.carray(simd.floats(spare + i * COLUMNS * 4), COLUMNS)
            target = numba.carray(simd.floats(c + (row + i) * c_stride), COLUMNS)
            for j in range(COLUMNS):
                target[j] = source[j] + (target[j] if accumulate != 0 else np.float32(0.0))


class PeakParams(ctypes.Structure):
    """``rounds`` of eight products in each thread; ``tiles`` is the configuration's address."""

    _fields_ = [("tiles", ctypes.c_int64), ("rounds", ctypes.c_int64)]

    @property
    def operations(self) -> int:
        """Multiplications and additions of one thread."""
        return self.rounds * 8 * 2 * ROWS * 16 * DEPTH


@intrinsic
def _products_alone(typing_context, rounds):
    """Eight products a round on four sums, of tiles that hold zeros."""

    def codegen(context, builder, signature, args):
        for tile in range(8):
            _call(builder, "llvm.x86.tilezero", _tile(tile))

        def one(at, nothing):
            for number in range(8):
                tiles = (number % 4, 6 + number % 2, 4 + number // 2 % 2)
                _call(builder, "llvm.x86.tdpbf16ps", *map(_tile, tiles))
            return []

        simd._emit_loop(builder, simd._index(0), args[0], 1, [], one)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def peak(params):
    """A kernel that multiplies and nothing else, to measure what the tile unit can do."""
    p = numba.carray(params, 1)[0]
    begin(p.tiles)
    _products_alone(p.rounds)
    end()
