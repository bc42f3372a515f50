"""Rows written as words of 16 bits, and their products with codes."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from trioserve.kernels.cpu import words
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8, Blocks
from trioserve.kernels.cpu.panel_product import BYTE_ROWS, WORD_ROWS, PanelProduct, Panels
from trioserve.kernels.cpu.runtime import Team, cache_directory

pytestmark = pytest.mark.skipif(
    not words.PRESENT, reason="this processor has no products of words that are used"
)


@pytest.fixture(scope="module", params=[False, True], ids=["words", "exact"])
def product(request) -> PanelProduct:
    cache = cache_directory()
    return PanelProduct(Team(2, cache, tiles=False, byte_products=False, exact=request.param))


@numba.njit(error_model="numpy")
def _write(rows, x, stride, lines, records):
    words.write_rows(rows, x, stride, lines, records)


def records_of(x: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Whole numbers int64 [rows, blocks, 32], scales and sums [rows, blocks]."""
    rows, inputs = x.shape
    lines = inputs // BLOCK
    made = np.zeros((rows, lines, words.RECORD), np.uint8)
    _write(rows, x.data_ptr(), x.stride(0), lines, made.ctypes.data)
    whole = made[..., : 2 * BLOCK].copy().view(np.int16).astype(np.int64)
    floats = made[..., 2 * BLOCK : 2 * BLOCK + 8].copy().view(np.float32)
    return whole, floats[..., 0], floats[..., 1]


def test_the_whole_numbers_stand_for_x_to_half_of_one():
    x = torch.randn(400, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-20, 20, 400).unsqueeze(1)
    whole, scales, sums = records_of(x)
    values = x.numpy().astype(np.float64).reshape(400, 4, BLOCK)
    largest = np.abs(values).max(-1, keepdims=True)
    made = whole * scales[..., None].astype(np.float64)
    assert np.all(np.abs(made - values) <= largest * 2**-15.99)
    assert np.all(np.abs(whole).max(-1) == words.LIMIT)
    np.testing.assert_allclose(sums, made.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-35, -1e-42])
def test_next_to_nothing_counts_as_nothing(value):
    whole, scales, sums = records_of(torch.full((1, BLOCK), value))
    assert not whole.any()
    assert scales[0, 0] == sums[0, 0] == 0


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(value):
    x = torch.randn(1, 3 * BLOCK, generator=torch.Generator().manual_seed(2))
    x[0, BLOCK + 5] = value
    _, scales, sums = records_of(x)
    assert np.isnan([scales[0, 1], sums[0, 1]]).all()
    assert np.isfinite([scales[0, [0, 2]], sums[0, [0, 2]]]).all()


def random_panels(bits: int, outputs: int, lines: int) -> Panels:
    source = torch.Generator().manual_seed(3)
    low = 0 if bits == Q4 else -128
    codes = torch.randint(low, low + (1 << bits), (outputs, lines * BLOCK), generator=source)
    codes = codes.to(torch.uint8 if bits == Q4 else torch.int8)
    scales = torch.rand((outputs, lines), generator=source).half()
    minima = torch.rand((outputs, lines), generator=source).half() if bits == Q4 else None
    return Panels.of_blocks(Blocks(bits, codes, scales, minima))


@pytest.mark.parametrize("bits", [Q4, Q8])
def test_the_largest_sums_fit(product, bits):
    """All values of the largest size, as codes may be: no sum wraps around."""
    code, plain = (15, 15.0) if bits == Q4 else (-128, -128.0)
    codes = torch.full((1, BLOCK), code, dtype=torch.uint8 if bits == Q4 else torch.int8)
    one = torch.ones(1, 1).half()
    weight = Panels.of_blocks(Blocks(bits, codes, one, one * 0 if bits == Q4 else None))
    for rows in (1, WORD_ROWS + 1):
        out = product(torch.full((rows, BLOCK), -3.0), weight)
        torch.testing.assert_close(out, torch.full((rows, 1), -3.0 * BLOCK * plain))


@pytest.mark.parametrize("bits", [Q4, Q8])
def test_a_row_gets_the_same_to_the_bit_alone_and_among_others(product, bits):
    """As few and as many, where a panel is widened piece by piece."""
    lines = 19
    weight = random_panels(bits, 70, lines)
    source = torch.Generator().manual_seed(4)
    x = torch.randn(max(BYTE_ROWS, 4 * WORD_ROWS) + 3, lines * BLOCK, generator=source)
    together = product(x, weight)
    for rows in (1, 2, 3, WORD_ROWS):
        for first in range(0, len(x) - rows, rows):
            assert torch.equal(
                product(x[first : first + rows], weight), together[first : first + rows]
            )


@pytest.mark.parametrize("bits", [Q4, Q8])
def test_registers_of_any_width_give_the_same_to_the_bit(product, bits):
    """What is done here one value after the other is done by lanes there."""
    lines = 3
    source = torch.Generator().manual_seed(5)
    x = torch.randn(2, lines * BLOCK, generator=source)
    whole, scales, sums = records_of(x)
    codes = torch.randint(0, 16, (5, lines * BLOCK), generator=source)
    factors = torch.rand((5, lines), generator=source).half()
    minima = torch.rand((5, lines), generator=source).half() if bits == Q4 else None
    codes = codes.to(torch.uint8 if bits == Q4 else torch.int8)
    out = product(x, Panels.of_blocks(Blocks(bits, codes, factors, minima)))
    for row in range(2):
        for output in range(5):
            total = np.float32(0.0)
            for line in range(lines):
                numbers = codes[output].numpy().reshape(lines, BLOCK)[line].astype(np.int64)
                value = np.float32((whole[row, line] * numbers).sum())
                factor = np.float32(factors[output, line]) * scales[row, line]
                # A float64 product of two float32 is exact; its sum is rounded once, nearly always.
                total = np.float32(np.float64(value) * np.float64(factor) + np.float64(total))
                if minima is not None:
                    part = np.float64(sums[row, line]) * np.float64(minima[output, line])
                    total = np.float32(part + np.float64(total))
            assert out[row, output].item() == total
