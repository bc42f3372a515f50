"""Both attention backends against float64, over shapes, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.kernels.cpu.paged_attention import SPAN, PagedAttention, reference
from trioserve.kernels.cpu.runtime import Team
from trioserve.kernels.cpu.tile_attention import supports
from trioserve.models.attention import (
    AttentionBackend,
    KVCacheSpec,
    NumbaAttention,
    TorchAttention,
    make_backend,
)

BACKENDS = ["numba", "torch"]
EDGES = sorted({n + d for n in (0, 16, 32, 128, SPAN, 2 * SPAN) for d in (-1, 0, 1)} - {-1})

row = st.tuples(st.sampled_from(EDGES), st.sampled_from([1, 1, 1, 2, 7, 8, 16, 33, 130]))
shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 3, 4, 7, 8, 26]),
        "head_dim": st.sampled_from([1, 6, 16, 24, 32, 64, 80, 96]),
        "block_size": st.sampled_from([8, 16, 32, 64, 128]),
    }
)


def make(name: str, shape: dict[str, int], layers: int = 1) -> AttentionBackend:
    spec = KVCacheSpec(
        num_heads=shape["kv_heads"] * shape["group"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
    )
    backend = make_backend(name, [spec] * layers, shape["block_size"], 2)
    assert backend.name == name
    return backend


def error(shape: dict[str, int]) -> float:
    """What a result may be off: where the tile unit computes it, 2^-16 of the terms."""
    tiled = Team(1).tiles is not None and supports(shape["head_dim"], shape["block_size"])
    return 5e-5 if tiled else 5e-6


def random_step(batch, shape, seed=0):
    """Query, key and value as slices of one product, as the model hands them over."""
    heads, kv_heads = shape["kv_heads"] * shape["group"], shape["kv_heads"]
    source = torch.Generator().manual_seed(seed)
    whole = torch.randn(batch.num_tokens, heads + 2 * kv_heads, shape["head_dim"], generator=source)
    return whole.split((heads, kv_heads, kv_heads), dim=1)


def fill_history(backend, batch, shape, layer=0):
    """Put random keys and values before each row's tokens, through the backend itself; return
    all keys and values by block as [num_blocks, kv_heads, block_size, head_dim]."""
    size = shape["block_size"]
    keys, values = (
        np.zeros((batch.num_blocks, shape["kv_heads"], size, shape["head_dim"])) for _ in "kv"
    )
    for index, (start, _) in enumerate(batch.rows):
        if start == 0:
            continue
        history = type(batch)([(0, start)], size)
        history.context.block_tables[:] = 0
        blocks = -(-start // size)
        line = history.context.row_tables[0]
        history.context.block_tables[line, :blocks] = batch.table(index)[:blocks]
        where = np.arange(start)
        slots = batch.table(index)[where // size].astype(np.int64) * size + where % size
        history.context.slots[:] = torch.from_numpy(slots)
        query, key, value = random_step(history, shape, seed=100 + index)
        backend.prepare(history.context)
        backend.forward(layer, query, key, value, history.context)
        note(keys, values, history, key, value)
    return keys, values


def note(keys, values, batch, key, value):
    slots = batch.context.slots.numpy()
    size = batch.block_size
    keys[slots // size, :, slots % size] = key.numpy()
    values[slots // size, :, slots % size] = value.numpy()


def expected(batch, shape, query, keys, values):
    parts = [
        reference(
            query[batch.ends[i] : batch.ends[i + 1]].numpy(),
            keys,
            values,
            batch.table(i),
            start,
            shape["head_dim"] ** -0.5,
        )
        for i, (start, _) in enumerate(batch.rows)
    ]
    return np.concatenate(parts).reshape(batch.num_tokens, -1)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25)
@given(shape=shapes, rows=st.lists(row, min_size=1, max_size=5))
def test_equals_float64(make_batch, name, shape, rows):
    batch = make_batch(rows, shape["block_size"])
    backend = make(name, shape)
    backend.init_cache(batch.num_blocks)
    keys, values = fill_history(backend, batch, shape)
    query, key, value = random_step(batch, shape)
    note(keys, values, batch, key, value)
    backend.prepare(batch.context)
    out = backend.forward(0, query, key, value, batch.context)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out, expected(batch, shape, query, keys, values), atol=error(shape))


SHAPE = {"kv_heads": 3, "group": 3, "head_dim": 64, "block_size": 16}
ROWS = [(5, 1), (700, 1), (SPAN, 1), (0, 1), (3, 40), (0, 9), (130, 16)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_does_not_see_its_batch_mates(make_batch, name):
    batch = make_batch(ROWS, 16)
    backend = make(name, SHAPE)
    backend.init_cache(batch.num_blocks)
    fill_history(backend, batch, SHAPE)
    step = random_step(batch, SHAPE)
    backend.prepare(batch.context)
    together = backend.forward(0, *step, batch.context)
    for index in range(len(ROWS)):
        first, last = batch.ends[index : index + 2]
        alone = batch.only(index)
        backend.prepare(alone)
        out = backend.forward(0, *(part[first:last] for part in step), alone)
        np.testing.assert_array_equal(out, together[first:last], err_msg=f"row {index}")


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_equal_one_piece(make_batch, name):
    shape = SHAPE
    whole = make_batch([(0, 70)], 16)
    backend = make(name, shape)
    backend.init_cache(whole.num_blocks)
    step = random_step(whole, shape)
    backend.prepare(whole.context)
    at_once = backend.forward(0, *step, whole.context)
    backend.init_cache(whole.num_blocks)
    pieces = []
    for first, last in [(0, 1), (1, 16), (16, 33), (33, 69), (69, 70)]:
        part = whole.only(0)
        part.slots = whole.context.slots[first:last]
        part.row_starts[:] = first
        part.query_starts[1] = last - first
        backend.prepare(part)
        pieces.append(backend.forward(0, *(tensor[first:last] for tensor in step), part))
    np.testing.assert_allclose(torch.cat(pieces), at_once, atol=error(shape))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_shows_and_stays_alone(make_batch, name, bad):
    batch = make_batch(ROWS, 16)
    backend = make(name, SHAPE)
    backend.init_cache(batch.num_blocks)
    fill_history(backend, batch, SHAPE)
    query, key, value = random_step(batch, SHAPE)
    backend.prepare(batch.context)
    clean = backend.forward(0, query, key, value, batch.context)
    for tensor in (query, key, value):
        kept = tensor.clone()
        tensor[1] = bad  # row 1, split over several spans
        out = backend.forward(0, query, key, value, batch.context)
        tensor.copy_(kept)
        assert not torch.isfinite(out[1]).all()
        others = [i for i in range(batch.num_tokens) if i != 1]
        np.testing.assert_array_equal(out[others], clean[others])
        backend.forward(0, query, key, value, batch.context)  # the cache is clean again


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_block_held_before_does_not_matter(make_batch, name):
    dirty, clean = make_batch([(0, 64)], 16), make_batch([(0, 5)], 16)
    backend = make(name, SHAPE)
    backend.init_cache(max(dirty.num_blocks, clean.num_blocks))
    step = random_step(clean, SHAPE)
    backend.prepare(clean.context)
    first = backend.forward(0, *step, clean.context)
    query, key, value = random_step(dirty, SHAPE)
    dirty.context.slots[:] = torch.arange(64)
    dirty.context.block_tables[:, :4] = np.arange(4)
    backend.prepare(dirty.context)
    backend.forward(0, query, key.fill_(float("nan")), value.fill_(float("nan")), dirty.context)
    backend.prepare(clean.context)
    np.testing.assert_array_equal(backend.forward(0, *step, clean.context), first)


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_have_caches_of_their_own(make_batch, name):
    batch = make_batch([(20, 1)], 16)
    backend = make(name, SHAPE, layers=2)
    backend.init_cache(batch.num_blocks)
    fill_history(backend, batch, SHAPE, layer=1)
    step = random_step(batch, SHAPE)
    backend.prepare(batch.context)
    assert not torch.equal(
        backend.forward(0, *step, batch.context), backend.forward(1, *step, batch.context)
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_per_token_is_what_the_cache_takes(name):
    shape = {"kv_heads": 2, "group": 2, "head_dim": 24, "block_size": 32}
    backend = make(name, shape, layers=3)
    backend.init_cache(5)
    allocated = sum(tensor.nbytes for cache in backend.caches for tensor in cache)
    assert backend.bytes_per_token * 5 * 32 == allocated


def test_results_do_not_depend_on_threads(make_batch, team):
    batch = make_batch(ROWS, 16)
    kernel = PagedAttention(team, kv_heads=3, group=3, head_dim=64, block_size=16)
    cache = kernel.new_cache(batch.num_blocks)
    source = torch.Generator().manual_seed(1)
    for tensor in cache:
        tensor.normal_(generator=source)
    context = batch.context
    kernel.prepare(
        slots=context.slots,
        query_starts=context.query_starts,
        row_starts=context.row_starts,
        row_tables=context.row_tables,
        tables=context.block_tables,
    )
    out = kernel(cache, *random_step(batch, SHAPE))
    keys, values = (tensor.double() for tensor in cache)
    if team.tiles is not None:  # a number is the sum of two
        keys, values = keys.sum(-1), values.sum(-1)
    keys, values = keys.numpy().transpose(0, 1, 3, 2), values.numpy()
    query = random_step(batch, SHAPE)[0]
    np.testing.assert_allclose(out, expected(batch, SHAPE, query, keys, values), atol=error(SHAPE))


class TestWrapper:
    """What the kernel would read wrongly is refused."""

    @pytest.fixture
    def ready(self, make_batch, team):
        batch = make_batch([(3, 2), (0, 1)], 16)
        kernel = PagedAttention(team, kv_heads=3, group=3, head_dim=64, block_size=16)
        self.prepare(kernel, batch)
        return kernel, kernel.new_cache(batch.num_blocks), batch

    def prepare(self, kernel, batch, **changes):
        context = batch.context
        arguments = {
            "slots": context.slots,
            "query_starts": context.query_starts,
            "row_starts": context.row_starts,
            "row_tables": context.row_tables,
            "tables": context.block_tables,
        }
        kernel.prepare(**arguments | changes)

    def test_block_size(self, team):
        with pytest.raises(ValueError, match="block_size must be"):
            PagedAttention(team, kv_heads=1, group=1, head_dim=64, block_size=24)

    def test_shape_type_and_strides(self, ready):
        kernel, cache, batch = ready
        query, key, value = random_step(batch, SHAPE)
        with pytest.raises(ValueError, match=r"query must be float32 \[3, 9, 64\]"):
            kernel(cache, query[:2], key, value)
        with pytest.raises(ValueError, match="key must be float32"):
            kernel(cache, query, key.double(), value)
        with pytest.raises(ValueError, match="value: the heads of a token must lie together"):
            kernel(cache, query, key, value.transpose(1, 2).contiguous().transpose(1, 2))

    def test_batch_arrays(self, ready):
        kernel, _, batch = ready
        context = batch.context
        with pytest.raises(ValueError, match="row_starts must be int32"):
            self.prepare(kernel, batch, row_starts=context.row_starts.astype(np.int64))
        with pytest.raises(ValueError, match="tables must be int32"):
            self.prepare(kernel, batch, tables=context.block_tables.astype(np.int64))
        with pytest.raises(ValueError, match="slots must be int64"):
            self.prepare(kernel, batch, slots=context.slots[:1])


def test_many_rows_and_items_make_room(make_batch):
    """More rows, items and parts than the buffers begin with."""
    shape = {"kv_heads": 1, "group": 1, "head_dim": 16, "block_size": 8}
    batch = make_batch([(300, 1)] * 90 + [(0, 60)] * 50, 8)
    for backend in (make("numba", shape), make("torch", shape)):
        backend.init_cache(batch.num_blocks)
        keys, values = np.zeros((2, batch.num_blocks, 1, 8, 16))
        query, key, value = random_step(batch, shape)
        note(keys, values, batch, key, value)
        backend.prepare(batch.context)
        out = backend.forward(0, query, key, value, batch.context)
        np.testing.assert_allclose(
            out, expected(batch, shape, query, keys, values), atol=error(shape)
        )


def test_backends_are_what_they_say():
    spec = KVCacheSpec(num_heads=2, num_kv_heads=1, head_dim=8)
    assert isinstance(make_backend("auto", [spec], 16, 1), NumbaAttention)
    assert isinstance(make_backend("torch", [spec], 16, 1), TorchAttention)
