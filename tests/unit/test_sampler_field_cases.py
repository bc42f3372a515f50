"""Faults that other servers had in sampling: SA-01, SA-03, SA-04, SA-05."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from trioserve.core.sampler import Sampler
from trioserve.errors import InvalidRequest
from trioserve.sampling_params import SamplingParams

from .sampling_reference import (
    ALL,
    FREE,
    GREEDY,
    MIN_P,
    TOP_K,
    TOP_P,
    VOCAB,
    make_logits,
    sample_one,
)

RULES = SamplingParams(
    temperature=0.7,
    min_tokens=5,
    stop_token_ids=(3, 4),
    logit_bias={5: 2.0, 6: -3.0},
    allowed_token_ids=tuple(range(0, VOCAB, 2)),
    logprobs=3,
)
KINDS = {"free": FREE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "all": ALL, "rules": RULES}


# ----------------------------------------------------------------- SA-01: batch mates


@pytest.mark.parametrize("vocab_size", [VOCAB, 8192 + 64])
@pytest.mark.parametrize("name", KINDS)
def test_sa_01_a_row_never_depends_on_its_batch(name: str, vocab_size: int) -> None:
    sampling = KINDS[name]
    logits = make_logits(8, vocab_size)
    mates = [FREE, ALL, GREEDY, TOP_P, MIN_P, RULES, FREE]
    mates[2] = SamplingParams(temperature=2.5, top_p=0.999999)  # goes through all widths
    for seed in (0, -1, 2**63 - 1, -(2**63), 12345):
        alone = [sample_one(sampling, seed, position, logits[0]) for position in (5, 6)]
        for others in (range(100, 107), range(7), [seed] * 7):
            for place in (0, 3, 7):
                order = [*range(1, 8)]
                order.insert(place, 0)
                sampler = Sampler(vocab_size)
                sampler.add(0, sampling, seed, 1)
                for id, mate, other in zip(range(1, 8), mates, others, strict=True):
                    sampler.add(id, mate, other, 1)
                for position, expected in zip((5, 6), alone, strict=True):
                    positions = [position if id == 0 else id for id in order]
                    rows = sampler.sample(order, positions, logits[order].clone())
                    assert [row.id for row in rows] == order
                    assert rows[place].token_id == expected


@pytest.mark.parametrize("sampling", [FREE, TOP_P])
def test_sa_01_seeds_differ_and_equal_seeds_agree(sampling: SamplingParams) -> None:
    logits = make_logits(1, scale=1)[0]
    seeds = [0, 1, -1, 2, 2**32, 2**63 - 1, -(2**63), 42]
    runs = [
        tuple(sample_one(sampling, seed, position, logits) for position in range(1, 13))
        for seed in seeds
    ]
    assert len(set(runs)) == len(seeds)
    sampler = Sampler(VOCAB)
    sampler.add(1, sampling, 42, 1)
    sampler.add(2, sampling, 42, 1)
    first, second = sampler.sample([1, 2], [1, 1], logits.repeat(2, 1))
    assert first.token_id == second.token_id == runs[-1][0]


# ------------------------------------------------------------------- SA-03: extremes


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1e-300),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=0.0),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-9, top_k=VOCAB + 1, top_p=0.0, min_p=1.0),
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=100.0, top_p=1e-9, min_p=0.5),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 6e4])
def test_sa_03_limits_are_greedy(sampling: SamplingParams, scale: float) -> None:
    logits = make_logits(20, scale=1)
    logits = logits / logits.abs().amax() * scale
    for row in logits:
        for seed in (0, 5):
            assert sample_one(sampling, seed, 3, row) == int(row.argmax())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=100.0),
        SamplingParams(top_p=1.0, top_k=VOCAB),
        SamplingParams(top_k=VOCAB + 1),
        SamplingParams(top_k=-1),
        SamplingParams(temperature=100.0, top_k=VOCAB, top_p=0.999999, min_p=1e-9),
    ],
)
def test_sa_03_wide_limits_give_valid_tokens(sampling: SamplingParams) -> None:
    for scale in (1.0, 6e4):
        logits = make_logits(1, scale=scale)[0]
        tokens = {sample_one(sampling, seed, 3, logits) for seed in range(30)}
        assert all(0 <= token < VOCAB for token in tokens)
        assert len(tokens) > 1 or scale > 1


# ---------------------------------------------------------------- SA-04: greedy under load


@pytest.mark.parametrize("num_mates", [1, 3, 7, 31])
def test_sa_04_greedy_choices_do_not_depend_on_load(num_mates: int) -> None:
    """Also with penalties, bad words and log probabilities, in all places of the batch, among
    mates of all kinds that come and go."""
    plain = SamplingParams(temperature=0, logprobs=5, logprob_token_ids=(7, 9))
    careful = SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        logit_bias={5: 1.0},
        logprobs=2,
    )
    num_steps, words = 12, [(i, i + 1) for i in range(0, VOCAB - 1, 3)]
    logits = make_logits(num_steps, seed=11, scale=0.5).round(decimals=1)  # with ties

    def add(sampler: Sampler, id: int, sampling: SamplingParams) -> None:
        sampler.add(id, sampling, id, 2, [8, 9], words if sampling is careful else ())

    for sampling in (plain, careful):
        alone = Sampler(VOCAB)
        add(alone, 0, sampling)
        expected = [
            alone.sample([0], [2 + step], logits[step : step + 1].clone())[0]
            for step in range(num_steps)
        ]
        sampler = Sampler(VOCAB)
        add(sampler, 0, sampling)
        for step in range(num_steps):
            order = list(range(1000 * step + 1, 1000 * step + 1 + num_mates))
            for id in order:
                add(sampler, id, [*KINDS.values(), plain, careful][id % 8])
            order.insert(step * num_mates // num_steps, 0)
            batch = make_logits(len(order), seed=step)
            batch[order.index(0)] = logits[step]
            positions = [2 + step if id == 0 else 2 for id in order]
            rows = {row.id: row for row in sampler.sample(order, positions, batch)}
            assert rows[0] == expected[step]
            for id in order:
                if id:
                    sampler.remove(id)


# ------------------------------------------------------------ SA-05: ids outside the vocabulary

FIELDS_OF_IDS = {
    "stop_token_ids": lambda id: (0, id),
    "allowed_token_ids": lambda id: (0, id),
    "logprob_token_ids": lambda id: (0, id),
    "logit_bias": lambda id: {0: 1.0, id: 1.0},
}


@pytest.mark.parametrize("field", FIELDS_OF_IDS)
@pytest.mark.parametrize(
    "token_id", [-1, 100, 2**31, 2**40, 2**64, pytest.param(-(10**5000), id="huge")]
)
def test_sa_05_ids_outside_the_vocabulary_are_refused(field: str, token_id: int) -> None:
    fields: dict[str, Any] = {field: FIELDS_OF_IDS[field](token_id)}
    with pytest.raises(InvalidRequest, match="between 0 and 99") as refusal:
        SamplingParams(**fields).validate(100)
    assert refusal.value.param == field
    place = "key" if field == "logit_bias" else f"{field}[1]"
    assert place in refusal.value.message
    SamplingParams(**{field: FIELDS_OF_IDS[field](99)}).validate(100)


@pytest.mark.parametrize("value", [1e9, 100.01, -101, math.inf, -math.inf, math.nan])
def test_sa_05_a_bias_out_of_range_is_refused_not_cut(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias\[7\] must lie between -100 and 100"):
        SamplingParams(logit_bias={7: value}).validate(100)


@pytest.mark.parametrize("sampling", [GREEDY, FREE, TOP_K, SamplingParams(temperature=50.0)])
@pytest.mark.parametrize("bias", [{}, {127: 100.0, 100: 100.0}])
def test_sa_05_padding_is_never_sampled(sampling: SamplingParams, bias: dict[int, float]) -> None:
    sampler = Sampler(128, tokenizer_vocab_size=100)
    logits = torch.zeros(1, 128)
    logits[0, 100:] = 50
    logits[0, 127] = math.nan
    sampler.add(0, msgspec.structs.replace(sampling, logit_bias=bias), 3, 1)
    for position in range(1, 60):
        (row,) = sampler.sample([0], [position], logits.clone())
        assert row.error is None
        assert row.token_id < 100
