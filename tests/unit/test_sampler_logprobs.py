"""Log probabilities: of the chosen token, of the best, of those that are wanted."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.core.logprobs import MIN_LOGPROB, token_logprobs
from trioserve.core.sampler import Sampler
from trioserve.sampling_params import MAX_LOGPROBS, SamplingParams

from .sampling_reference import make_logits

VOCAB = 517
FREE = SamplingParams(temperature=0.9)
ALL = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01)
GREEDY = SamplingParams(temperature=0)
RULES = SamplingParams(
    temperature=0.7,
    min_tokens=50,
    stop_token_ids=tuple(range(200)),
    logit_bias={300: 100.0, 301: -50.0},
    allowed_token_ids=tuple(range(0, VOCAB, 2)),
    repetition_penalty=2.0,
    frequency_penalty=1.5,
)


@settings(max_examples=60, derandomize=True, database=None)
@given(
    num_rows=st.integers(1, 20),
    vocab_size=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 6e4]),
    data=st.data(),
)
def test_every_row_is_the_reference(
    num_rows: int, vocab_size: int, seed: int, scale: float, data: st.DataObject
) -> None:
    token_ids = st.integers(0, vocab_size - 1)
    chosen = data.draw(st.lists(token_ids, min_size=num_rows, max_size=num_rows))
    nums_top = data.draw(
        st.lists(st.integers(0, MAX_LOGPROBS), min_size=num_rows, max_size=num_rows)
    )
    wanted = data.draw(
        st.lists(st.lists(token_ids, max_size=4), min_size=num_rows, max_size=num_rows)
    )
    logits = make_logits(num_rows, vocab_size, seed, scale)
    found = token_logprobs(logits, chosen, nums_top, wanted)
    x = logits.double().numpy()
    best = x.max(-1, keepdims=True)
    expected = x - best - np.log(np.exp(x - best).sum(-1, keepdims=True))
    expected = np.maximum(expected, MIN_LOGPROB)
    for index, row in enumerate(found):
        assert row.token_id == chosen[index]
        assert row.logprob == pytest.approx(expected[index, chosen[index]], abs=1e-5)
        assert row.rank == 1 + int((x[index] > x[index, chosen[index]]).sum())
        # Among equals the order is that of ids, but which of those at the end are in is open.
        values = [value for _, value in row.top]
        num_top = min(nums_top[index], vocab_size)
        order = np.argsort(-x[index], kind="stable")[:num_top]
        assert len({id for id, _ in row.top}) == num_top
        assert values == pytest.approx(expected[index, order], abs=1e-5)
        assert values == sorted(values, reverse=True)
        if vocab_size <= MAX_LOGPROBS:
            assert [id for id, _ in row.top] == order.tolist()
        assert [id for id, _ in row.wanted] == wanted[index]
        assert [value for _, value in row.wanted] == pytest.approx(
            expected[index, wanted[index]], abs=1e-5
        )


@pytest.mark.parametrize("sampling", [GREEDY, FREE, ALL, RULES])
def test_logprobs_are_of_the_raw_logits(sampling: SamplingParams) -> None:
    logits = make_logits(12)
    sampler = Sampler(VOCAB)
    asked = {0: 0, 2: 5, 3: 20, 11: 1}
    for id in range(12):
        params = msgspec.structs.replace(sampling, logprobs=asked.get(id))
        sampler.add(id, params, id, 1, [1, 2, 3, id], [(4,)])
    rows = sampler.sample(list(range(12)), [4] * 12, logits.clone())
    raw = torch.log_softmax(logits.double(), -1).numpy()
    for id, row in enumerate(rows):
        if id not in asked:
            assert row.logprobs is None
            continue
        assert row.logprobs is not None
        assert row.logprobs.token_id == row.token_id
        assert row.logprobs.logprob == pytest.approx(raw[id, row.token_id], abs=1e-4)
        assert row.logprobs.rank == 1 + int((logits[id] > logits[id, row.token_id]).sum())
        best = np.argsort(-raw[id], kind="stable")[: asked[id]]
        assert [token for token, _ in row.logprobs.top] == best.tolist()
        assert [value for _, value in row.logprobs.top] == pytest.approx(raw[id, best], abs=1e-4)
        assert all(a >= b for (_, a), (_, b) in pairwise(row.logprobs.top))


def test_wanted_tokens_alone_are_enough_to_ask() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(temperature=0, logprob_token_ids=(7, 3, 7)), 0, 1)
    sampler.add(1, SamplingParams(temperature=0, logprobs=2, logprob_token_ids=(0,)), 0, 1)
    sampler.add(2, SamplingParams(temperature=0), 0, 1)
    logits = make_logits(3)
    rows = sampler.sample([0, 1, 2], [1, 1, 1], logits.clone())
    raw = torch.log_softmax(logits.double(), -1)
    assert rows[0].logprobs is not None
    assert rows[0].logprobs.top == []
    assert [id for id, _ in rows[0].logprobs.wanted] == [7, 3, 7]
    for id, value in rows[0].logprobs.wanted:
        assert value == pytest.approx(float(raw[0, id]), abs=1e-5)
    assert rows[1].logprobs is not None
    assert len(rows[1].logprobs.top) == 2
    assert [id for id, _ in rows[1].logprobs.wanted] == [0]
    assert rows[2].logprobs is None


def test_logprobs_are_finite() -> None:
    sampler = Sampler(8, tokenizer_vocab_size=4)
    sampler.add(0, SamplingParams(temperature=0, logprobs=8), 0, 1)
    (row,) = sampler.sample([0], [1], torch.zeros(1, 8))
    assert row.logprobs is not None
    assert len(row.logprobs.top) == 8
    assert all(math.isfinite(value) for _, value in row.logprobs.top)
