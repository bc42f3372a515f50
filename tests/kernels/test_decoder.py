"""The products with float16 weights, and all layers in one region, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu.decoder import (
    Decoder,
    DecoderKernels,
    DecoderLayer,
    compile_decoder,
    reference,
)
from trioserve.kernels.cpu.paged_attention import PagedAttention
from trioserve.kernels.cpu.panel_product import PanelProduct, Panels

HEADS, KV_HEADS, DIM, WIDTH, INNER, LAYERS = 6, 2, 8, 48, 520, 3


@pytest.fixture(scope="module")
def products(team) -> PanelProduct:
    return PanelProduct(team)


@pytest.fixture(scope="module")
def kernel(team) -> DecoderKernels:
    return compile_decoder(team)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 14), st.sampled_from([65, 130])),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([32, 288, 511, 512, 513, 1088, 1100])),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    gap=st.integers(0, 3),
)
def test_product_equals_float64(products, assert_product, rows, inputs, outputs, with_bias, gap):
    weight, bias = random(outputs, inputs), random(outputs, seed=1) if with_bias else None
    x = random(rows, inputs + gap, seed=2)[:, :inputs]
    out = products(x, Panels.half(weight), bias)
    rounded = weight.numpy().astype(np.float16).astype(np.float64)
    assert_product(out, x.numpy(), rounded, None if bias is None else bias.numpy())


def test_a_row_of_a_product_does_not_see_the_others(products):
    packed, x = Panels.half(random(70, 600)), random(9, 600, seed=1)
    clean = products(x, packed)
    x[4] = float("nan")
    dirty = products(x, packed)
    assert dirty[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(dirty[others], clean[others])


def test_products_refuse_what_they_would_read_wrongly(products):
    packed, x = Panels.half(random(70, 16)), random(3, 16)
    with pytest.raises(ValueError, match=r"x must be float32 \[n, 16\]"):
        products(x.double(), packed)
    with pytest.raises(ValueError, match="its rows without gaps"):
        products(random(16, 3).t(), packed)
    with pytest.raises(ValueError, match=r"x must be float32 \[n, 16\]"):
        products(x[:, :8], packed)
    with pytest.raises(ValueError, match=r"bias must be float32 \[70\]"):
        products(x, packed, random(69))


def make_layers(with_bias: bool) -> list[dict[str, torch.Tensor | None]]:
    def layer(seed: int) -> dict[str, torch.Tensor | None]:
        heads = (HEADS + 2 * KV_HEADS) * DIM
        shapes = {
            "qkv": (heads, WIDTH),
            "output": (WIDTH, HEADS * DIM),
            "gate_up": (2 * INNER, WIDTH),
            "down": (WIDTH, INNER),
        }
        made: dict[str, torch.Tensor | None] = {}
        for index, (name, shape) in enumerate(shapes.items()):
            made[name] = random(*shape, seed=seed * 10 + index, scale=0.2).half().float()
            made[f"{name}_bias"] = random(shape[0], seed=seed + index) if with_bias else None
        made["attention_norm"] = 1 + random(WIDTH, seed=seed, scale=0.1)
        made["mlp_norm"] = 1 + random(WIDTH, seed=seed + 1, scale=0.1)
        return made

    return [layer(seed) for seed in range(1, LAYERS + 1)]


def packed(layer: dict[str, torch.Tensor | None]) -> DecoderLayer:
    names = ("qkv", "output", "gate_up", "down")
    return DecoderLayer(**layer | {name: Panels.half(layer[name]) for name in names})


def prepare(attention, context) -> None:
    attention.prepare(
        slots=context.slots,
        query_starts=context.query_starts,
        row_starts=context.row_starts,
        row_tables=context.row_tables,
        tables=context.block_tables,
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 3)], [(0, 1)] * 9, [(0, 70), (0, 1), (0, 20)]])
def test_layers_equal_float64(make_batch, team, kernel, rows, with_bias):
    attention = PagedAttention(team, kv_heads=KV_HEADS, group=3, head_dim=DIM, block_size=16)
    layers = make_layers(with_bias)
    decoder = Decoder(team, kernel, [packed(layer) for layer in layers], attention, 1e-5)
    batch = make_batch(rows, 16)
    caches = [attention.new_cache(batch.num_blocks) for _ in layers]
    prepare(attention, batch.context)
    hidden = random(batch.num_tokens, WIDTH, seed=5)
    angles = random(batch.num_tokens, 1, DIM // 2, seed=6)
    rotations = torch.polar(torch.ones_like(angles), angles)
    expected_hidden, expected, outcome = reference(
        hidden.numpy(), rotations.numpy(), layers, batch.ends, (HEADS, KV_HEADS, DIM), 1e-5
    )
    for _ in range(2):  # the buffers and counters are used again
        begin = hidden.clone()
        mixed = decoder(begin, rotations, caches)
        np.testing.assert_allclose(begin, expected_hidden, atol=2e-4)
        np.testing.assert_allclose(mixed, expected, atol=2e-4)
        whole = hidden.clone()
        decoder(whole, rotations, caches, whole=True)
        np.testing.assert_allclose(whole, outcome, atol=4e-4)


def test_other_caches_are_taken_from_the_next_call_on(make_batch, team, kernel):
    attention = PagedAttention(team, kv_heads=KV_HEADS, group=3, head_dim=DIM, block_size=16)
    decoder = Decoder(
        team, kernel, [packed(layer) for layer in make_layers(False)], attention, 1e-5
    )
    batch = make_batch([(0, 4)], 16)
    prepare(attention, batch.context)
    rotations = torch.ones(4, 1, DIM // 2, dtype=torch.complex64)
    both = [[attention.new_cache(batch.num_blocks) for _ in range(LAYERS)] for _ in range(2)]
    for caches in both:
        decoder(random(4, WIDTH), rotations, caches)
    for (keys, values), (more_keys, more_values) in zip(*both, strict=True):
        assert keys.any()
        assert torch.equal(keys, more_keys)
        assert torch.equal(values, more_values)


def test_layers_refuse_what_they_would_read_wrongly(make_batch, team, kernel):
    attention = PagedAttention(team, kv_heads=KV_HEADS, group=3, head_dim=DIM, block_size=16)
    decoder = Decoder(
        team, kernel, [packed(layer) for layer in make_layers(False)], attention, 1e-5
    )
    batch = make_batch([(0, 4)], 16)
    caches = [attention.new_cache(batch.num_blocks) for _ in range(LAYERS)]
    prepare(attention, batch.context)
    rotations = torch.ones(4, 1, DIM // 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="hidden must be"):
        decoder(random(4, WIDTH + 1), rotations, caches)
    with pytest.raises(ValueError, match="rotations must be"):
        decoder(random(4, WIDTH), rotations.real, caches)
    with pytest.raises(ValueError, match="4 tokens prepared, 3 came"):
        decoder(random(3, WIDTH), rotations[:3], caches)
    with pytest.raises(ValueError, match="3 caches are needed, 2 came"):
        decoder(random(4, WIDTH), rotations, caches[:2])


def test_fewer_threads_than_were_asked_for(make_batch, team, kernel):
    """OpenMP may give fewer, by OMP_THREAD_LIMIT or OMP_DYNAMIC; nothing is left out then."""
    attention = PagedAttention(team, kv_heads=KV_HEADS, group=3, head_dim=DIM, block_size=16)
    decoder = Decoder(
        team, kernel, [packed(layer) for layer in make_layers(False)], attention, 1e-5
    )
    batch = make_batch([(0, 5), (0, 1)], 16)
    caches = [attention.new_cache(batch.num_blocks) for _ in range(LAYERS)]
    prepare(attention, batch.context)
    rotations = torch.ones(6, 1, DIM // 2, dtype=torch.complex64)
    hidden = random(6, WIDTH)
    expected = decoder(hidden.clone(), rotations, caches).clone()
    decoder._kernel = lambda params: kernel.layers(params, threads=1)
    torch.testing.assert_close(decoder(hidden.clone(), rotations, caches), expected)
