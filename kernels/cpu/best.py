"""The largest of a row of logits and its lowest id: all that a greedy row needs.

Rows are shared out to the threads. A row is read once, while the caches still hold what the head
wrote.
"""

from __future__ import annotations

import ctypes
import math

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trioserve.kernels.cpu import simd
from trioserve.kernels.cpu.runtime import FASTMATH, Team, aligned_bytes, team_size, thread_index

LANES = 64  # logits that are looked at together
AHEAD = 2048  # bytes before they are looked at logits are asked for
FEW = 8  # rows that one thread is done with before others would be awake

_FIELDS = ("logits", "rows", "width", "stride", "values", "ids", "threads", "scratch")


class Params(ctypes.Structure):
    """Addresses of float32, ``ids`` of int64; the stride in elements."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


def reference(logits):
    """float32 [n, width] to the largest of each row and its lowest index; NaN is the largest."""
    ids = np.argmax(logits, axis=1)
    return logits[np.arange(len(logits)), ids], ids


_LINE, _PLACES = ir.VectorType(simd.F32, LANES), ir.VectorType(simd.I32, LANES)


@intrinsic
def _scan(typing_context, x, lines, maxima, places):
    """Each lane's maximum over ``lines`` of LANES logits, float32 [LANES] at ``maxima``, and the
    first line that has it, int32 [LANES] at ``places``. Gives whether a NaN was met."""

    def codegen(context, builder, signature, args):
        x, lines, maxima, places = args
        bits = ir.VectorType(ir.IntType(1), LANES)

        def line(at, values):
            best, place, nans = values
            address = builder.add(x, builder.mul(at, simd._index(LANES * 4)))
            for offset in range(0, LANES * 4, 64):
                simd.prefetch(builder, builder.add(address, simd._index(AHEAD + offset)))
            one = builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)
            larger = builder.fcmp_ordered(">", one, best)
            number = simd._splat(builder, builder.trunc(at, simd.I32), _PLACES)
            return [
                builder.select(larger, one, best),
                builder.select(larger, number, place),
                builder.or_(nans, builder.fcmp_unordered("uno", one, one)),
            ]

        start = [
            ir.Constant(_LINE, [-math.inf] * LANES),
            ir.Constant(_PLACES, [0] * LANES),
            ir.Constant(bits, [0] * LANES),
        ]
        best, place, nans = simd._emit_loop(builder, simd._index(0), lines, 1, start, line)
        builder.store(best, builder.inttoptr(maxima, _LINE.as_pointer()), align=4)
        builder.store(place, builder.inttoptr(places, _PLACES.as_pointer()), align=4)
        whole = builder.bitcast(nans, ir.IntType(LANES))
        some = builder.icmp_unsigned("!=", whole, ir.Constant(whole.type, 0))
        return builder.zext(some, simd.I64)

    return types.int64(types.intp, types.intp, types.intp, types.intp), codegen


@numba.njit(fastmath=FASTMATH, error_model="numpy")
def _best_of(address, width, scratch):
    """Index of the first of the largest; ``scratch`` has room for two lines."""
    x = numba.carray(simd.floats(address), width)
    lines = width // LANES
    nans = _scan(address, lines, scratch, scratch + LANES * 4)
    maxima = numba.carray(simd.floats(scratch), LANES)
    places = numba.carray(simd.int32s(scratch + LANES * 4), LANES)
    for i in range(lines * LANES, width):
        nans += x[i] != x[i]
    if nans != 0:
        for i in range(width):
            if x[i] != x[i]:
                return i
    best, place = x[0], 0
    for lane in range(LANES):
        at = np.int64(places[lane]) * LANES + lane
        if lines > 0 and (maxima[lane] > best or (maxima[lane] == best and at < place)):
            best, place = maxima[lane], at
    for i in range(lines * LANES, width):
        if x[i] > best:
            best, place = x[i], i
    return place


def best(params):
    """The kernel: one thread's rows."""
    p = numba.carray(params, 1)[0]
    thread, threads = 0, 1
    if p.threads > 1:
        thread, threads = thread_index(), max(1, team_size())
    values = numba.carray(simd.floats(p.values), p.rows)
    ids = numba.carray(simd.int64s(p.ids), p.rows)
    for row in range(p.rows * thread // threads, p.rows * (thread + 1) // threads):
        logits = p.logits + row * p.stride * 4
        place = _best_of(logits, p.width, p.scratch + thread * 2 * LANES * 4)
        values[row], ids[row] = simd.load_f32(logits, place), place


class FirstBest:
    """Finds the best of rows of logits. Used by one thread. Raises, as it is made, what numba
    raises where it does not work."""

    def __init__(self, team: Team) -> None:
        self._kernel = team.compile(best, Params)
        self._threads = team.threads
        self._params = Params()
        self._scratch = aligned_bytes(team.threads * 2 * LANES * 4)
        self._params.scratch = self._scratch.ctypes.data

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, width], at least one wide, its rows without gaps, to the largest value of
        each row, float32 [n], and its lowest id, int64 [n]; NaN counts as largest.

        Raises:
            ValueError: another type or layout.
        """
        rows, width = logits.shape
        if logits.dtype != torch.float32 or logits.stride(1) != 1 or width == 0:
            raise ValueError("logits must be float32 [n, width], their rows without gaps")
        values = torch.empty(rows, dtype=torch.float32)
        ids = torch.empty(rows, dtype=torch.int64)
        p = self._params
        p.logits, p.stride, p.rows, p.width = logits.data_ptr(), logits.stride(0), rows, width
        p.values, p.ids = values.data_ptr(), ids.data_ptr()
        p.threads = 1 if rows <= FEW else self._threads
        self._kernel(p, p.threads)
        return values, ids
