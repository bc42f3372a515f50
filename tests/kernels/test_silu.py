"""silu(gate) * up against float64."""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu import silu


class Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("gate", "up", "out", "count")]


def gated(params):
    p = numba.carray(params, 1)[0]
    silu.silu_mul(p.gate, p.up, p.out, p.count)


@pytest.fixture(scope="module")
def run(single):
    kernel = single.compile(gated, Params)

    def run(gate, up):
        gate, up = (np.ascontiguousarray(x, np.float32) for x in (gate, up))
        out = np.full(len(gate) + 1, 7, np.float32)
        kernel(Params(gate.ctypes.data, up.ctypes.data, out.ctypes.data, len(gate)))
        assert out[-1] == 7  # nothing is written past the end
        return out[:-1]

    return run


def test_to_a_few_ulp(run):
    gate = np.linspace(-86.9, 120.0, 300_007).astype(np.float32)
    up = np.linspace(-3.0, 2.0, len(gate)).astype(np.float32)
    np.testing.assert_allclose(run(gate, up), silu.reference(gate, up), rtol=4e-7)


def test_at_its_ends(run):
    gate = np.array([-1e30, -1000.0, -88.0, -0.0, 0.0, 1e30, np.inf, -np.inf, np.nan, 1.0])
    out = run(gate, [1.0] * 9 + [np.nan])
    np.testing.assert_allclose(out[1:6], [0.0, 0.0, 0.0, 0.0, 1e30], rtol=1e-6, atol=1e-30)
    assert abs(out[0]) < 1e-6  # of 1e30: the sigmoid ends at 1e-38
    assert out[6] == np.inf
    assert not np.isfinite(out[7])
    assert np.isnan(out[8:]).all()


@settings(max_examples=60)
@given(count=st.integers(1, 4 * silu.LANES + 3), seed=st.integers(0, 999))
def test_a_value_depends_on_nothing_beside_it(run, count, seed):
    gate, up = np.random.default_rng(seed).standard_normal((2, count)) * 5
    whole = run(gate, up)
    alone = [run(gate[i : i + 1], up[i : i + 1])[0] for i in range(count)]
    assert whole.tolist() == alone
