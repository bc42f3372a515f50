"""Products with narrow weights and float32 activations: x · Wᵀ + bias.

The weight [out, in] lies in panels of PANEL outputs, in-major: [panels, in, PANEL] float16, or in
blocks of codes (``trioserve.kernels.cpu.blocks``). One line of a panel is one or two registers; a
tile of up to six rows of x against a panel keeps its sums in registers. With few rows the panel is
widened as it is read, so that memory is all there is to wait for; with many it is widened once into
a scratch that stays in the cache.
"""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import torch
from attrs import frozen

from trioserve.kernels.cpu import amx, blocks, digits, simd, words
from trioserve.kernels.cpu.blocks import HALF, Q4_BYTES, Q8_BYTES
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8, Blocks
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

PANEL = simd.PANEL
DEPTH = 512  # inputs of a panel that are widened at once
TILE_DEPTH = 1536  # the same for the tile unit, 192 KiB: most panels whole, and x beside it in L2
FEW_ROWS = 6  # beyond it, widening a panel once is quicker (measured: 12 rows 23 ms against 28)
# The same where codes are multiplied as bytes (measured against the tile unit: a step of 8 rows
# 12 ms against 22, one of 32 rows 48 against 40). Counted in instructions for 32 inputs of a row
# and panel, NEON needs 240 to 280; on a panel widened once it is 300 for each of 8 rows, 250 of 12.
BYTE_ROWS = 8 if digits.NEON else 16
# The same where they are multiplied as words.
WORD_ROWS = 8
WORD_LINES = 16  # of a panel that are widened to words at once, 18 KiB of AVX2's panels

_FIELDS = (
    *("x", "x_stride", "weight", "bias", "out", "rows", "inputs", "outputs", "panels"),
    *("panels_per_unit", "scratch", "scratch_stride", "counter", "threads", "add", "kind", "exact"),
    *("split", "tiles", "parts", "byte_products", "word_products", "records", "raw", "norm"),
)


class Params(ctypes.Structure):
    """Addresses of float32 but for ``weight``, which is of ``kind``; the stride in elements;
    ``bias`` may be 0. With ``add`` the product is added to what ``out`` holds; with ``exact`` a
    row's result does not depend on how many rows there are, to the bit. ``split`` is where rows of
    x are split for the tile unit, or 0 to do without it; ``tiles`` its configuration; ``parts`` how
    many values of bfloat16 it takes for one. With ``byte_products`` few rows times codes are
    computed in whole numbers of 24 bits, with ``word_products`` all others in those of 16 unless
    the tile unit does them; ``records`` is where those of more than FEW_ROWS are shared. The kernel
    of one product first takes the norm of rows at ``raw``, which gives those at ``x``; ``norm`` is
    where its weights and eps lie, or 0 to do without."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


def reference(x, weight, bias, exact=False):
    """float64, with the weight rounded to float16 unless it is ``exact``."""
    weight = weight if exact else weight.astype(np.float16)
    product = x.astype(np.float64) @ weight.astype(np.float64).T
    return product if bias is None else product + bias


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _half_product(rows, a, lda, b, c, ldc, k, accumulate):
    """C[rows, PANEL] (+)= A[rows, k] · B[k, PANEL], B float16."""
    while rows >= 6:
        simd.half6(a, lda, b, PANEL, c, ldc, k, accumulate)
        rows -= 6
        a += 6 * lda * 4
        c += 6 * ldc * 4
    if rows >= 4:
        simd.half4(a, lda, b, PANEL, c, ldc, k, accumulate)
        rows -= 4
        a += 4 * lda * 4
        c += 4 * ldc * 4
    if rows == 3:
        simd.half3(a, lda, b, PANEL, c, ldc, k, accumulate)
    elif rows == 2:
        simd.half2(a, lda, b, PANEL, c, ldc, k, accumulate)
    elif rows == 1:
        simd.half1(a, lda, b, PANEL, c, ldc, k, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _panel_product(rows, a, lda, b, c, ldc, k, accumulate, exact):
    """C[rows, PANEL] (+)= A[rows, k] · B[k, PANEL]; every sum in the order of k if ``exact``."""
    row = 0
    while rows - row >= 6:
        simd.panel6(a + row * lda * 4, lda, b, PANEL, c + row * ldc * 4, ldc, k, accumulate)
        row += 6
    if rows - row >= 4:
        simd.panel4(a + row * lda * 4, lda, b, PANEL, c + row * ldc * 4, ldc, k, accumulate)
        row += 4
    while exact != 0 and row < rows:
        a_row, c_row = a + row * lda * 4, c + row * ldc * 4
        simd.exact_panel1(a_row, lda, b, PANEL, c_row, ldc, k, accumulate)
        row += 1
    if rows - row >= 2:
        simd.panel2(a + row * lda * 4, lda, b, PANEL, c + row * ldc * 4, ldc, k, accumulate)
        row += 2
    if rows > row:
        simd.panel1(a + row * lda * 4, lda, b, PANEL, c + row * ldc * 4, ldc, k, accumulate)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _panel_bytes(kind, inputs):
    if kind == Q4:
        return inputs // BLOCK * Q4_BYTES
    if kind == Q8:
        return inputs // BLOCK * Q8_BYTES
    return inputs * PANEL * 2


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _widen(kind, weight, depth, count, scratch):
    """Inputs [depth, depth + count) of a panel as float32 [count, PANEL]."""
    if kind == HALF:
        for i in range(count):
            simd.widen(weight + (depth + i) * PANEL * 2, scratch + i * PANEL * 4)
        return
    first = depth // BLOCK
    for line in range(count // BLOCK):
        target = scratch + line * BLOCK * PANEL * 4
        if kind == Q4:
            blocks.widen_q4(weight + (first + line) * Q4_BYTES, target)
        else:
            blocks.widen_q8(weight + (first + line) * Q8_BYTES, target)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _panel(p, panel, scratch):
    """All rows against one panel."""
    first = panel * PANEL
    width = min(PANEL, p.outputs - first)
    weight = p.weight + panel * _panel_bytes(p.kind, p.inputs)
    out = p.out + first * 4
    stride, add = p.outputs, p.add
    if width < PANEL:  # the last one goes through a place of its own
        out = scratch + DEPTH * PANEL * 4
        stride, add = PANEL, 0
    if _as_words(p):
        _word_panel(p, weight, out, stride, add, scratch)
    elif _are_few(p):
        _few_rows(p, weight, out, stride, add, _prepared(p, scratch))
    elif on_tiles(p):
        _tile_panel(p, weight, out, stride, add, scratch)
    else:
        for depth in range(0, p.inputs, DEPTH):
            count = min(DEPTH, p.inputs - depth)
            _widen(p.kind, weight, depth, count, scratch)
            x = p.x + depth * 4
            more = 1 if depth > 0 else add
            _panel_product(p.rows, x, p.x_stride, scratch, out, stride, count, more, p.exact)
    if width < PANEL:
        copy_last(p, first, width, out)
    if p.bias != 0:
        add_bias(p, first, width)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _are_few(p):
    """Whether the weights are used as they are read."""
    most = BYTE_ROWS if p.kind != HALF and p.byte_products != 0 else FEW_ROWS
    return p.rows <= most and p.exact == 0


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _as_words(p):
    """Whether codes are multiplied in whole numbers of 16 bits."""
    if p.kind == HALF or p.word_products == 0 or on_tiles(p):
        return False
    return p.byte_products == 0 or p.rows > BYTE_ROWS


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _word_panel(p, weight, out, stride, add, scratch):
    """All rows against one panel of codes in whole numbers of 16 bits."""
    records, lines = _prepared(p, scratch), p.inputs // BLOCK
    step = lines * words.RECORD
    if p.rows <= WORD_ROWS:
        if p.kind == Q4:
            words.q4_product(p.rows, records, step, weight, out, stride, lines, add)
        else:
            words.q8_product(p.rows, records, step, weight, out, stride, lines, add)
        return
    for first in range(0, lines, WORD_LINES):
        count = min(WORD_LINES, lines - first)
        for line in range(count):
            target = scratch + line * words.LINE_BYTES
            if p.kind == Q4:
                words.widen_q4(weight + (first + line) * Q4_BYTES, target)
            else:
                words.widen_q8(weight + (first + line) * Q8_BYTES, target)
        more = 1 if first > 0 else add
        x = records + first * words.RECORD
        words.words_product(p.rows, x, step, scratch, out, stride, count, more)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _prepared(p, scratch):
    """Where ``_prepare_rows`` leaves what it makes: each thread's own, or one for all."""
    return scratch + (DEPTH + p.rows) * PANEL * 4 if p.rows <= FEW_ROWS else p.records


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _few_rows(p, weight, out, stride, add, prepared):
    """A few rows against one panel; ``prepared`` is what ``_prepare_rows`` left."""
    lines = p.inputs // BLOCK
    if p.kind == HALF:
        _half_product(p.rows, p.x, p.x_stride, weight, out, stride, p.inputs, add)
    elif p.byte_products != 0:
        step = lines * digits.RECORD
        if p.kind == Q4:
            digits.q4_product(p.rows, prepared, step, weight, out, stride, lines, add)
        else:
            digits.q8_product(p.rows, prepared, step, weight, out, stride, lines, add)
    elif p.kind == Q4:
        blocks.q4_product(p.rows, p.x, p.x_stride, weight, out, stride, lines, prepared, add)
    else:
        blocks.q8_product(p.rows, p.x, p.x_stride, weight, out, stride, lines, add)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _prepare_rows(p, thread, prepared):
    """What few rows and words need of x beside x itself: the integers, or sums of blocks.

    A thread makes them all for itself sooner than it would meet the others, unless there are many.
    """
    lines = p.inputs // BLOCK
    if p.rows > FEW_ROWS:
        threads = max(1, team_size()) if p.threads > 1 else 1
        first, last = p.rows * thread // threads, p.rows * (thread + 1) // threads
        x = p.x + first * p.x_stride * 4
        if _as_words(p):
            records = prepared + first * lines * words.RECORD
            words.write_rows(last - first, x, p.x_stride, lines, records)
        else:
            records = prepared + first * lines * digits.RECORD
            digits.write_rows(p.kind, last - first, x, p.x_stride, lines, records)
        if p.threads > 1:
            team_barrier()
    elif _as_words(p):
        words.write_rows(p.rows, p.x, p.x_stride, lines, prepared)
    elif p.kind != HALF and p.byte_products != 0:
        digits.write_rows(p.kind, p.rows, p.x, p.x_stride, lines, prepared)
    elif p.kind == Q4:
        blocks.block_sums(p.rows, p.x, p.x_stride, lines, prepared)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def on_tiles(p):
    """Whether the product goes to the tile unit."""
    return p.split != 0 and not _are_few(p) and p.inputs % amx.DEPTH == 0


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _split_rows(p, thread):
    """One thread's share of the rows of x, for all."""
    threads = max(1, team_size()) if p.threads > 1 else 1
    padded = (p.rows + amx.ROWS - 1) // amx.ROWS * amx.ROWS
    first, last = padded * thread // threads, padded * (thread + 1) // threads
    amx.split_x(p.x, p.x_stride, first, last, p.rows, p.inputs, p.parts, p.split)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _tile_panel(p, weight, out, stride, add, scratch):
    """All rows against one panel on the tile unit."""
    spare = scratch + (DEPTH + p.rows) * PANEL * 4
    tiles = spare + amx.ROWS * PANEL * 4
    x_group = p.parts * amx.TILE_BYTES
    x_stride = p.inputs // amx.DEPTH * x_group
    for depth in range(0, p.inputs, TILE_DEPTH):
        first, groups = depth // amx.DEPTH, min(TILE_DEPTH, p.inputs - depth) // amx.DEPTH
        amx.split_panel(p.kind, weight, first, groups, p.parts, tiles)
        more = 1 if depth > 0 else add
        x = p.split + first * x_group
        amx.product(p.rows, p.parts, x, x_stride, tiles, out, stride * 4, groups, more, spare)


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def copy_last(p, first, width, tile):
    """From a tile of its own to where the last panel's outputs belong."""
    for row in range(p.rows):
        source = numba.carray(simd.floats(tile + row * PANEL * 4), width)
        target = numba.carray(simd.floats(p.out + (row * p.outputs + first) * 4), width)
        for j in range(width):
            target[j] = source[j] + (target[j] if p.add != 0 else np.float32(0.0))


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def add_bias(p, first, width):
    """To all rows' outputs of one panel."""
    bias = numba.carray(simd.floats(p.bias + first * 4), width)
    for row in range(p.rows):
        target = numba.carray(simd.floats(p.out + (row * p.outputs + first) * 4), width)
        for j in range(width):
            target[j] += bias[j]


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def product_share(p, thread):
    """One thread's panels, taken as they come."""
    scratch = p.scratch + thread * p.scratch_stride
    if _are_few(p) or _as_words(p):
        _prepare_rows(p, thread, _prepared(p, scratch))
    tiled = on_tiles(p)
    if tiled:
        _split_rows(p, thread)
        if p.threads > 1:
            team_barrier()
        amx.begin(p.tiles)
    while True:
        first = next_unit(p.counter) * p.panels_per_unit
        if first >= p.panels:
            break
        for panel in range(first, min(first + p.panels_per_unit, p.panels)):
            _panel(p, panel, scratch)
    if tiled:
        amx.end()


def panel_product(params):
    """The kernel of one product."""
    p = numba.carray(params, 1)[0]
    thread, threads = 0, 1
    if p.threads > 1:
        thread, threads = thread_index(), max(1, team_size())
    if p.norm != 0:
        first, last = p.rows * thread // threads, p.rows * (thread + 1) // threads
        eps = simd.load_f32(p.norm, p.inputs)
        rms_norm(p.raw, p.norm, eps, p.inputs, p.x, first, last)
        if p.threads > 1:
            team_barrier()
    product_share(p, thread)


@frozen(eq=False)
class Panels:
    """A weight [outputs, inputs] as the kernels read it.

    Attributes:
        kind: HALF, or the bits of its codes, see ``trioserve.kernels.cpu.blocks``.
        data: float16 [count, inputs, PANEL], or uint8 [count, inputs / 32, LINE_BYTES[kind]].
    """

    kind: int
    outputs: int
    inputs: int
    data: torch.Tensor

    @property
    def count(self) -> int:
        """Number of panels."""
        return self.data.shape[0]

    @staticmethod
    def half(weight: torch.Tensor) -> Panels:
        """Of float32 [out, in], rounded to float16."""
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = torch.zeros((panels * PANEL, inputs), dtype=torch.float16)
        packed[:outputs] = weight
        packed = packed.view(panels, PANEL, inputs).transpose(1, 2).contiguous()
        return Panels(HALF, outputs, inputs, packed)

    @staticmethod
    def of_blocks(weight: Blocks) -> Panels:
        """Of codes, taken over as they are."""
        return Panels(weight.bits, *weight.shape, blocks.pack(weight))


class PanelProduct:
    """Runs the product of rows with a weight in panels."""

    def __init__(self, team: Team) -> None:
        self._kernel = team.compile(panel_product, Params)
        self._params = p = Params()
        self._counter = ctypes.c_int64()
        p.threads = team.threads
        p.counter = ctypes.addressof(self._counter)
        p.exact, p.parts = team.exact, team.parts
        p.byte_products, p.word_products = team.byte_products, team.word_products
        self._tiles = team.tiles
        self._max_rows = self._max_inputs = 0

    def __call__(
        self,
        x: torch.Tensor,
        weight: Panels,
        bias: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [n, inputs] to a new float32 [n, outputs].

        Args:
            norm: float32 [inputs + 1], the weights of an RMS norm that rows go through first, and
                its eps; ``x`` without gaps then.

        Raises:
            ValueError: another shape, type or layout.
        """
        rows, inputs = x.shape
        outputs = weight.outputs
        if x.dtype != torch.float32 or x.stride(1) != 1 or inputs != weight.inputs:
            raise ValueError(f"x must be float32 [n, {weight.inputs}], its rows without gaps")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,)):
            raise ValueError(f"bias must be float32 [{outputs}]")
        if norm is not None and (
            norm.dtype != torch.float32 or norm.shape != (inputs + 1,) or not x.is_contiguous()
        ):
            raise ValueError(f"norm must be float32 [{inputs + 1}], x without gaps")
        out = torch.empty((rows, outputs), dtype=torch.float32)
        p = self._params
        if rows > self._max_rows or inputs > self._max_inputs:
            self._reserve(max(rows, self._max_rows, 64), max(inputs, self._max_inputs))
        p.x, p.x_stride, p.weight = x.data_ptr(), x.stride(0), weight.data.data_ptr()
        p.raw, p.norm = 0, 0
        if norm is not None:
            p.raw, p.norm, p.x = p.x, norm.data_ptr(), self._normed.data_ptr()
        p.bias = 0 if bias is None else bias.data_ptr()
        p.out, p.rows, p.inputs, p.outputs = out.data_ptr(), rows, inputs, outputs
        p.kind, p.panels = weight.kind, weight.count
        p.panels_per_unit = max(1, weight.count // (p.threads * 8))
        self._counter.value = 0
        self._kernel(p)
        return out

    def _reserve(self, rows: int, inputs: int) -> None:
        self._max_rows, self._max_inputs = rows, inputs
        p = self._params
        p.scratch_stride = scratch_bytes(rows, inputs)
        self._scratch = aligned_bytes(p.threads * p.scratch_stride)
        p.scratch = self._scratch.ctypes.data
        self._normed = torch.empty(rows * inputs)
        self._records = aligned_bytes(record_bytes(rows, inputs))
        p.records = self._records.ctypes.data
        if self._tiles is not None:
            self._split = aligned_bytes(split_bytes(rows, inputs))
            p.split, p.tiles = self._split.ctypes.data, self._tiles.ctypes.data


def scratch_bytes(rows: int, inputs: int) -> int:
    """Scratch of one thread: part of a panel widened, a panel's outputs, and what is prepared of
    few rows or what the tile unit needs."""
    records = min(rows, FEW_ROWS) * (inputs // BLOCK) * digits.RECORD
    groups = min(TILE_DEPTH, inputs) // amx.DEPTH
    tiles = amx.ROWS * PANEL * 4 + groups * amx.GROUP_BYTES
    return (DEPTH + rows) * PANEL * 4 + -(-max(records, tiles) // LINE) * LINE + LINE


def record_bytes(rows: int, inputs: int) -> int:
    """What all threads share of rows in whole numbers."""
    size = max(min(rows, BYTE_ROWS) * digits.RECORD, rows * words.RECORD)
    return size * -(-inputs // BLOCK)


def split_bytes(rows: int, inputs: int) -> int:
    """What all threads share of rows split for the tile unit."""
    return -(-rows // amx.ROWS) * amx.ROWS * inputs * 4 + 64
