"""Products with codes of 4 and 8 bits, and layers of mixed kinds, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu import codes as codes_module
from trioserve.kernels.cpu.codes import BLOCK, Q4, Q8, Blocks, quantize_q8
from trioserve.kernels.cpu.decoder import DecoderLayer
from trioserve.kernels.cpu.panel_product import BYTE_ROWS, FEW_ROWS, PanelProduct, Panels

from .decoders import BLOCK_SIZE, RandomSteps

HEADS, KV_HEADS, DIM, INNER = 4, 2, 8, 544
WIDTH = HEADS * DIM


def random_blocks(bits: int, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Codes over their whole range; scales and minima of the sizes that models have."""
    source = torch.Generator().manual_seed(seed)
    lines = (outputs, inputs // BLOCK)
    scales = (torch.rand(lines, generator=source) * 0.02 + 1e-4).half()
    if bits == Q8:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=source, dtype=torch.int8)
        return Blocks(Q8, codes, scales, None)
    codes = torch.randint(0, 16, (outputs, inputs), generator=source, dtype=torch.uint8)
    return Blocks(Q4, codes, scales, (-0.2 * torch.rand(lines, generator=source)).half())


def as_float64(blocks: Blocks) -> np.ndarray:
    """What the codes stand for, element by element."""
    values = blocks.codes.numpy().astype(np.float64)
    values *= np.repeat(blocks.scales.numpy().astype(np.float64), BLOCK, axis=1)
    if blocks.minima is not None:
        values += np.repeat(blocks.minima.numpy().astype(np.float64), BLOCK, axis=1)
    return values


@pytest.fixture(scope="module")
def products(team) -> PanelProduct:
    return PanelProduct(team)


@settings(max_examples=80)
@given(
    bits=st.sampled_from([Q4, Q8]),
    rows=st.one_of(st.integers(1, BYTE_ROWS + 2), st.sampled_from([65, 130])),
    lines=st.one_of(st.integers(1, 4), st.sampled_from([15, 16, 17, 35])),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    gap=st.integers(0, 3),
)
def test_product_equals_float64(
    products, assert_product, bits, rows, lines, outputs, with_bias, gap
):
    inputs = lines * BLOCK
    blocks = random_blocks(bits, outputs, inputs)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs + gap, generator=source)[:, :inputs]
    bias = torch.randn(outputs, generator=source) if with_bias else None
    out = products(x, Panels.of_blocks(blocks), bias)
    assert_product(out, x.numpy(), as_float64(blocks), None if bias is None else bias.numpy())


@pytest.mark.parametrize("bits", [Q4, Q8])
@pytest.mark.parametrize("rows", [FEW_ROWS, BYTE_ROWS, BYTE_ROWS + 3])
def test_a_row_of_a_product_does_not_see_the_others(products, bits, rows):
    weight = Panels.of_blocks(random_blocks(bits, 70, 608))
    x = torch.randn(rows, 608, generator=torch.Generator().manual_seed(1))
    clean = products(x, weight)
    x[2] = float("nan")
    dirty = products(x, weight)
    assert dirty[2].isnan().all()
    others = [row for row in range(rows) if row != 2]
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("bits", [Q4, Q8, 0])
def test_a_row_is_the_same_alone_and_beside_others(team, products, bits):
    """Up to the order of sums and the last digits of the tile unit; but not where it rounds."""
    inputs = 608
    if bits:
        blocks = random_blocks(bits, 70, inputs)
        weight, plain = Panels.of_blocks(blocks), as_float64(blocks)
    else:
        half = torch.randn(70, inputs, generator=torch.Generator().manual_seed(2)).half()
        weight, plain = Panels.half(half.float()), half.double().numpy()
    x = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([products(row, weight) for row in x.split(1)])
    terms = np.abs(x.double().numpy()) @ np.abs(plain.T)
    limit = terms * (2.0**-20 if team.tiles is None else 2.0**-16)
    near = np.all((products(x, weight) - alone).abs().numpy() <= limit)
    assert near == (team.parts == 2)


def test_what_is_no_number_stays_none(products):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    x[3, 5], x[4, 6], x[5, 7] = float("inf"), float("-inf"), float("nan")
    x.view(torch.int32)[6, 8] = 0x7FFFFFFF  # rounding its bits alone would make it -0
    for first, last in ((0, 40), (2, 8)):
        out = products(x[first:last], Panels.half(torch.ones(32, 64)))
        assert not out[3 - first : 6 - first].isfinite().any()
        assert out[6 - first].isnan().all()
        assert out[7 - first :].isfinite().all()


@pytest.mark.parametrize("bits", [Q4, Q8])
def test_dequantizing_rows_and_joining_agree(bits):
    blocks = random_blocks(bits, 40, 96)
    np.testing.assert_allclose(blocks.dequantized(), as_float64(blocks), rtol=1e-6, atol=1e-7)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(blocks.rows(order).dequantized(), blocks.dequantized()[order])
    both = Blocks.joined([blocks, blocks.rows(order)]).dequantized()
    assert torch.equal(both[40:], blocks.dequantized()[order])


def test_quantizing_to_8_bits_rounds_to_the_nearest_code():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    weight[3] = 0.0
    weight[4, :32] = 1e-9  # below what a float16 scale can tell apart from nothing
    blocks = quantize_q8(weight)
    error = (blocks.dequantized() - weight).abs().view(64, -1, BLOCK)
    limit = weight.abs().view(64, -1, BLOCK).amax(-1, keepdim=True) / 127 * 0.51
    assert bool((error <= limit.clamp(min=1e-8)).all())
    assert not blocks.dequantized()[3].any()


def test_quantizing_in_pieces_changes_nothing(monkeypatch):
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(3))
    weight[7, 32:64] = 0.0
    whole = quantize_q8(weight)
    for piece in (1, 96 * 7, 96 * 50):
        monkeypatch.setattr(codes_module, "PIECE", piece)
        pieces = quantize_q8(weight)
        assert torch.equal(pieces.codes, whole.codes)
        assert torch.equal(pieces.scales, whole.scales)
    assert not whole.codes[7, 32:64].any()
    assert not whole.dequantized()[7, 32:64].any()


def test_codes_that_came_from_8_bits_are_found_again():
    blocks = random_blocks(Q8, 64, 256)
    codes = blocks.codes.clamp(-127, 127)
    codes[:, ::BLOCK] = 127  # as every quantizer leaves it
    again = quantize_q8(Blocks(Q8, codes, blocks.scales, None).dequantized())
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.scales, blocks.scales)


def test_layers_of_mixed_kinds_equal_float64(make_batch, team):
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, WIDTH),
        "output": (WIDTH, HEADS * DIM),
        "gate_up": (2 * INNER, WIDTH),
        "down": (WIDTH, INNER),
    }
    layers, plain = [], []
    for number in range(3):
        panels, weights = {}, {}
        for index, (name, shape) in enumerate(shapes.items()):
            kind = (0, Q4, Q8)[(number + index) % 3]
            if kind:
                blocks = random_blocks(kind, *shape, seed=number * 4 + index)
                panels[name] = Panels.of_blocks(blocks)
                weights[name] = blocks.dequantized()
            else:
                half = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.2
                weights[name] = half.half().float()
                panels[name] = Panels.half(weights[name])
            weights[f"{name}_bias"] = None
        norms = {"attention_norm": torch.ones(WIDTH), "mlp_norm": torch.ones(WIDTH) * 0.5}
        biases = {f"{name}_bias": None for name in shapes}
        layers.append(DecoderLayer(**panels, **norms, **biases))
        plain.append(weights | norms)
    steps = RandomSteps(team, layers, plain, (HEADS, KV_HEADS, DIM))
    for rows in ([(0, 1)], [(0, 3)], [(0, 70), (0, 1)]):
        batch = make_batch(rows, BLOCK_SIZE)
        n = batch.num_tokens
        expected = steps.begin(batch, exact=True)
        outcome = steps.run(torch.arange(n))
        scale = np.abs(expected).max()
        error = 5e-4 if team.word_products and team.tiles is None else 1e-4
        if team.parts == 1 and n > FEW_ROWS:
            error = 1e-1
        np.testing.assert_allclose(outcome, expected, atol=error * scale, rtol=10 * error)
