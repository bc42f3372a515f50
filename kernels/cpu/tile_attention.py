"""The two products of attention on the tile unit, for many query vectors of one KV head.

Queries and weights are split into bfloat16 parts like rows of x (``trioserve.kernels.cpu.amx``),
keys and values like weights, all of them in two parts: what a token gets here differs from what the
vector unit gives it by 2^-16 of the terms. Keys and values are split once for all the query vectors
of an item, so an item has more of them than where the vector unit works.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import amx, simd
from trioserve.kernels.cpu.amx import COLUMNS, DEPTH, GROUP_BYTES, ROWS, TILE_BYTES
from trioserve.kernels.cpu.runtime import FASTMATH

QUERIES = 96  # query vectors of one item, about: tokens × heads per KV head
PARTS = 2
HALF = 16  # columns of a tile

_LINE, _WORDS = ir.VectorType(simd.F32, HALF), ir.VectorType(simd.I32, HALF)


def supports(head_dim: int, block_size: int) -> bool:
    """Whether keys and values of this shape fill whole tiles."""
    return head_dim % DEPTH == 0 and block_size % HALF == 0


def scratch_bytes(rows: int, head_dim: int, segment: int) -> int:
    """What one item needs beside its queries, scores and sums: see ``_places``."""
    padded = -(-rows // ROWS) * ROWS
    tiles = max(head_dim, segment) // DEPTH * GROUP_BYTES
    return ROWS * COLUMNS * 4 + tiles + padded * (head_dim + segment) * 2 * PARTS


@intrinsic
def _store_half(typing_context, first, second, target):
    """Two lines of 16 float32 to one row of a tile's high and low parts, side by side."""

    def codegen(context, builder, signature, args):
        first, second, target = args
        _emit_half(builder, _load(builder, first), _load(builder, second), target)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def _store_last(typing_context, first, target):
    """The same where there is no second line."""

    def codegen(context, builder, signature, args):
        nothing = ir.Constant(_LINE, [0.0] * HALF)
        _emit_half(builder, _load(builder, args[0]), nothing, args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _load(builder, address):
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)


def _emit_half(builder, first, second, target):
    shift, upper = (ir.Constant(_WORDS, [value] * HALF) for value in (16, -0x10000))
    half = ir.Constant(_WORDS, [0x8000] * HALF)
    parts = []
    for value in (first, second):
        high = builder.and_(builder.add(builder.bitcast(value, _WORDS), half), upper)
        low = builder.fsub(value, builder.bitcast(high, _LINE))
        parts.append((high, builder.add(builder.bitcast(low, _WORDS), half)))
    for part, (even, odd) in enumerate(zip(*parts, strict=True)):
        pair = builder.or_(builder.lshr(even, shift), builder.and_(odd, upper))
        place = builder.add(target, simd._index(part * 2 * TILE_BYTES))
        builder.store(pair, builder.inttoptr(place, _WORDS.as_pointer()), align=4)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _places(p, rows, segment, work):
    """Where in an item's work space are: room for a tile row of results, tiles of keys or values,
    split queries, split weights."""
    tiles = work + ROWS * COLUMNS * 4
    queries = tiles + max(p.head_dim, segment) // DEPTH * GROUP_BYTES
    padded = (rows + ROWS - 1) // ROWS * ROWS
    return work, tiles, queries, queries + padded * p.head_dim * 2 * PARTS


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _split(x, stride, rows, inputs, target):
    """Rows of queries or weights, float32 [rows, inputs], to tiles."""
    padded = (rows + ROWS - 1) // ROWS * ROWS
    amx.split_x(x, stride, 0, padded, rows, inputs, PARTS, target)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def begin(p, queries, rows, segment, work):
    """Set the thread's tiles up and split an item's queries, float32 [rows, head_dim]."""
    amx.begin(p.tiles)
    _split(queries, p.head_dim, rows, p.head_dim, _places(p, rows, segment, work)[2])


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def scores(p, table, head, first, count, rows, work, out, stride):
    """out[rows, stride] = the queries · ``count`` keys from position ``first``, a multiple of 16.

    Columns past ``count`` may hold anything.
    """
    dim, size = p.head_dim, p.block_size
    spare, tiles, queries, _ = _places(p, rows, stride, work)
    x_stride, groups = ROWS * dim * 2 * PARTS, dim // DEPTH
    for column in range(0, count, COLUMNS):
        for half in range(2):
            position = first + column + half * HALF
            if position >= first + count:
                break
            line = table[position // size] * p.kv_heads + head
            keys = p.keys + (line * dim * size + position % size) * 4
            for pair in range(dim // 2):
                target = tiles + pair // ROWS * GROUP_BYTES + pair % ROWS * 64
                key = keys + 2 * pair * size * 4
                _store_half(key, key + size * 4, target + half * TILE_BYTES)
        target = out + column * 4
        amx.product(rows, PARTS, queries, x_stride, tiles, target, stride * 4, groups, 0, spare)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def add_values(p, table, head, first, count, weights, stride, rows, work, sums):
    """sums[rows, lanes] += weights[rows, stride] · ``count`` values from position ``first``.

    Weights past ``count`` up to the next multiple of 32 are overwritten with zeros.
    """
    size, lanes = p.block_size, p.lanes
    spare, tiles, _, split = _places(p, rows, stride, work)
    groups = (count + DEPTH - 1) // DEPTH
    for row in range(rows):
        line = numba.carray(simd.floats(weights + row * stride * 4), groups * DEPTH)
        line[count:] = np.float32(0.0)
    _split(weights, stride, rows, groups * DEPTH, split)
    x_stride = ROWS * groups * DEPTH * 2 * PARTS
    for lane in range(0, lanes, COLUMNS):
        for pair in range(groups * ROWS):
            target = tiles + pair // ROWS * GROUP_BYTES + pair % ROWS * 64
            token = first + min(2 * pair, count - 1)
            line_number = table[token // size] * p.kv_heads + head
            value = p.values + ((line_number * size + token % size) * lanes + lane) * 4
            for half in range(2):
                if 2 * pair + 1 < count:
                    _store_half(value, value + lanes * 4, target + half * TILE_BYTES)
                elif 2 * pair < count:
                    _store_last(value, target + half * TILE_BYTES)
                else:  # what memory happens to hold may be no number, and 0 times that is none
                    _clear(target + half * TILE_BYTES)
                value += HALF * 4
        out = sums + lane * 4
        amx.product(rows, PARTS, split, x_stride, tiles, out, lanes * 4, groups, 1, spare)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _clear(target):
    """One row of a tile's both parts."""
    for part in range(2):
        words = numba.carray(simd.int64s(target + part * 2 * TILE_BYTES), 8)
        for i in range(8):
            words[i] = 0
