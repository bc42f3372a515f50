"""Attention on the tile unit, which multiplies pairs of bfloat16.

A key or value lies in the cache as the two bfloat16 values whose sum it is to 2^-17, side by side
where a float32 would be: the upper half of the word the high part, the lower half the rest. So 16
words of 16 lines are a tile that the unit takes as it lies in the cache, with one token or one
dimension where it expects a pair of inputs. Against it goes a query or weight twice in a word: its
high part times both parts in one instruction, and its low part times both in a second. Nothing is
left out, and what a token gets is off by 2^-16 of the terms.

Many query vectors of one KV head (``attend_many``) go 32 at a time against SEGMENT tokens: scores,
weights relative to the running maximum, which become tiles where the scores lay, and sums. Few of
them (``attend_few``, as for a generated token) fill no tile; their high and low parts lie one
below the other in the same one, and the results are added. That reads the cache once and computes
so little that memory is the limit: what comes next is asked for ahead (``simd.prefetch``), across
the borders of blocks.

The running maximum and rescaled sums are those of Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018).
"""

from __future__ import annotations

import math

import numba
import numpy as np

from trioserve.kernels.cpu import simd, tile_code
from trioserve.kernels.cpu.amx import TILE_BYTES
from trioserve.kernels.cpu.runtime import FASTMATH, LINE
from trioserve.kernels.cpu.tile_code import AT_ONCE, PITCH, SEGMENT, SIDE, UNROLL

QUERIES = 96  # query vectors of one item, about: tokens × heads per KV head
ROWS = 2 * SIDE  # query vectors that are multiplied at once
FEW = SIDE // 2  # query vectors that fit into one tile in two parts
BESIDE = 4  # tokens of a group from which on their keys are stored together
LISTED = 2 * SEGMENT // SIDE + 2 * AT_ONCE  # addresses: keys, values, the next item's keys
LOG2E, LN2 = np.float32(1 / math.log(2)), np.float32(math.log(2))


def supports(head_dim: int, block_size: int) -> bool:
    """Whether keys and values of this shape fill whole tiles."""
    return head_dim % SIDE == 0 and block_size % SIDE == 0


def scratch_bytes(rows: int, head_dim: int) -> int:
    """What one thread needs for items of so many query vectors: see ``_places``."""
    padded = -(-rows // ROWS) * ROWS
    return (
        LISTED * 8 + SIDE * head_dim * 4 + 2 * ROWS * PITCH + padded * (head_dim * 12 + 72) + LINE
    )


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _places(p, rows, scratch):
    """Where in a thread's scratch are: addresses of keys and values, room for a last group of
    values, scores and high parts of weights, low parts, queries, sums, a line for the sum of each
    row's weights, states."""
    padded = (rows + ROWS - 1) // ROWS * ROWS
    listed = (scratch + LINE - 1) // LINE * LINE
    last = listed + LISTED * 8
    scores = last + SIDE * p.lanes * 4
    low = scores + ROWS * PITCH
    queries = low + ROWS * PITCH
    sums = queries + padded * p.head_dim * 8
    totals = sums + padded * p.lanes * 4
    return listed, last, scores, low, queries, sums, totals, totals + padded * LINE


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def store(p, first, last):
    """Write the keys and values of the step's tokens [first, last) into their slots."""
    slots = numba.carray(simd.int64s(p.slots), p.num_tokens)
    while first < last:
        slot = slots[first]
        count = 1  # tokens side by side in one group of 16
        while first + count < last and slots[first + count] == slot + count:
            if (slot + count) % SIDE == 0:
                break
            count += 1
        if count >= BESIDE:
            _store_keys(p, first, count, slot)
        else:
            for i in range(count):
                _store_key(p, first + i, slot + i)
        for i in range(count):
            _store_value(p, first + i, slot + i)
        first += count


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _store_keys(p, token, count, slot):
    dim, size = p.head_dim, p.block_size
    lane = slot % SIDE
    offset = slot % size - lane
    for head in range(p.kv_heads):
        line = slot // size * p.kv_heads + head
        source = p.key + (token * p.key_stride + head * dim) * 4
        target = p.keys + (line * dim * size + offset) * 4
        for j in range(0, dim, SIDE):
            place = target + j * size * 4
            tile_code.store_across(source + j * 4, p.key_stride * 4, count, lane, place, size * 4)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _store_key(p, token, slot):
    dim, size = p.head_dim, p.block_size
    for head in range(p.kv_heads):
        line = slot // size * p.kv_heads + head
        source = numba.carray(simd.floats(p.key + (token * p.key_stride + head * dim) * 4), dim)
        target = p.keys + (line * dim * size + slot % size) * 4
        column = numba.carray(simd.int32s(target), dim * size)
        for j in range(dim):
            column[j * size] = tile_code.pair(source[j])


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _store_value(p, token, slot):
    dim, size = p.head_dim, p.block_size
    for head in range(p.kv_heads):
        line = slot // size * p.kv_heads + head
        place = p.value + (token * p.value_stride + head * dim) * 4
        source = numba.carray(simd.floats(place), dim)
        place = p.values + (line * size + slot % size) * dim * 4
        target = numba.carray(simd.int32s(place), dim)
        for j in range(dim):
            target[j] = tile_code.pair(source[j])


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _list(p, table, head, first, count, keys, values, last):
    """Write the addresses of the groups of 16 tokens of [first, first + count) to two lists.

    The last group of values is copied to ``last``, with zeros for what is not there yet: what
    memory happens to hold may be no number, and 0 times that is none.
    """
    dim, size = p.head_dim, p.block_size
    groups = (count + SIDE - 1) // SIDE
    keys = numba.carray(simd.int64s(keys), groups)
    values = numba.carray(simd.int64s(values), groups)
    for group in range(groups):
        position = first + group * SIDE
        line = table[position // size] * p.kv_heads + head
        keys[group] = p.keys + (line * dim * size + position % size) * 4
        values[group] = p.values + (line * size + position % size) * dim * 4
    whole = count // SIDE
    if whole < groups:
        here = (count - whole * SIDE) * dim
        source = numba.carray(simd.int32s(values[whole]), SIDE * dim)
        target = numba.carray(simd.int32s(last), SIDE * dim)
        for j in range(here):
            target[j] = source[j]
        target[here:] = 0
        values[whole] = last


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _rescale(scores, vectors, valid, state, row, total, sums, lanes, fresh):
    """Find a row's largest score; bring what was summed up so far into proportion to it."""
    before = state[2 * row]
    if valid == vectors * SIDE and vectors % UNROLL == 0:
        largest = tile_code.largest_whole(scores, vectors, valid, before)
    else:
        largest = tile_code.largest(scores, vectors, valid, before)
    state[2 * row] = largest
    if fresh:
        line = numba.carray(simd.floats(total), SIDE)
        line[:] = np.float32(0.0)
    elif largest != before:
        factor = simd.exp_f32((before - largest) * LN2)
        tile_code.times(total, 1, factor)
        tile_code.times(sums, lanes // SIDE, factor)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _weigh(scores, low, vectors, valid, total, largest):
    """Turn one row of scores into weights and sum them up."""
    if valid == vectors * SIDE and vectors % UNROLL == 0:
        tile_code.weights_whole(scores, low, vectors, valid, total, largest)
    else:
        tile_code.weights(scores, low, vectors, valid, total, largest)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _sum_up(rows, totals, state):
    """The sum of each row's weights."""
    for row in range(rows):
        state[2 * row + 1] = tile_code.sum_of(totals + row * LINE)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _all_scores(p, rows, count, queries, listed, scores):
    """scores[rows, count] of up to ROWS queries."""
    groups, pitch = p.head_dim // SIDE, p.block_size * 4
    column = 0
    while column < count:
        keys, out = listed + column // SIDE * 8, scores + column * 4
        if count - column > SIDE:
            if rows > SIDE:
                tile_code.scores22(queries, groups, keys, pitch, out)
            else:
                tile_code.scores12(queries, groups, keys, pitch, out)
        elif rows > SIDE:
            tile_code.scores21(queries, groups, keys, pitch, out)
        else:
            tile_code.scores11(queries, groups, keys, pitch, out)
        column += 2 * SIDE


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _mix(p, rows, groups, high, low, listed, sums, accumulate):
    """sums[rows, lanes] (+)= weights of up to ROWS queries · values."""
    pitch = p.lanes * 4
    lane = 0
    while lane < pitch:
        out = sums + lane
        if pitch - lane > LINE:
            if rows > SIDE:
                tile_code.mix22(high, low, listed, groups, lane, pitch, out, accumulate)
            else:
                tile_code.mix12(high, low, listed, groups, lane, pitch, out, accumulate)
        elif rows > SIDE:
            tile_code.mix21(high, low, listed, groups, lane, pitch, out, accumulate)
        else:
            tile_code.mix11(high, low, listed, groups, lane, pitch, out, accumulate)
        lane += 2 * LINE


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _query(p, token, head, row):
    """Address of a query vector: row by row the heads of a token, then the next token's."""
    place = (token + row // p.group) * p.query_stride
    return p.query + (place + (head * p.group + row % p.group) * p.head_dim) * 4


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def attend_many(p, table, head, token, position, rows, first_key, last_key, scratch, scale):
    """Attention of many query vectors of one KV head.

    Args:
        token: the first of them among the step's tokens. position: its own in the sequence.
        rows: query vectors, those of one token one after another.
        first_key, last_key: context tokens, the first a multiple of 16.

    Returns: addresses of states (largest score in powers of two, sum of weights) and sums.
    """
    listed, last, scores, low, queries, sums, totals, states = _places(p, rows, scratch)
    groups = p.head_dim // SIDE
    for row in range(rows):
        source = _query(p, token, head, row)
        target = queries + row // SIDE * groups * 2 * TILE_BYTES + row % SIDE * LINE
        for group in range(groups):
            place = target + group * 2 * TILE_BYTES
            tile_code.split_query(source + group * LINE, scale * LOG2E, place, place + TILE_BYTES)
    state = numba.carray(simd.floats(states), 2 * rows)
    state[:] = -np.inf
    values = listed + SEGMENT // SIDE * 8
    for first in range(first_key, last_key, SEGMENT):
        _list(p, table, head, first, min(SEGMENT, last_key - first), listed, values, last)
        for block in range(0, rows, ROWS):
            here = min(ROWS, rows - block)
            end = min(last_key, position + (block + here - 1) // p.group + 1)
            count = min(SEGMENT, end - first)
            if count <= 0:
                continue
            tiles = queries + block * p.head_dim * 8
            _all_scores(p, here, count, tiles, listed, scores)
            vectors = (count + SIDE - 1) // SIDE
            for i in range(here):
                row = block + i
                valid = min(count, max(0, position + row // p.group + 1 - first))
                line, fresh = sums + row * p.lanes * 4, first == first_key
                total = totals + row * LINE
                _rescale(
                    scores + i * PITCH, vectors, valid, state, row, total, line, p.lanes, fresh
                )
            for i in range(here):
                row = block + i
                valid = min(count, max(0, position + row // p.group + 1 - first))
                total, largest = totals + row * LINE, state[2 * row]
                _weigh(scores + i * PITCH, low + i * PITCH, vectors, valid, total, largest)
            target = sums + block * p.lanes * 4
            _mix(p, here, vectors, scores, low, values, target, first != first_key)
    _sum_up(rows, totals, state)
    return states, sums


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def attend_few(p, table, head, token, position, rows, first_key, last_key, scratch, scale, ahead):
    """As ``attend_many`` for at most FEW query vectors.

    Args:
        ahead: addresses of AT_ONCE groups of keys that this thread will want next, about.
    """
    listed, last, scores, _, queries, sums, totals, states = _places(p, rows, scratch)
    groups, pitch = p.head_dim // SIDE, p.lanes * 4
    mixed = queries + groups * TILE_BYTES
    for row in range(rows):
        source = _query(p, token, head, row)
        for group in range(groups):
            target = queries + group * TILE_BYTES + row * LINE
            tile_code.split_query(
                source + group * LINE, scale * LOG2E, target, target + rows * LINE
            )
    state = numba.carray(simd.floats(states), 2 * rows)
    state[:] = -np.inf
    for first in range(first_key, last_key, SEGMENT):
        count = min(SEGMENT, last_key - first)
        vectors = (count + SIDE - 1) // SIDE
        padded = (vectors + AT_ONCE - 1) // AT_ONCE * AT_ONCE
        values = listed + padded * 8
        _list(p, table, head, first, count, listed, values, last)
        addresses = numba.carray(simd.int64s(listed), padded + vectors + AT_ONCE)
        for i in range(vectors, padded):
            addresses[i] = addresses[vectors - 1]
        for i in range(AT_ONCE):
            addresses[padded + vectors + i] = ahead[i]
        for i in range(0, padded, AT_ONCE):
            ahead_pitch = p.block_size * 4 if i + AT_ONCE < padded else LINE
            out = scores + i * LINE
            tile_code.few_scores(
                queries, groups, listed + i * 8, p.block_size * 4, out, ahead_pitch
            )
        for row in range(rows):
            high, low = scores + row * PITCH, scores + (rows + row) * PITCH
            both = numba.carray(simd.floats(high), vectors * SIDE)
            rest = numba.carray(simd.floats(low), vectors * SIDE)
            for j in range(vectors * SIDE):
                both[j] += rest[j]
            valid = min(count, max(0, position + row // p.group + 1 - first))
            line, total, fresh = sums + row * pitch, totals + row * LINE, first == first_key
            _rescale(high, vectors, valid, state, row, total, line, p.lanes, fresh)
            _weigh(high, low, vectors, valid, total, state[2 * row])
        column = 0
        while groups - column >= 4:
            tile_code.few_mix4(scores, values, vectors, column, pitch, mixed)
            column += 4
        if groups - column >= 2:
            tile_code.few_mix2(scores, values, vectors, column, pitch, mixed)
            column += 2
        if groups > column:
            tile_code.few_mix1(scores, values, vectors, column, pitch, mixed)
        size = rows * p.lanes
        whole = numba.carray(simd.floats(mixed), 2 * size)
        total = numba.carray(simd.floats(sums), size)
        if first == first_key:
            for j in range(size):
                total[j] = whole[j] + whole[size + j]
        else:
            for j in range(size):
                total[j] += whole[j] + whole[size + j]
    _sum_up(rows, totals, state)
    return states, sums
