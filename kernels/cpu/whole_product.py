"""Products in whole numbers: rows and weights as integers with one scale a row and one an output.

A value of a row is an integer of 16 bits times the scale of its row, written as two signed bytes,
``256 * high + low``; a weight is one byte (``WHOLE8``) or two (``WHOLE16``) times the scale of its
output. Products of bytes are added up in int32 over all inputs, nothing is rescaled or unpacked on
the way, and sums of integers do not depend on their order. So a row gets the same to the bit
whatever is computed beside it and whichever unit does it: the tile unit (AMX) or the vector unit's
products of bytes (VNNI). Of the four products of two times two bytes low times low
is left out.

    WHOLE8:   x · w = (256 * (xh · w) + xl · w) * scale of x * scale of w
    WHOLE16:  x · w = (256 * (xh · wh) + xl · wh + xh · wl) * 256 * scale of x * scale of w

Weights lie as ``trioserve.kernels.cpu.whole_panels`` has them.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import amx, digits, processor, simd
from trioserve.kernels.cpu.codes import BLOCK
from trioserve.kernels.cpu.panel_product import (
    PanelProduct,
    Panels,
    Params,
    add_bias,
    copy_last,
)
from trioserve.kernels.cpu.rows import rms_norm
from trioserve.kernels.cpu.runtime import (
    FASTMATH,
    LINE,
    Team,
    aligned_bytes,
    next_unit,
    team_barrier,
    team_size,
    thread_index,
)
from trioserve.kernels.cpu.whole_panels import (
    DEPTH,
    HEAD_BYTES,
    KINDS,
    LANES,
    LIMIT,
    PANEL,
    TILE_BYTES,
    WHOLE8,
    WHOLE16,
)

ROWS = 16
SMALLEST = 1e-30  # below it a row counts as zeros; its inverse would not be finite
X_GROUP = 2 * TILE_BYTES  # both bytes of 16 rows
SUMS_BYTES = 4 * TILE_BYTES  # of 16 rows and a panel: two sums of two halves
CHUNK_BYTES = 24 << 10  # of a panel that all rows pass before the next: it stays in the first cache

TILES_PRESENT = amx.PRESENT and processor.has("amx-int8")
PRESENT = digits.VNNI and simd.PANEL == PANEL
_I8 = ir.IntType(8)
_BYTES, _WORDS = ir.VectorType(_I8, 64), ir.VectorType(simd.I32, LANES)
_LINE = ir.VectorType(simd.F32, LANES)


def group_bytes(kind: int) -> int:
    """Bytes of a panel's DEPTH inputs."""
    return (2 if kind == WHOLE8 else 4) * TILE_BYTES


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _group_bytes(kind):
    """The same for kernels."""
    return 2 * TILE_BYTES if kind == WHOLE8 else 4 * TILE_BYTES


def reference(x, codes, scales, kind):
    """float64: rows of float32 [n, in] as the kernel rounds them, times integers with a scale an
    output, low bytes times low ones left out."""
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    factor = np.float32(LIMIT) / np.maximum(largest, np.float32(SMALLEST))
    rows = np.rint(x * factor).astype(np.int64)
    total = rows @ codes.astype(np.int64).T
    if kind == WHOLE16:
        total -= _low(rows) @ _low(codes.astype(np.int64)).T
    return total * (largest / np.float64(LIMIT)) * scales.astype(np.float64)


def _low(values):
    return (values + 128) % 256 - 128


# --------------------------------------------------------------------------- rows of x


@intrinsic
def _largest(typing_context, x, blocks):
    """The largest magnitude of a row, float32 [32 * blocks]; NaN where a value is not finite."""

    def codegen(context, builder, signature, args):
        x, blocks = args
        wide = ir.VectorType(simd.I32, BLOCK)
        magnitude = simd.filled(wide, 0x7FFFFFFF)

        def block(at, found):
            place = builder.add(x, builder.mul(at, simd._index(BLOCK * 4)))
            values = builder.and_(simd.load(builder, place, wide), magnitude)
            larger = builder.icmp_unsigned(">", values, found[0])
            return [builder.select(larger, values, found[0])]

        # Without its sign a float32 compares as a whole number does, infinity and NaN last.
        zeros = simd.filled(wide, 0)
        (found,) = simd._emit_loop(builder, simd._index(0), blocks, 1, [zeros], block)
        found = simd.call(builder, "llvm.vector.reduce.umax.v32i32", simd.I32, found)
        found = builder.bitcast(found, simd.F32)
        spoiled = builder.fmul(found, ir.Constant(simd.F32, 0.0))  # no flag allows to fold this
        return builder.fadd(found, spoiled)

    return types.float32(types.intp, types.intp), codegen


@intrinsic
def _write_values(typing_context, x, blocks, factor, flip, target):
    """A row times ``factor`` as integers: their high bytes at ``target``, in groups of DEPTH that
    lie X_GROUP apart, low ones a tile behind; ``flip`` is added to each byte."""

    def codegen(context, builder, signature, args):
        if not digits.VNNI:
            return context.get_dummy_value()
        x, blocks, factor, flip, target = args
        index, wide = simd._index, ir.VectorType(simd.I32, BLOCK)
        line, narrow = ir.VectorType(simd.F32, BLOCK), ir.VectorType(_I8, BLOCK)
        factor = simd._splat(builder, factor, line)
        flip = simd._splat(builder, builder.trunc(flip, _I8), narrow)

        def block(at, nothing):
            place = builder.add(x, builder.mul(at, index(BLOCK * 4)))
            whole = digits._to_integers(
                builder, builder.fmul(simd.load(builder, place, line), factor)
            )
            high = builder.ashr(builder.add(whole, simd.filled(wide, 128)), simd.filled(wide, 8))
            group = builder.mul(builder.lshr(at, index(1)), index(X_GROUP))
            half = builder.mul(builder.and_(at, index(1)), index(BLOCK))
            place = builder.add(target, builder.add(group, half))
            for number, values in enumerate((high, whole)):
                values = builder.add(builder.trunc(values, narrow), flip)
                address = simd.at(builder, place, number * TILE_BYTES)
                builder.store(values, builder.inttoptr(address, narrow.as_pointer()), align=1)
            return []

        simd._emit_loop(builder, index(0), blocks, 1, [], block)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.intp, types.intp), codegen


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _write_row(x, inputs, flip, target, scale):
    """A row, float32 [inputs], to integers; ``flip`` is 128 for bytes without sign, or 0. Where a
    value is not finite the scale is NaN."""
    largest = _largest(x, inputs // BLOCK)
    factor, unit = np.float32(0.0), np.float32(0.0)
    if largest > np.float32(SMALLEST):
        factor, unit = np.float32(LIMIT) / largest, largest / np.float32(LIMIT)
    elif not largest <= np.float32(SMALLEST):
        unit = largest
    _write_values(x, inputs // BLOCK, factor, flip, target)
    numba.carray(simd.floats(scale), 1)[0] = unit


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _x_stride(inputs):
    """Bytes of 16 rows as integers."""
    return (inputs + DEPTH - 1) // DEPTH * X_GROUP


# --------------------------------------------------------------------------- products


def _tiles(kind: int):
    """An intrinsic: both sums of 16 rows and a panel (+)= a chunk's products, on the tile unit.

    Arguments: address of the rows' tiles, of the panel's, of the sums int32 [4, 16, 16] (two
    halves of high times high, two of the rest), groups, and whether to add to the sums.
    """

    @intrinsic
    def tiles(typing_context, x, panel, sums, groups, accumulate):
        def codegen(context, builder, signature, args):
            if TILES_PRESENT:
                _emit_tiles(builder, kind, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), codegen

    return tiles


def _emit_tiles(builder, kind, x, panel, sums, groups, accumulate):
    """Tiles 0 and 1 are sums of high bytes, 2 and 3 the others'; 4 and 5 weights, 6 and 7 rows."""
    index, call, tile = simd._index, amx._call, amx._tile
    adding = builder.icmp_signed("!=", accumulate, index(0))
    with builder.if_else(adding) as (then, otherwise):
        with then:
            for number in range(4):
                amx._load(builder, number, simd.at(builder, sums, number * TILE_BYTES), index(64))
        with otherwise:
            for number in range(4):
                call(builder, "llvm.x86.tilezero", tile(number))

    def group(at, nothing):
        rows = builder.add(x, builder.mul(at, index(X_GROUP)))
        weights = builder.add(panel, builder.mul(at, index(group_bytes(kind))))

        def load(number, address, which):
            amx._load(builder, number, simd.at(builder, address, which * TILE_BYTES), index(64))

        def multiply(total, of_x, of_weights):
            call(builder, "llvm.x86.tdpbssd", *map(tile, (total, of_x, of_weights)))

        def prefetch(first, last):
            for offset in range(first, last, LINE):
                simd.prefetch(builder, simd.at(builder, weights, simd.AHEAD + offset))

        load(4, weights, 0)
        load(6, rows, 0)
        multiply(0, 6, 4)
        prefetch(0, TILE_BYTES)
        load(7, rows, 1)
        multiply(2, 7, 4)
        load(5, weights, 1)
        multiply(1, 6, 5)
        prefetch(TILE_BYTES, 2 * TILE_BYTES)
        multiply(3, 7, 5)
        if kind == WHOLE16:
            load(4, weights, 2)
            multiply(2, 6, 4)
            prefetch(2 * TILE_BYTES, 3 * TILE_BYTES)
            load(5, weights, 3)
            multiply(3, 6, 5)
            prefetch(3 * TILE_BYTES, 4 * TILE_BYTES)
        return []

    simd._emit_loop(builder, index(0), groups, 1, [], group)
    for number in range(4):
        pointer = builder.inttoptr(simd.at(builder, sums, number * TILE_BYTES), amx._BYTES)
        call(builder, "llvm.x86.tilestored64", tile(number), pointer, index(64))


def _vectors(kind: int, rows: int):
    """An intrinsic: both sums of a few rows and a panel, by products of bytes on the vector unit.

    Arguments: address of the rows' bytes, to which 128 was added; of the panel; of the sums; and
    groups.
    """

    @intrinsic
    def vectors(typing_context, x, panel, sums, groups):
        def codegen(context, builder, signature, args):
            if digits.VNNI:
                _emit_vectors(builder, kind, rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

    return vectors


def _emit_vectors(builder, kind, rows, x, panel, sums, groups):
    index = simd._index
    starts = [
        simd.load(builder, simd.at(builder, panel, (1 + which) * PANEL * 4 + half * 64), _WORDS)
        for which in range(2)
        for half in range(2)
    ]
    first = simd.at(builder, panel, HEAD_BYTES)

    def line(at, totals):
        """One line of a group: four inputs."""
        group, number = builder.lshr(at, index(4)), builder.and_(at, index(15))
        place = builder.add(x, builder.mul(group, index(X_GROUP)))
        place = builder.add(place, builder.mul(number, index(4)))
        weights = builder.add(first, builder.mul(group, index(group_bytes(kind))))
        weights = builder.add(weights, builder.mul(number, index(64)))
        codes = []
        for part in range(2 if kind == WHOLE8 else 4):
            address = simd.at(builder, weights, part * TILE_BYTES)
            simd.prefetch(builder, simd.at(builder, address, simd.AHEAD))
            codes.append(simd.load(builder, address, _WORDS))
        results = list(totals)

        def multiply(slot, factor, code):
            results[slot] = digits._products(builder, results[slot], factor, code)

        for row in range(rows):
            high, low = (
                simd.broadcast(
                    builder, simd.at(builder, place, row * DEPTH + which * TILE_BYTES), _WORDS
                )
                for which in range(2)
            )
            for half in range(2):
                multiply(4 * row + half, high, codes[half])
                multiply(4 * row + 2 + half, low, codes[half])
                if kind == WHOLE16:
                    multiply(4 * row + 2 + half, high, codes[2 + half])
        return results

    count = builder.mul(groups, index(16))
    totals = simd._emit_loop(builder, index(0), count, 1, starts * rows, line)
    for row in range(rows):
        for which in range(4):
            place = simd.at(builder, sums, which * TILE_BYTES + row * 64)
            pointer = builder.inttoptr(place, _WORDS.as_pointer())
            builder.store(totals[4 * row + which], pointer, align=4)


_tiles8, _tiles16 = _tiles(WHOLE8), _tiles(WHOLE16)
_vectors8_1, _vectors8_4 = (_vectors(WHOLE8, rows) for rows in (1, 4))
_vectors16_1, _vectors16_4 = (_vectors(WHOLE16, rows) for rows in (1, 4))


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _by_vectors(kind, rows, x, panel, sums, groups):
    row = 0
    while rows - row >= 4:
        if kind == WHOLE8:
            _vectors8_4(x + row * DEPTH, panel, sums + row * 64, groups)
        else:
            _vectors16_4(x + row * DEPTH, panel, sums + row * 64, groups)
        row += 4
    while row < rows:
        if kind == WHOLE8:
            _vectors8_1(x + row * DEPTH, panel, sums + row * 64, groups)
        else:
            _vectors16_1(x + row * DEPTH, panel, sums + row * 64, groups)
        row += 1


# --------------------------------------------------------------------------- outcomes


@intrinsic
def _put(typing_context, rows, sums, scales, panel, out, stride, add):
    """The outcomes of up to 16 rows and a panel: from their sums, the rows' scales and those at
    ``panel`` to ``out``, whose lines lie ``stride`` bytes apart, or, with ``add``, added to it.
    Nothing is left to the compiler to join or not."""

    def codegen(context, builder, signature, args):
        if not digits.VNNI:
            return context.get_dummy_value()
        rows, sums, scales, panel, out, stride, add = args
        adding = builder.icmp_signed("!=", add, simd._index(0))
        factors = [
            simd.load(builder, simd.at(builder, panel, half * 64), _LINE) for half in range(2)
        ]

        def emit(with_add):
            def row(at, nothing):
                scale = builder.add(scales, builder.mul(at, simd._index(4)))
                scale = simd.broadcast(builder, scale, _LINE)
                place = builder.add(sums, builder.mul(at, simd._index(64)))
                target = builder.add(out, builder.mul(at, stride))
                for half, factor in enumerate(factors):
                    value = _outcome(builder, simd.at(builder, place, half * TILE_BYTES))
                    value = builder.fmul(value, builder.fmul(factor, scale))
                    address = simd.at(builder, target, half * 64)
                    pointer = builder.inttoptr(address, _LINE.as_pointer())
                    if with_add:
                        value = builder.fadd(builder.load(pointer, align=4), value)
                    builder.store(value, pointer, align=4)
                return []

            simd._emit_loop(builder, simd._index(0), rows, 1, [], row)

        with builder.if_else(adding) as (then, otherwise):
            with then:
                emit(True)
            with otherwise:
                emit(False)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), codegen


def _outcome(builder, place):
    """256 times the sum of high bytes, and the other sum."""
    high = builder.sitofp(simd.load(builder, place, _WORDS), _LINE)
    rest = builder.sitofp(
        simd.load(builder, simd.at(builder, place, 2 * TILE_BYTES), _WORDS), _LINE
    )
    shift = simd.filled(_LINE, 256.0)
    return simd.fused(builder, high, shift, rest)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _multiply(p, panel, out, stride, add, sums):
    """All rows against the panel at an address; rows were written by ``_prepare``."""
    groups = (p.inputs + DEPTH - 1) // DEPTH
    size = _group_bytes(p.kind)
    chunks = 1
    if p.rows > 2 * ROWS and p.tiles != 0:
        chunks = (groups * size + CHUNK_BYTES - 1) // CHUNK_BYTES
    chunk = (groups + chunks - 1) // chunks
    for at in range(0, groups, chunk):
        count = min(chunk, groups - at)
        weights = panel + HEAD_BYTES + at * size
        for first in range(0, p.rows, ROWS):
            rows, tile = min(ROWS, p.rows - first), first // ROWS
            x = p.split + tile * _x_stride(p.inputs) + at * X_GROUP
            place = sums + (tile * SUMS_BYTES if chunks > 1 else 0)
            if p.tiles == 0:
                _by_vectors(p.kind, rows, x, panel, place, groups)
            elif p.kind == WHOLE8:
                _tiles8(x, weights, place, count, at)
            else:
                _tiles16(x, weights, place, count, at)
            if at + count == groups:
                scales = _x_scales(p) + first * 4
                _put(rows, place, scales, panel, out + first * stride * 4, stride * 4, add)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _panel(p, panel, scratch):
    """All rows against one panel. The last one's outputs go through a place of their own."""
    first = panel * PANEL
    width = min(PANEL, p.outputs - first)
    weight = p.weight + panel * (
        HEAD_BYTES + (p.inputs + DEPTH - 1) // DEPTH * _group_bytes(p.kind)
    )
    out = p.out + first * 4
    if width == PANEL:
        _multiply(p, weight, out, p.outputs, p.add, scratch)
    else:
        spare = scratch + (p.rows + ROWS - 1) // ROWS * SUMS_BYTES
        _multiply(p, weight, spare, PANEL, 0, scratch)
        copy_last(p, first, width, spare)
    if p.bias != 0:
        add_bias(p, first, width)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _x_scales(p):
    """Where the scales of all rows lie: behind their bytes."""
    return p.split + (p.rows + ROWS - 1) // ROWS * _x_stride(p.inputs)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _prepare(p, thread):
    """One thread's share of the rows as integers, for all."""
    threads = max(1, team_size()) if p.threads > 1 else 1
    first, last = p.rows * thread // threads, p.rows * (thread + 1) // threads
    if p.norm != 0:
        eps = simd.load_f32(p.norm, p.inputs)
        rms_norm(p.raw, p.norm, eps, p.inputs, p.x, first, last)
    for row in range(first, last):
        place = p.split + row // ROWS * _x_stride(p.inputs) + row % ROWS * DEPTH
        flip = 128 if p.tiles == 0 else 0
        _write_row(p.x + row * p.x_stride * 4, p.inputs, flip, place, _x_scales(p) + row * 4)
    if p.threads > 1:
        team_barrier()


def whole_product(params):
    """The kernel of one product. Of ``panel_product.Params``, ``split`` is where the rows are kept
    as integers, and ``tiles`` is 0 where the vector unit multiplies."""
    p = numba.carray(params, 1)[0]
    thread = thread_index() if p.threads > 1 else 0
    scratch = p.scratch + thread * p.scratch_stride
    _prepare(p, thread)
    if p.tiles != 0:
        amx.begin(p.tiles)
    while True:
        first = next_unit(p.counter) * p.panels_per_unit
        if first >= p.panels:
            break
        for panel in range(first, min(first + p.panels_per_unit, p.panels)):
            _panel(p, panel, scratch)
    if p.tiles != 0:
        amx.end()


def split_bytes(rows: int, inputs: int) -> int:
    """What all threads share: rows as integers, and their scales."""
    return -(-rows // ROWS) * (-(-inputs // DEPTH) * X_GROUP + LINE)


def scratch_bytes(rows: int) -> int:
    """What one thread needs: sums, and the outputs of the last panel."""
    return -(-rows // ROWS) * (SUMS_BYTES + ROWS * PANEL * 4)


def tile_setup(team: Team) -> np.ndarray | None:
    """The tile unit's configuration, where it does the products; ``exact`` does not mind."""
    return team.tile_setup if TILES_PRESENT else None


class WholeProduct(PanelProduct):
    """Runs the product of rows with a weight in whole numbers. Used by one thread.

    Attributes:
        unit: what multiplies, for people to read.
    """

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._kernel = team.compile(whole_product, Params)
        self._setup = tile_setup(team)
        self._params.tiles = 0 if self._setup is None else self._setup.ctypes.data
        self.unit = "VNNI" if self._setup is None else "the tile unit"

    def __call__(
        self,
        x: torch.Tensor,
        weight: Panels,
        bias: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``PanelProduct``. Raises ValueError where the weight is of another kind too."""
        if weight.kind not in KINDS:
            raise ValueError("the weight is not in whole numbers")
        return super().__call__(x, weight, bias, norm)

    def _reserve(self, rows: int, inputs: int) -> None:
        self._max_rows, self._max_inputs = rows, inputs
        p = self._params
        p.scratch_stride = scratch_bytes(rows)
        self._scratch = aligned_bytes(p.threads * p.scratch_stride)
        self._split = aligned_bytes(split_bytes(rows, inputs))
        self._normed = torch.empty(rows * inputs)
        p.scratch, p.split = self._scratch.ctypes.data, self._split.ctypes.data
