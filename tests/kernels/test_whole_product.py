"""Products in whole numbers: what rows and weights become, and their sums to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu import whole_product
from trioserve.kernels.cpu.decoder import DecoderLayer
from trioserve.kernels.cpu.panel_product import Panels
from trioserve.kernels.cpu.runtime import Team, cache_directory
from trioserve.kernels.cpu.whole_panels import (
    KINDS,
    LIMIT,
    MOST_INPUTS,
    WHOLE8,
    WHOLE16,
    panels_of,
    quantize,
    rounding_error,
)
from trioserve.kernels.cpu.whole_product import TILES_PRESENT, WholeProduct

from .decoders import BLOCK_SIZE, RandomSteps, check_refusals

pytestmark = pytest.mark.skipif(
    not whole_product.PRESENT, reason="this processor has no products of bytes"
)


@pytest.fixture(scope="module")
def products(team: Team) -> WholeProduct:
    return WholeProduct(team)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def expected(x: torch.Tensor, weight: torch.Tensor, kind: int) -> np.ndarray:
    """By the integers that rows and weight become, low times low left out; float64."""
    codes, scales = (each.numpy() for each in quantize(weight, kind))
    return whole_product.reference(x.numpy(), codes, scales, kind)


@settings(max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([32, 33, 65, 130])),
    blocks=st.one_of(st.integers(1, 5), st.sampled_from([9, 18, 48])),
    outputs=st.integers(1, 100),
    kind=st.sampled_from(KINDS),
    with_bias=st.booleans(),
    gap=st.integers(0, 3),
)
def test_sums_are_those_of_the_integers(products, rows, blocks, outputs, kind, with_bias, gap):
    inputs = 32 * blocks
    weight, bias = random(outputs, inputs), random(outputs, seed=1) if with_bias else None
    x = random(rows, inputs + gap, seed=2)[:, :inputs]
    out = products(x, panels_of(weight, kind), bias)
    found = expected(x, weight, kind)
    size = np.abs(found).max()
    found = found if bias is None else found + bias.numpy()
    # Nothing is rounded but the outcome, a few times in float32.
    np.testing.assert_allclose(out.numpy(), found, rtol=1e-6, atol=1e-6 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_how_near_it_comes_to_float64(products, kind):
    x, weight = random(40, 1536), random(70, 1536, seed=1)
    exact = x.double() @ weight.double().T
    difference = (products(x, panels_of(weight, kind)).double() - exact).abs().max()
    assert difference < exact.abs().max() * (2e-2 if kind == WHOLE8 else 3e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_to_the_bit_alone_among_others_and_by_either_unit(kind):
    x, weight = random(70, 960), panels_of(random(130, 960, seed=1), kind)
    teams = [
        Team(threads, cache_directory(), tiles=tiles, exact=exact)
        for threads, tiles, exact in ((1, True, False), (2, False, False), (2, True, True))
    ]
    units = [WholeProduct(team) for team in teams]
    assert {unit.unit for unit in units} == {"VNNI"} | (
        {"the tile unit"} if TILES_PRESENT else set()
    )
    together = units[0](x, weight)
    for unit in units:
        assert torch.equal(unit(x, weight), together)
        alone = torch.cat([unit(row, weight) for row in x.split(1)])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sums_do_not_overflow(products, kind, sign):
    """All bytes at their ends, over more inputs than any model has."""
    inputs = 1 << 15
    x, weight = torch.full((3, inputs), sign), torch.full((2, inputs), -3.0)
    out = products(x, panels_of(weight, kind))
    np.testing.assert_allclose(out.numpy(), -3.0 * sign * inputs, rtol=1e-6)


def test_too_many_inputs_and_odd_ones_are_refused():
    for inputs in (MOST_INPUTS + 32, 40):
        with pytest.raises(ValueError, match="a multiple of 32 up to 65536 is needed"):
            panels_of(torch.ones(1, inputs), WHOLE8)


@pytest.mark.parametrize("value", [0.0, 1e-35, -1e-42])
def test_next_to_nothing_counts_as_nothing(products, value):
    out = products(torch.full((2, 64), value), panels_of(random(32, 64), WHOLE16))
    assert not out.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_spoils_its_row_and_no_other(products, kind, value):
    x, weight = random(20, 96), panels_of(random(70, 96, seed=1), kind)
    clean = products(x, weight)
    x[4, 95] = value
    dirty = products(x, weight)
    assert dirty[4].isnan().all()
    others = [row for row in range(20) if row != 4]
    assert torch.equal(dirty[others], clean[others])


def test_one_large_value_leaves_the_others_of_its_row_their_digits(products):
    """What makes 8 bits of x too few: beside 1,000 a value of 0.1 would be nothing."""
    x = torch.full((1, 64), 0.1)
    x[0, 3], x[0, 4] = 1000.0, -1000.0
    out = products(x, panels_of(torch.ones(1, 64), WHOLE8))
    assert abs(out.item() - 6.2) < 62 * 1000 / LIMIT / 2


def test_rows_may_go_through_a_norm_first(products):
    x, weight = random(33, 96), panels_of(random(70, 96, seed=1), WHOLE16)
    norm = torch.cat([random(96, seed=2), torch.tensor([1e-5])])
    normed = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt().float() * norm[:-1]
    found = products(x, weight, None, norm)
    torch.testing.assert_close(found, products(normed, weight), atol=2e-3, rtol=0)


def test_products_refuse_what_they_would_read_wrongly(products):
    check_refusals(products, lambda weight: panels_of(weight, WHOLE8), 64)
    with pytest.raises(ValueError, match="not in whole numbers"):
        products(random(3, 64), Panels.half(random(70, 64)))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_to_the_nearest_integer_of_their_output(kind):
    weight = random(50, 96) * torch.logspace(-20, 3, 50).unsqueeze(1)
    weight[7] = 0.0
    codes, scales = quantize(weight, kind)
    assert (
        codes.abs().amax(-1)[weight.abs().amax(-1) > 0].eq(127 if kind == WHOLE8 else LIMIT).all()
    )
    assert not codes[7].any()
    difference = (codes * scales.double().unsqueeze(-1) - weight.double()).abs()
    assert (difference <= scales.double().unsqueeze(-1) * (0.5 + 1e-3)).all()
    share = difference.norm() / weight.double().norm()
    assert rounding_error(weight, kind) == pytest.approx(share.item(), rel=1e-2)


WIDTH, INNER, HEADS, KV_HEADS, DIM = 64, 96, 6, 2, 16


@pytest.mark.parametrize("whole", [("qkv", "output", "gate_up", "down"), ("gate_up",)])
def test_layers_with_them_equal_float64(make_batch, team, whole):
    """Some of a layer's products, or all."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, WIDTH),
        "output": (WIDTH, HEADS * DIM),
        "gate_up": (2 * INNER, WIDTH),
        "down": (WIDTH, INNER),
    }
    layers = []
    for seed in (1, 2):
        layer = {
            name: random(*shape, seed=10 * seed + index, scale=0.2).half().float()
            for index, (name, shape) in enumerate(shapes.items())
        }
        norms = {
            name: 1 + random(WIDTH, seed=seed) * 0.1 for name in ("attention_norm", "mlp_norm")
        }
        layers.append(layer | norms | {f"{name}_bias": None for name in shapes})
    made = [
        DecoderLayer(
            **layer
            | {
                name: panels_of(layer[name], WHOLE16) if name in whole else Panels.half(layer[name])
                for name in shapes
            }
        )
        for layer in layers
    ]
    steps = RandomSteps(team, made, layers, (HEADS, KV_HEADS, DIM))
    for rows, wanted in (([(0, 1)], [0]), ([(0, 40), (0, 1), (0, 70)], [110, 3])):
        batch = make_batch(rows, BLOCK_SIZE)
        truth = steps.begin(batch)
        limit = (2e-3 if team.parts == 2 else 2e-2) * np.abs(truth).max()
        for some in (list(range(batch.num_tokens)), wanted):
            assert np.abs(steps.run(torch.tensor(some)) - truth[some]).max() < limit
