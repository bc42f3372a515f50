"""Attention over the paged KV cache, read in place: decode and prefill rows in one call.

Layout of one layer's cache, float32, ``lanes`` = head_dim rounded up to 16:
    keys    [num_blocks, kv_heads, head_dim, block_size]   transposed: 16 tokens are one vector
    values  [num_blocks, kv_heads, block_size, lanes]
Where there is a tile unit each number is two of bfloat16 (a last dimension of 2, the low part
first), and ``trioserve.kernels.cpu.tile_attention`` does the work on them; else
``trioserve.kernels.cpu.vector_attention`` does.

The work is cut into items, each times every KV head: a tile of one row's queries against a span of
its context. A long context is cut into spans of ``SPAN`` tokens for decode rows, so that both
cores are busy with one sequence too, and the parts are joined at the end. Items depend on their
row alone: an answer does not change with its batch mates.

With ``exact`` a token's result is the same to the bit however its row is cut into chunks and tiles:
no context is cut into spans, segments begin at multiples of SEGMENT, keys in a token's future have
weight 0, and each sum goes in the order of its terms.

With the tile unit items of prefill rows have more queries.
"""

from __future__ import annotations

import ctypes
import math
import operator

import numba
import numpy as np
import torch

from trioserve.kernels.cpu import amx, simd, tile_attention, vector_attention
from trioserve.kernels.cpu.runtime import (
    FASTMATH,
    LINE,
    Kernel,
    Team,
    aligned_bytes,
    next_unit,
    team_barrier,
    thread_index,
)
from trioserve.kernels.cpu.vector_attention import SEGMENT

SPAN = 256  # context tokens of one item of a decode row
STORED = 16  # tokens whose keys and values one thread stores at a time
ITEM = 6  # int32 values an item: row, first query, queries, first key, last key, part


_FIELDS = (  # the first two lines are a layer's, the others a step's: the decoder relies on it
    *("query", "query_stride", "key", "key_stride", "value", "value_stride", "out"),
    *("keys", "values"),
    *("slots", "row_starts", "query_starts", "row_tables"),
    *("tables", "table_stride", "items", "num_items", "item_capacity"),
    *("num_tokens", "num_rows", "first_parts", "parts", "scratch", "scratch_stride"),
    *("kv_heads", "group", "head_dim", "lanes", "block_size", "threads", "counters", "exact"),
    "tiles",
)


class Params(ctypes.Structure):
    """What one call works on. Addresses of float32 unless said otherwise; strides in elements.
    ``tiles`` is the tile unit's configuration, or 0 to do without it."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


def reference(query, key_cache, value_cache, table, start, scale):
    """Attention of one row in float64.

    Args:
        query: [n, heads, head_dim], the tokens at positions [start, start + n).
        key_cache, value_cache: [num_blocks, kv_heads, block_size, head_dim], the new ones included.
        table: block ids of the row.
        start: tokens before this step.

    Returns: [n, heads, head_dim].
    """
    n, heads, dim = query.shape
    _, kv_heads, _, _ = key_cache.shape
    keys, values = (
        np.moveaxis(cache[np.asarray(table)].astype(np.float64), 1, 0).reshape(kv_heads, -1, dim)
        for cache in (key_cache, value_cache)
    )
    out = np.empty((n, heads, dim))
    for token in range(n):
        length = start + token + 1
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = keys[kv_head, :length] @ query[token, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[kv_head, :length] / weights.sum()
    return out


# ------------------------------------------------------------------------------ the kernel


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _attend_tiles(p, item, head, token, position, table, scratch, scale, ahead):
    """``_attend`` on the tile unit. ``position`` is that of the first query."""
    _, _, num_queries, first_key, last_key, part = item
    rows = num_queries * p.group
    if rows <= tile_attention.FEW:
        states, sums = tile_attention.attend_few(
            p, table, head, token, position, rows, first_key, last_key, scratch, scale, ahead
        )
    else:
        states, sums = tile_attention.attend_many(
            p, table, head, token, position, rows, first_key, last_key, scratch, scale
        )
    state = numba.carray(simd.floats(states), rows * 2)
    sum_array = numba.carray(simd.floats(sums), rows * p.lanes)
    if part < 0:
        _finish(p, token, num_queries, head, state, sum_array)
        return
    size = rows * (p.lanes + 2)
    target = p.parts + (np.int64(part) * p.kv_heads + head) * size * 4
    kept = numba.carray(simd.floats(target), size)
    for i in range(rows):
        kept[2 * i] = state[2 * i] * tile_attention.LN2  # which is in powers of two there
        kept[2 * i + 1] = state[2 * i + 1]
    for j in range(rows * p.lanes):
        kept[2 * rows + j] = sum_array[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _look_ahead(p, items, unit, ahead):
    """Write where the first keys of a unit lie, or leave what is there if there is no such unit."""
    if unit >= p.num_items * p.kv_heads:
        return
    row, first = items[unit // p.kv_heads, 0], items[unit // p.kv_heads, 3]
    line = numba.carray(simd.int32s(p.row_tables), p.num_rows)[row]
    table = numba.carray(simd.int32s(p.tables + line * p.table_stride * 4), p.table_stride)
    last = items[unit // p.kv_heads, 4] - 1
    for i in range(tile_attention.AT_ONCE):
        position = min(first + i * simd.WIDTH, last)
        place = table[position // p.block_size] * p.kv_heads + unit % p.kv_heads
        offset = place * p.head_dim * p.block_size + position % p.block_size
        ahead[i] = p.keys + offset * 4


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _attend(p, item, head, scratch, scale, ahead):
    """One item for one KV head: the result, or a part of it, goes where it belongs."""
    row, first_query, num_queries, first_key, last_key, part = item
    start = numba.carray(simd.int32s(p.row_starts), p.num_rows)[row]
    line = numba.carray(simd.int32s(p.row_tables), p.num_rows)[row]
    token = numba.carray(simd.int32s(p.query_starts), p.num_rows)[row] + first_query
    table = numba.carray(simd.int32s(p.tables + line * p.table_stride * 4), p.table_stride)
    rows = num_queries * p.group
    if p.tiles != 0:
        _attend_tiles(p, item, head, token, start + first_query, table, scratch, scale, ahead)
        return
    queries = scratch
    scores = queries + rows * p.head_dim * 4
    state_address = scores + rows * SEGMENT * 4
    sums = state_address + rows * 2 * 4
    if part >= 0:  # the parts of one row lie together: state, then sums
        state_address = p.parts + (np.int64(part) * p.kv_heads + head) * p.group * (p.lanes + 2) * 4
        sums = state_address + p.group * 2 * 4
    state = numba.carray(simd.floats(state_address), rows * 2)
    sum_array = numba.carray(simd.floats(sums), rows * p.lanes)
    for i in range(rows):
        state[2 * i] = -np.inf
        state[2 * i + 1] = np.float32(0.0)
    sum_array[:] = np.float32(0.0)
    vector_attention.load_queries(p, token, num_queries, head, queries, scale)
    for first in range(first_key, last_key, SEGMENT):
        count = min(SEGMENT, last_key - first)
        vector_attention.scores(p, table, head, first, count, queries, rows, scores)
        for i in range(rows):
            valid = min(count, max(0, start + first_query + i // p.group + 1 - first))
            vector_attention.softmax(
                numba.carray(simd.floats(scores + i * SEGMENT * 4), SEGMENT),
                count,
                valid,
                state,
                i,
                numba.carray(simd.floats(sums + i * p.lanes * 4), p.lanes),
                p.lanes,
            )
        vector_attention.add_values(p, table, head, first, count, scores, rows, sums)
    if part < 0:
        _finish(p, token, num_queries, head, state, sum_array)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _finish(p, token, num_queries, head, state, sums):
    dim, lanes, group = p.head_dim, p.lanes, p.group  # read here once: LLVM cannot know they stay
    width = group * dim
    for i in range(num_queries * group):
        place = (token + i // group) * p.kv_heads * width + head * width + i % group * dim
        target = numba.carray(simd.floats(p.out + place * 4), dim)
        source = sums[i * lanes : i * lanes + dim]
        factor = np.float32(1.0) / state[2 * i + 1]
        for j in range(dim):
            target[j] = source[j] * factor


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _join(p, row, head, first_part, num_parts, scratch):
    """Join the parts of one decode row and KV head."""
    size = p.group * (p.lanes + 2)
    stride = p.kv_heads * size
    parts = numba.carray(
        simd.floats(p.parts + (first_part * stride + head * size) * 4), num_parts * stride
    )
    state = numba.carray(simd.floats(scratch), 2 * p.group)
    sums = numba.carray(simd.floats(scratch + 2 * p.group * 4), p.group * p.lanes)
    sums[:] = np.float32(0.0)
    for i in range(p.group):
        largest = parts[2 * i]
        for part in range(1, num_parts):
            largest = max(largest, parts[part * stride + 2 * i])
        total = np.float32(0.0)
        for part in range(num_parts):
            base = part * stride
            factor = simd.exp_f32(parts[base + 2 * i] - largest)
            total += parts[base + 2 * i + 1] * factor
            base += 2 * p.group + i * p.lanes
            for j in range(p.lanes):
                sums[i * p.lanes + j] += parts[base + j] * factor
        state[2 * i + 1] = total
    token = numba.carray(simd.int32s(p.query_starts), p.num_rows)[row]
    _finish(p, token, 1, head, state, sums)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def attend_share(p, thread):
    """One thread's share of a layer: store the new keys and values, attend, join split rows."""
    scale = np.float32(1.0 / math.sqrt(p.head_dim))
    scratch = p.scratch + thread * p.scratch_stride
    while True:
        first = next_unit(p.counters) * STORED
        if first >= p.num_tokens:
            break
        last = min(first + STORED, p.num_tokens)
        if p.tiles != 0:
            tile_attention.store(p, first, last)
        else:
            for token in range(first, last):
                vector_attention.store(p, token)
    if p.threads > 1:
        team_barrier()
    items = numba.carray(simd.int32s(p.items), (p.num_items, ITEM))
    ahead = numba.carray(simd.int64s(scratch), tile_attention.AT_ONCE)
    ahead[:] = p.keys
    if p.tiles != 0:
        amx.begin(p.tiles)
    while True:
        unit = next_unit(p.counters + 64)
        if unit >= p.num_items * p.kv_heads:
            break
        at = items[unit // p.kv_heads]
        item = (at[0], at[1], at[2], at[3], at[4], at[5])
        if p.tiles != 0:
            _look_ahead(p, items, unit + p.threads, ahead)
        _attend(p, item, unit % p.kv_heads, scratch + LINE, scale, ahead)
    if p.tiles != 0:
        amx.end()
    first_parts = numba.carray(simd.int32s(p.first_parts), p.num_rows + 1)
    if first_parts[p.num_rows] == 0:
        return
    if p.threads > 1:
        team_barrier()
    while True:
        unit = next_unit(p.counters + 128)
        if unit >= p.num_rows * p.kv_heads:
            break
        row, head = unit // p.kv_heads, unit % p.kv_heads
        num_parts = first_parts[row + 1] - first_parts[row]
        if num_parts > 0:
            _join(p, row, head, first_parts[row], num_parts, scratch)


def attend(params):
    """The kernel of one layer."""
    p = numba.carray(params, 1)[0]
    attend_share(p, thread_index() if p.threads > 1 else 0)


def plan(params):
    """Cut the step's work into items; counts go to ``num_items`` and ``first_parts``.

    Items past ``item_capacity`` are counted and not written: the caller makes room and comes again.
    """
    p = numba.carray(params, 1)[0]
    items = numba.carray(simd.int32s(p.items), (p.item_capacity, ITEM))
    first_parts = numba.carray(simd.int32s(p.first_parts), p.num_rows + 1)
    query_starts = numba.carray(simd.int32s(p.query_starts), p.num_rows + 1)
    row_starts = numba.carray(simd.int32s(p.row_starts), p.num_rows)
    tile = max(1, (vector_attention.QUERIES if p.tiles == 0 else tile_attention.QUERIES) // p.group)
    num_items = 0
    num_parts = 0
    for row in range(p.num_rows):
        first_parts[row] = num_parts
        count = query_starts[row + 1] - query_starts[row]
        length = row_starts[row] + count
        cuts = (length + SPAN - 1) // SPAN if count == 1 and p.exact == 0 else 1
        span = ((length + cuts - 1) // cuts + 15) // 16 * 16
        for query in range(0, count, tile):
            queries = min(tile, count - query)
            end = row_starts[row] + query + queries
            for key in range(0, end, span if cuts > 1 else end):
                if num_items < p.item_capacity:
                    items[num_items, 0] = row
                    items[num_items, 1] = query
                    items[num_items, 2] = queries
                    items[num_items, 3] = key
                    items[num_items, 4] = min(end, key + span) if cuts > 1 else end
                    items[num_items, 5] = num_parts if cuts > 1 else -1
                num_items += 1
                num_parts += 1 if cuts > 1 else 0
    first_parts[p.num_rows] = num_parts
    p.num_items = num_items


# ----------------------------------------------------------------------------- the wrapper


class PagedAttention:
    """Attention of all layers of one model over caches made by ``new_cache``.

    ``prepare`` once a step, then one call a layer. Not safe for use by two threads.

    Args:
        team: runs the kernels.
        kv_heads, group, head_dim: ``group`` query heads share one KV head.
        block_size: tokens per block, 8 or a multiple of 16.

    Raises:
        ValueError: a block size the kernel cannot read.
    """

    def __init__(
        self, team: Team, *, kv_heads: int, group: int, head_dim: int, block_size: int
    ) -> None:
        if block_size != 8 and block_size % 16:
            raise ValueError(f"block_size must be 8 or a multiple of 16, not {block_size}")
        self._team = team
        self._attend: Kernel | None = None
        self._plan = team.compile(plan, Params)
        self.params = params = Params()
        self.kv_heads, self.group, self.head_dim = kv_heads, group, head_dim
        params.kv_heads, params.group, params.head_dim = kv_heads, group, head_dim
        params.lanes = self.lanes = -(-head_dim // 16) * 16
        params.block_size, params.threads = block_size, team.threads
        params.exact = team.exact
        tiles = team.tiles
        if tiles is not None and tile_attention.supports(head_dim, block_size):
            params.tiles = tiles.ctypes.data
        rows = (
            max(
                1,
                (vector_attention.QUERIES if params.tiles == 0 else tile_attention.QUERIES)
                // group,
            )
            * group
        )
        params.scratch_stride = 4 * (rows * (head_dim + SEGMENT + 2 + params.lanes) + 16) + LINE
        if params.tiles != 0:
            needed = LINE + tile_attention.scratch_bytes(rows, head_dim)
            params.scratch_stride = -(-needed // LINE) * LINE
        self._scratch = aligned_bytes(team.threads * params.scratch_stride)
        params.scratch = self._scratch.ctypes.data
        self._counters = np.zeros(3 * 8, np.int64)  # a cache line each: all threads write them
        params.counters = self._counters.ctypes.data
        self._context: tuple | None = None
        self._first_parts = np.zeros(0, np.int32)
        self._parts = np.zeros(0, np.float32)
        self._reserve_items(64)
        self._reserve_rows(64)
        self._reserve_parts(1)

    def compile(self) -> None:
        """Compile what a call needs; not needed where the decoder kernel does the attention."""
        self._attend = self._attend or self._team.compile(attend, Params)

    def new_cache(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, zeroed; memory is taken as blocks are first written."""
        p = self.params
        keys = np.zeros((num_blocks, p.kv_heads, p.head_dim, p.block_size), np.float32)
        values = np.zeros((num_blocks, p.kv_heads, p.block_size, p.lanes), np.float32)
        pair = [torch.from_numpy(array) for array in (keys, values)]
        if p.tiles != 0:
            pair = [x.view(torch.bfloat16).unflatten(-1, (-1, 2)) for x in pair]
        return pair[0], pair[1]

    def prepare(
        self,
        *,
        slots: torch.Tensor,
        query_starts: np.ndarray,
        row_starts: np.ndarray,
        row_tables: np.ndarray,
        tables: np.ndarray,
    ) -> None:
        """Take a step's rows and cut the work. The arrays must stay unchanged until the last layer.

        Args:
            slots: int64 [num_tokens], block id × block size + offset of each token.
            query_starts: int32 [num_rows + 1], first token of each row, then num_tokens.
            row_starts: int32 [num_rows], tokens of each row in the cache before this step.
            row_tables: int32 [num_rows], each row's line of ``tables``.
            tables: int32 [lines, max_blocks], block ids.
        """
        context = (slots, query_starts, row_starts, row_tables, tables)
        if self._context is None or any(map(operator.is_not, context, self._context)):
            self._take(*context)  # steps of one shape lie in the same arrays
        p = self.params
        self._plan(p, 1)
        if p.num_items > p.item_capacity:
            self._reserve_items(p.num_items)
            self._plan(p, 1)
        self._reserve_parts(int(self._first_parts[p.num_rows]))

    def _take(self, slots, query_starts, row_starts, row_tables, tables) -> None:
        """Check a step's arrays and give their addresses to the kernels."""
        self._context = None
        num_rows = len(row_starts)
        for name, array, shape in (
            ("query_starts", query_starts, (num_rows + 1,)),
            ("row_starts", row_starts, (num_rows,)),
            ("row_tables", row_tables, (num_rows,)),
            ("tables", tables, tables.shape[:1] + tables.shape[-1:]),
        ):
            if array.dtype != np.int32 or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be int32 {shape}, contiguous")
        if slots.dtype != torch.int64 or slots.shape != (query_starts[-1],):
            raise ValueError("slots must be int64, one for each token")
        p = self.params
        self._context = (slots, query_starts, row_starts, row_tables, tables)  # keeps them alive
        p.num_tokens, p.num_rows = len(slots), num_rows
        p.slots = slots.data_ptr()
        p.query_starts, p.row_starts = query_starts.ctypes.data, row_starts.ctypes.data
        p.row_tables, p.tables = row_tables.ctypes.data, tables.ctypes.data
        p.table_stride = tables.shape[1]
        self._reserve_rows(num_rows)

    def __call__(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Store the step's keys and values in ``cache`` and attend.

        Args:
            query: float32 [n, heads, head_dim]; key, value: [n, kv_heads, head_dim]. Rows may be
                strided (slices of one product), heads within a row may not.

        Returns: float32 [n, heads × head_dim].
        """
        p = self.params
        heads = p.kv_heads * p.group
        p.query, p.query_stride = _checked(query, "query", p.num_tokens, heads, p.head_dim)
        p.key, p.key_stride = _checked(key, "key", p.num_tokens, p.kv_heads, p.head_dim)
        p.value, p.value_stride = _checked(value, "value", p.num_tokens, p.kv_heads, p.head_dim)
        out = torch.empty((p.num_tokens, heads * p.head_dim), dtype=torch.float32)
        p.out = out.data_ptr()
        p.keys, p.values = cache[0].data_ptr(), cache[1].data_ptr()
        self._counters[::8] = 0
        if self._attend is None:
            self.compile()
        self._attend(p)
        return out

    def _reserve_items(self, count: int) -> None:
        self._items = np.zeros((count * 2, ITEM), np.int32)
        self.params.items, self.params.item_capacity = self._items.ctypes.data, count * 2

    def _reserve_rows(self, count: int) -> None:
        if count + 1 > len(self._first_parts):
            self._first_parts = np.zeros(count * 2 + 1, np.int32)
            self.params.first_parts = self._first_parts.ctypes.data

    def _reserve_parts(self, count: int) -> None:
        p = self.params
        size = count * p.kv_heads * p.group * (p.lanes + 2)
        if size > len(self._parts):
            self._parts = np.zeros(size * 2, np.float32)
            p.parts = self._parts.ctypes.data


def _checked(tensor, name, tokens, heads, head_dim):
    """Address and row stride of a tensor that the kernel can read."""
    if tensor.dtype != torch.float32 or tensor.shape != (tokens, heads, head_dim):
        raise ValueError(f"{name} must be float32 [{tokens}, {heads}, {head_dim}]")
    stride, head_stride, inner = tensor.stride()
    if inner != 1 or (head_stride != head_dim and heads > 1):
        raise ValueError(f"{name}: the heads of a token must lie together")
    return tensor.data_ptr(), stride
