"""The vector building blocks against float64."""

from __future__ import annotations

import ctypes
import math

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu import simd
from trioserve.kernels.cpu.vector_attention import exact_product, narrow_product, product


class ExpParams(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int64), ("out", ctypes.c_int64), ("count", ctypes.c_int64)]


class TileParams(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("a", "lda", "b", "ldb", "c", "ldc", "rows", "k", "accumulate", "exact")
    ]


def exp_all(params):
    p = numba.carray(params, 1)[0]
    x = numba.carray(simd.floats(p.x), p.count)
    out = numba.carray(simd.floats(p.out), p.count)
    for i in range(p.count):
        out[i] = simd.exp_f32(x[i])


def wide(params):
    p = numba.carray(params, 1)[0]
    if p.exact != 0:
        exact_product(p.rows, p.a, p.lda, p.b, p.ldb, p.c, p.ldc, p.k, p.accumulate)
    else:
        product(p.rows, p.a, p.lda, p.b, p.ldb, p.c, p.ldc, p.k, p.accumulate)


def narrow(params):
    p = numba.carray(params, 1)[0]
    narrow_product(p.rows, p.a, p.lda, p.b, p.ldb, p.c, p.ldc, p.k, p.exact)


@pytest.fixture(scope="module")
def exp(single):
    kernel = single.compile(exp_all, ExpParams)

    def run(x):
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty_like(x)
        kernel(ExpParams(x.ctypes.data, out.ctypes.data, len(x)))
        return out

    return run


@pytest.fixture(scope="module")
def products(single):
    return single.compile(wide, TileParams), single.compile(narrow, TileParams)


def test_exp_to_one_ulp(exp):
    x = np.linspace(-86.9, 87.9, 200_003).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(exp(x), expected, rtol=1.5e-7)


def test_exp_at_its_ends(exp):
    x = [-np.inf, -1e30, -88.0, 0.0, 89.0, np.inf, np.nan]
    np.testing.assert_array_equal(exp(x), [0.0, 0.0, 0.0, 1.0, np.inf, np.inf, np.nan])
    assert math.isclose(exp([-87.0])[0], math.exp(-87.0), rel_tol=1e-6)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 20),
    k=st.integers(1, 70),
    pads=st.tuples(*[st.integers(0, 5)] * 3),
    accumulate=st.booleans(),
    width=st.sampled_from([16, 8]),
    exact=st.booleans(),
)
def test_tiles_equal_float64(products, rows, k, pads, accumulate, width, exact):
    rng = np.random.default_rng(rows * 1000 + k)
    a = rng.standard_normal((rows, k + pads[0])).astype(np.float32)
    b = rng.standard_normal((k, width + pads[1])).astype(np.float32)
    c = rng.standard_normal((rows, width + pads[2])).astype(np.float32)
    accumulate = accumulate and width == 16
    expected = c.astype(np.float64)
    product = a[:, :k].astype(np.float64) @ b[:, :width]
    expected[:, :width] = product + (expected[:, :width] if accumulate else 0)
    params = TileParams(
        *(a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1], c.ctypes.data, c.shape[1]),
        *(rows, k, accumulate, exact),
    )
    products[width == 8](params)
    np.testing.assert_allclose(c, expected, atol=2e-5)  # and nothing beside the tile has changed
