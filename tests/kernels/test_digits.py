"""Rows written as whole numbers, and their products with codes."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from trioserve.kernels.cpu import digits
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8, Blocks
from trioserve.kernels.cpu.panel_product import BYTE_ROWS, PanelProduct, Panels
from trioserve.kernels.cpu.runtime import Team, cache_directory

pytestmark = pytest.mark.skipif(
    not digits.PRESENT, reason="this processor has no products of bytes"
)


@pytest.fixture(scope="module")
def product() -> PanelProduct:
    return PanelProduct(Team(1, cache_directory()))


@numba.njit(error_model="numpy")
def _write(bits, x, stride, lines, rows, records):
    digits.write_rows(bits, rows, x, stride, lines, records)


def records_of(x: torch.Tensor, bits: int = Q4) -> np.ndarray:
    """uint8 [rows, blocks, RECORD]."""
    rows, inputs = x.shape
    lines = inputs // BLOCK
    made = np.zeros((rows, lines, digits.RECORD), np.uint8)
    _write(bits, x.data_ptr(), x.stride(0), lines, rows, made.ctypes.data)
    return made


def read(records: np.ndarray) -> tuple[np.ndarray, ...]:
    """Digits int64 [rows, blocks, 3, 32]; scales and sums; starts int32 [rows, blocks, 3]."""
    shape = records.shape[:2]
    end = digits.DIGITS * BLOCK
    made = records[..., :end].copy().view(np.int8).astype(np.int64)
    floats = records[..., end : end + 8].copy().view(np.float32)
    starts = records[..., end + 8 : end + 8 + 4 * digits.DIGITS].copy().view(np.int32)
    return made.reshape(*shape, digits.DIGITS, BLOCK), floats[..., 0], floats[..., 1], starts


def test_the_whole_numbers_stand_for_x_to_the_last_bits():
    x = torch.randn(400, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-20, 20, 400).unsqueeze(1)
    made, scales, sums, _ = read(records_of(x))
    whole = made[:, :, 0] * 65536 + made[:, :, 1] * 256 + made[:, :, 2]
    values = x.numpy().astype(np.float64).reshape(400, 4, BLOCK)
    largest = np.abs(values).max(-1, keepdims=True)
    # All signs and sizes of the largest are met, so rounding up at the limit is too.
    assert np.all(np.abs(whole * scales[..., None].astype(np.float64) - values) <= largest * 2**-22)
    np.testing.assert_allclose(sums, values.sum(-1), atol=float(largest.max()) * 1e-5)


def test_the_starts_take_off_what_codes_of_8_bits_get_added():
    """To lose their sign; NEON takes them with it."""
    x = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    made, _, _, starts = read(records_of(x, Q8))
    assert np.array_equal(starts, (-128 if digits.VNNI else 0) * made.sum(-1))


@pytest.mark.parametrize("value", [0.0, 1e-35, -1e-42])
def test_next_to_nothing_counts_as_nothing(value):
    made, scales, sums, starts = read(records_of(torch.full((1, BLOCK), value), Q8))
    assert not made.any()
    assert not starts.any()
    assert scales[0, 0] == 0
    assert np.isfinite(sums).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(value):
    x = torch.randn(1, 3 * BLOCK, generator=torch.Generator().manual_seed(2))
    x[0, BLOCK + 5] = value
    _, scales, _, _ = read(records_of(x))
    assert np.isnan(scales[0, 1])
    assert np.isfinite(scales[0, [0, 2]]).all()


def test_one_large_value_leaves_the_others_of_its_block_their_digits(product):
    """What makes 8 bits of x too few: beside 1,000 a value of 0.01 would be nothing."""
    weight = Blocks(
        Q8, torch.ones(1, BLOCK, dtype=torch.int8), torch.ones(1, 1).half(), minima=None
    )
    x = torch.full((1, BLOCK), 0.01)
    x[0, 3], x[0, 4] = 1000.0, -1000.0
    out = product(x, Panels.of_blocks(weight))
    assert abs(out.item() - 0.3) < 30 * 1000 * 2**-23


@pytest.mark.parametrize("bits", [Q4, Q8])
def test_a_row_gets_the_same_alone_and_among_others(product, bits):
    source = torch.Generator().manual_seed(3)
    lines = (70, 19)
    low = 0 if bits == Q4 else -128
    codes = torch.randint(low, low + (1 << bits), (70, 19 * BLOCK), generator=source)
    weight = Panels.of_blocks(
        Blocks(
            bits,
            codes.to(torch.uint8 if bits == Q4 else torch.int8),
            torch.rand(lines, generator=source).half(),
            torch.rand(lines, generator=source).half() if bits == Q4 else None,
        )
    )
    x = torch.randn(BYTE_ROWS, 19 * BLOCK, generator=source)
    together = product(x, weight)
    for row in range(BYTE_ROWS):
        assert torch.equal(product(x[row : row + 1], weight)[0], together[row])
