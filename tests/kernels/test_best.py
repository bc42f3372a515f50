"""The best of rows of logits, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.core.candidates import first_best
from trioserve.kernels.cpu.best import FEW, LANES, FirstBest, reference


@pytest.fixture(scope="module")
def best(team) -> FirstBest:
    return FirstBest(team)


SPECIAL = [float("nan"), float("inf"), -float("inf"), -float("nan"), 3.0, -0.0, 0.0]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 2 * FEW + 3),
    width=st.one_of(st.integers(1, 40), st.integers(LANES - 2, 5 * LANES + 2)),
    seed=st.integers(0, 1000),
    placed=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=6),
)
def test_best_equals_numpy_and_torch(best, rows, width, seed, placed):
    source = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3, 4, (rows, width + 3), generator=source).float()  # equals abound
    logits = whole[:, :width]
    for place, value in placed:
        logits[place % rows, (place // rows) % width] = value
    values, ids = best(logits)
    expected, places = reference(logits.numpy())
    np.testing.assert_array_equal(values.numpy(), expected)
    assert ids.tolist() == places.tolist()
    assert ids.tolist() == first_best(logits)[1].tolist()


def test_a_row_of_nothing_but_minus_infinity_gives_its_first_id(best):
    values, ids = best(torch.full((1, 1200), -float("inf")))
    assert (values.item(), ids.item()) == (-float("inf"), 0)


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2).T, torch.zeros(2, 0)],
    ids=["float64", "gaps", "nothing"],
)
def test_what_the_kernel_cannot_read_is_refused(best, logits):
    with pytest.raises(ValueError, match="float32"):
        best(logits)
