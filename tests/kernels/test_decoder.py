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

from .decoders import check_refusals, prepare

HEADS, KV_HEADS, DIM, WIDTH, INNER, LAYERS, VOCAB = 6, 2, 8, 48, 520, 3, 90


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


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_product_of_rows_that_go_through_a_norm_first(products, assert_product, rows):
    weight, x = random(70, 96).half().float(), random(rows, 96, seed=1, scale=3.0)
    norm = torch.cat([1 + random(96, seed=2, scale=0.1), torch.tensor([1e-5])])
    out = products(x, Panels.half(weight), None, norm)
    exact = x.double().numpy()
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * norm[:-1].numpy()
    assert_product(out, normed.astype(np.float32), weight.numpy().astype(np.float64))
    with pytest.raises(ValueError, match=r"norm must be float32 \[97\]"):
        products(x, Panels.half(weight), None, norm[:-1])


def test_products_refuse_what_they_would_read_wrongly(products):
    check_refusals(products, Panels.half, 16)


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


class Model:
    """A decoder with random weights, and what it needs for a batch."""

    def __init__(self, team, kernel, batch, *, with_bias=False, half=False) -> None:
        self.attention = PagedAttention(
            team, kv_heads=KV_HEADS, group=3, head_dim=DIM, block_size=batch.block_size
        )
        self.layers = make_layers(with_bias)
        self.embedding = random(VOCAB, WIDTH, seed=5)
        if half:
            self.embedding = self.embedding.half()
        packed_layers = [packed(layer) for layer in self.layers]
        self.decoder = Decoder(team, kernel, self.embedding, packed_layers, self.attention, 1e-5)
        angles = random(batch.num_tokens + 3, DIM // 2, seed=6)
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        self.batch = batch
        n = batch.num_tokens
        self.token_ids = torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n))
        self.caches = self.new_caches()
        prepare(self.attention, batch.context)

    def new_caches(self):
        return [self.attention.new_cache(self.batch.num_blocks) for _ in self.layers]

    def run(self, wanted=None, **changes):
        given = {
            "token_ids": self.token_ids,
            "positions": self.batch.context.positions,
            "rotations": self.rotations,
            "caches": self.caches,
            "wanted": torch.arange(self.batch.num_tokens) if wanted is None else wanted,
        }
        return self.decoder(**given | changes)

    def expected(self) -> np.ndarray:
        return reference(
            self.embedding[self.token_ids].numpy(),
            self.rotations[self.batch.context.positions].unsqueeze(1).numpy(),
            self.layers,
            self.batch.ends,
            (HEADS, KV_HEADS, DIM),
            1e-5,
        )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 3)], [(0, 1)] * 9, [(0, 70), (0, 1), (0, 20)]])
def test_layers_equal_float64(make_batch, team, kernel, rows, with_bias):
    batch = make_batch(rows, 16)
    model = Model(team, kernel, batch, with_bias=with_bias, half=with_bias)
    expected = model.expected()
    n = batch.num_tokens
    for wanted in (None, torch.tensor([n - 1]), torch.arange(n).flip(0), torch.arange(0, n, 2)):
        out = model.run(wanted)  # the buffers and counters are used again
        np.testing.assert_allclose(
            out, expected if wanted is None else expected[wanted.numpy()], atol=4e-4
        )


def test_where_nothing_is_wanted_the_cache_is_written(make_batch, team, kernel):
    model = Model(team, kernel, make_batch([(0, 5), (0, 2)], 16))
    model.run()
    others = model.new_caches()
    assert model.run(torch.arange(0), caches=others).shape == (0, WIDTH)
    for cache, other in zip(model.caches, others, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(cache, other, strict=True))
        assert cache[0].any()


def test_a_token_may_be_wanted_twice(make_batch, team, kernel):
    model = Model(team, kernel, make_batch([(0, 3)], 16))
    wanted = torch.tensor([2, 0] * 40)
    np.testing.assert_allclose(model.run(wanted), model.expected()[wanted.numpy()], atol=4e-4)


def test_other_caches_are_taken_from_the_next_call_on(make_batch, team, kernel):
    model = Model(team, kernel, make_batch([(0, 4)], 16))
    both = [model.new_caches(), model.new_caches()]
    for caches in both:
        model.run(caches=caches)
    for (keys, values), (more_keys, more_values) in zip(*both, strict=True):
        assert keys.any()
        assert torch.equal(keys, more_keys)
        assert torch.equal(values, more_values)


@pytest.mark.parametrize("id", [-1, VOCAB, 2**40])
def test_a_token_or_a_position_that_no_table_has_is_said(make_batch, team, kernel, id):
    model = Model(team, kernel, make_batch([(0, 4)], 16))
    clean = model.run().clone()
    for name in ("token_ids", "positions"):
        given = {"token_ids": model.token_ids, "positions": model.batch.context.positions}[name]
        wrong = given.clone()
        wrong[2] = id
        with pytest.raises(IndexError, match="out of range"):
            model.run(**{name: wrong})
    assert torch.equal(model.run(), clean)


def test_layers_refuse_what_they_would_read_wrongly(make_batch, team, kernel):
    model = Model(team, kernel, make_batch([(0, 4)], 16))
    with pytest.raises(ValueError, match="token_ids must be"):
        model.run(token_ids=model.token_ids.int())
    with pytest.raises(ValueError, match="positions must be"):
        model.run(positions=torch.arange(5))
    with pytest.raises(ValueError, match="rotations must be"):
        model.run(rotations=model.rotations.real)
    with pytest.raises(ValueError, match="wanted must be"):
        model.run(torch.arange(8)[::2])
    with pytest.raises(ValueError, match="4 tokens prepared, 3 came"):
        model.run(token_ids=model.token_ids[:3], positions=torch.arange(3))
    with pytest.raises(ValueError, match="3 caches are needed, 2 came"):
        model.run(caches=model.caches[:2])


def test_fewer_threads_than_were_asked_for(make_batch, team, kernel):
    """OpenMP may give fewer, by OMP_THREAD_LIMIT or OMP_DYNAMIC; nothing is left out then."""
    model = Model(team, kernel, make_batch([(0, 5), (0, 1)], 16))
    expected = model.run().clone()
    model.decoder._kernel = lambda params: kernel.layers(params, threads=1)
    torch.testing.assert_close(model.run(), expected)
