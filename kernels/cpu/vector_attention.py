"""The pieces of attention on the vector unit: products, weights, and the cache as it lies there.

The layout is that of ``trioserve.kernels.cpu.paged_attention``, float32. A product's right side is
16 columns: tokens for scores, dimensions for values.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import simd
from trioserve.kernels.cpu.runtime import FASTMATH, LINE

SEGMENT = 128  # context tokens whose scores are held at once
QUERIES = 24  # query vectors of one item, about: tokens × heads per KV head
FEW = 8  # query vectors for which reading keys and values takes longer than what is done with them
AHEAD = 4  # groups of tokens that they are asked for ahead


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def exact_product(rows, a, lda, b, ldb, c, ldc, k, accumulate):
    """As ``product``, every sum in the order of k."""
    row = 0
    while rows - row >= 6:
        simd.exact6(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, accumulate)
        row += 6
    if rows - row >= 4:
        simd.exact4(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, accumulate)
        row += 4
    while row < rows:
        simd.exact1(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, accumulate)
        row += 1


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def product(rows, a, lda, b, ldb, c, ldc, k, accumulate):
    """C[rows, 16] (+)= A[rows, k] · B[k, 16]."""
    row = 0
    while rows - row >= 6:
        simd.tile6(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, accumulate)
        row += 6
    left = rows - row
    a += row * lda * 4
    c += row * ldc * 4
    if left >= 4:
        simd.tile4(a, lda, b, ldb, c, ldc, k, accumulate)
        a += 4 * lda * 4
        c += 4 * ldc * 4
        left -= 4
    if left == 3:
        simd.tile3(a, lda, b, ldb, c, ldc, k, accumulate)
    elif left == 2:
        simd.tile2(a, lda, b, ldb, c, ldc, k, accumulate)
    elif left == 1:
        simd.tile1(a, lda, b, ldb, c, ldc, k, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def narrow_product(rows, a, lda, b, ldb, c, ldc, k, exact):
    """C[rows, 8] = A[rows, k] · B[k, 8]; every sum in the order of k if ``exact``."""
    row = 0
    if exact != 0:
        while rows - row >= 4:
            simd.exact_narrow4(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, 0)
            row += 4
        while row < rows:
            simd.exact_narrow1(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, 0)
            row += 1
    while rows - row >= 4:
        simd.narrow4(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, 0)
        row += 4
    while row < rows:
        simd.narrow1(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, 0)
        row += 1


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def store(p, token):
    """Write one token's keys and values into its slot."""
    dim, size = p.head_dim, p.block_size
    slot = numba.carray(simd.int64s(p.slots), p.num_tokens)[token]
    block, offset = slot // size, slot % size
    key = p.key + token * p.key_stride * 4
    value = p.value + token * p.value_stride * 4
    for head in range(p.kv_heads):
        line = block * p.kv_heads + head
        source = numba.carray(simd.floats(key + head * dim * 4), dim)
        column = numba.carray(simd.floats(p.keys + (line * dim * size + offset) * 4), dim * size)
        for j in range(dim):
            column[j * size] = source[j]
        source = numba.carray(simd.floats(value + head * dim * 4), dim)
        target = numba.carray(simd.floats(p.values + (line * size + offset) * p.lanes * 4), dim)
        for j in range(dim):
            target[j] = source[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def load_queries(p, first, count, head, queries, scale):
    """Copy a tile's query vectors together, token by token and head by head, times ``scale``."""
    target = numba.carray(simd.floats(queries), count * p.group * p.head_dim)
    width = p.group * p.head_dim
    for token in range(count):
        source = numba.carray(
            simd.floats(p.query + ((first + token) * p.query_stride + head * width) * 4), width
        )
        for j in range(width):
            target[token * width + j] = source[j] * scale


@intrinsic
def _ask(typing_context, address, lines, pitch):
    """Ask for cache lines that lie ``pitch`` bytes apart."""

    def codegen(context, builder, signature, args):
        address, lines, pitch = args

        def one(at, nothing):
            simd.prefetch(builder, builder.add(address, builder.mul(at, pitch)))
            return []

        simd._emit_loop(builder, simd._index(0), lines, 1, [], one)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _ask_values(p, table, head, position, count):
    """Ask for the values of ``count`` tokens of one block."""
    line = table[position // p.block_size] * p.kv_heads + head
    place = p.values + (line * p.block_size + position % p.block_size) * p.lanes * 4
    _ask(place, count * p.lanes * 4 // LINE, LINE)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def scores(p, table, head, first, count, queries, rows, scores):
    """scores[rows, SEGMENT] of ``count`` keys from position ``first``, a multiple of 16.

    Columns past ``count`` may hold anything. Few rows wait for memory: the keys of the next groups
    of tokens are asked for meanwhile, and after the last ones the values.
    """
    width = min(p.block_size, simd.WIDTH)
    for column in range(0, count, width):
        position = first + column
        line = table[position // p.block_size] * p.kv_heads + head
        tile = p.keys + (line * p.head_dim * p.block_size + position % p.block_size) * 4
        if rows <= FEW:
            later = column + AHEAD * width
            if later < count:
                position = first + later
                line = table[position // p.block_size] * p.kv_heads + head
                place = p.keys + (line * p.head_dim * p.block_size + position % p.block_size) * 4
                _ask(place, p.head_dim, p.block_size * 4)
            else:
                position = first + (later - count) // width * width
                if position < first + count:
                    _ask_values(p, table, head, position, width)
        target = scores + column * 4
        dim, size = p.head_dim, p.block_size
        if width != simd.WIDTH:
            narrow_product(rows, queries, dim, tile, size, target, SEGMENT, dim, p.exact)
        elif p.exact != 0:
            exact_product(rows, queries, dim, tile, size, target, SEGMENT, dim, 0)
        else:
            product(rows, queries, dim, tile, size, target, SEGMENT, dim, 0)


@numba.njit(fastmath=FASTMATH | {"nnan"}, error_model="numpy")
def _largest(scores, count, largest):
    """The maximum. A NaN may be passed over: the weights made with it still are NaN."""
    for t in range(count):
        if scores[t] > largest:
            largest = scores[t]
    return largest


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def softmax(scores, count, valid, state, row, sums, lanes):
    """Turn one row of scores into weights relative to its running maximum.

    ``[valid, count)`` lie in the row's future: weight 0. Sums so far are scaled to the new maximum.
    """
    before = state[2 * row]
    largest = _largest(scores, valid, before)
    total = np.float32(0.0)
    for t in range(valid):
        weight = simd.exp_f32(scores[t] - largest)
        scores[t] = weight
        total += weight
    for t in range(valid, count):
        scores[t] = np.float32(0.0)
    if before == -np.inf:
        state[2 * row + 1] = total
    else:
        factor = simd.exp_f32(before - largest)
        state[2 * row + 1] = state[2 * row + 1] * factor + total
        if factor != np.float32(1.0):
            for j in range(lanes):
                sums[j] *= factor
    state[2 * row] = largest


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def add_values(p, table, head, first, count, weights, rows, sums):
    """sums[rows, lanes] += weights[rows, count] · the values from position ``first``."""
    done = 0
    while done < count:
        position = first + done
        offset = position % p.block_size
        piece = min(p.block_size - offset, count - done)
        line = table[position // p.block_size] * p.kv_heads + head
        tile = p.values + (line * p.block_size + offset) * p.lanes * 4
        part = weights + done * 4
        later = done + AHEAD * simd.WIDTH
        if rows <= FEW and later < count:
            _ask_values(p, table, head, first + later, min(piece, simd.WIDTH))
        for lane in range(0, p.lanes, simd.WIDTH):
            b, c, lanes = tile + lane * 4, sums + lane * 4, p.lanes
            if p.exact != 0:
                exact_product(rows, part, SEGMENT, b, lanes, c, lanes, piece, 1)
            else:
                product(rows, part, SEGMENT, b, lanes, c, lanes, piece, 1)
        done += piece
