"""What requests change in the logits: against the reference, and at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trioserve.core.logit_rules import BatchRules, make_rules
from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

from .sampling_reference import (
    assert_distribution,
    make_logits,
    reference_logits,
    reference_weights,
)

VOCAB = 70  # more than a block of ids, not a multiple of one
EOS = 3
TOKENS = st.integers(0, VOCAB - 1)
FEW = st.integers(0, 9)  # few enough to repeat and to meet in bad words


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters of one sequence and its tokens so far; each rule is off half of the time."""
    fields: dict[str, Any] = {
        "repetition_penalty": st.floats(0.01, 100),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.lists(FEW | TOKENS, min_size=1, max_size=12).map(tuple),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(FEW, max_size=3).map(tuple),
    }
    chosen = {name: draw(values) for name, values in fields.items() if draw(st.booleans())}
    words = st.lists(FEW, min_size=1, max_size=3).map(tuple)
    return {
        "sampling": SamplingParams(temperature=0, **chosen),
        "prompt": draw(st.lists(FEW | TOKENS, min_size=1, max_size=12)),
        "output": draw(st.lists(FEW, max_size=10)),
        "bad_words": draw(st.lists(words, max_size=6)) if draw(st.booleans()) else [],
    }


def add(sampler: Sampler, id: int, row: dict[str, Any], seed: int = 0) -> int:
    """Make a sequence known; the position of its next token."""
    tokens = [*row["prompt"], *row["output"]]
    sampler.add(id, row["sampling"], seed, len(row["prompt"]), tokens, row["bad_words"])
    return len(tokens)


def expected_of(logits: Tensor, row: dict[str, Any]) -> np.ndarray:
    return reference_logits(logits, **row, end_ids=[EOS])


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(sequences(), min_size=1, max_size=6), st.integers(0, 2**32), st.data())
def test_logits_are_the_reference_and_can_be_restored(
    rows: list[dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    raw = make_logits(len(rows), VOCAB, seed)
    raw[data.draw(TOKENS) % len(rows), data.draw(TOKENS)] = -math.inf
    prepared = []
    for index, row in enumerate(rows):
        prompt, output = row["prompt"], row["output"]
        ends = {EOS, *row["sampling"].stop_token_ids}
        tokens = prompt + output
        rules = make_rules(row["sampling"], len(prompt), tokens, row["bad_words"], ends)
        if rules is not None:
            prepared.append((index, rules))
    if not prepared:
        return
    logits = raw.clone()
    batch = BatchRules(prepared, torch.device("cpu"))
    positions = [len(row["prompt"]) + len(row["output"]) for row in rows]
    # Rows in which nothing but an end is left are for the sampler to find.
    changes = batch.apply(positions, logits)
    free = [i for i in changes.ending if logits[i].amax() == -math.inf]
    if free:
        changes.restore(logits)
        changes = batch.apply(positions, logits, may_end=free)
    for index, row in enumerate(rows):
        expected = expected_of(raw[index], row)
        found = logits[index].numpy()
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    changes.restore(logits)
    assert torch.equal(logits, raw)


@settings(max_examples=100, derandomize=True, database=None)
@given(st.lists(sequences(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_greedy_takes_the_best_of_the_reference(rows: list[dict[str, Any]], seed: int) -> None:
    logits = make_logits(len(rows), VOCAB, seed)
    sampler = Sampler(VOCAB, [EOS])
    ids = list(range(len(rows)))
    positions = [add(sampler, id, row) for id, row in enumerate(rows)]
    for result in sampler.sample(ids, positions, logits.clone()):
        expected = expected_of(logits[result.id], rows[result.id])
        if np.isfinite(expected).any():
            assert result.error is None
            assert expected[result.token_id] >= expected.max() - 1e-4
        else:
            assert result.error is not None
            assert result.invalid


@settings(max_examples=100, derandomize=True, database=None)
@given(
    row=sequences(),
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.3, 3),
    top_k=st.just(0) | st.integers(1, 80),
    top_p=st.just(1.0) | st.floats(0.05, 1),
    min_p=st.just(0.0) | st.floats(0.001, 0.5),
)
def test_only_what_the_reference_keeps_is_sampled(
    row: dict[str, Any], seed: int, **cuts: float
) -> None:
    """40 seeds at once; an id whose fate hangs on the last digits may go either way."""
    row["sampling"] = sampling = SamplingParams(
        **{name: getattr(row["sampling"], name) for name in SamplingParams.__struct_fields__} | cuts
    )
    logits = make_logits(1, VOCAB, seed)
    expected = expected_of(logits[0], row)
    if not np.isfinite(expected).any():
        return
    looser = SamplingParams(
        **{name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
        | {"min_p": sampling.min_p * (1 - 1e-4), "top_p": min(1.0, sampling.top_p * (1 + 1e-4))}
    )
    kept = np.flatnonzero(reference_weights(expected, looser))
    tied = np.flatnonzero(np.abs(expected[:, None] - expected[kept]).min(-1) < 1e-4)
    sampler = Sampler(VOCAB, [EOS])
    positions = [add(sampler, id, row, seed=id) for id in range(40)]
    sampled = {
        result.token_id
        for result in sampler.sample(list(range(40)), positions, logits.repeat(40, 1))
    }
    assert sampled <= {*kept.tolist(), *tied.tolist()}


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5},
    "rewards": {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": -0.6},
    "bias": {"logit_bias": {0: 2.0, 7: -3.0, 40: 1.5, 69: -100.0}},
    "allowed": {"allowed_token_ids": (1, 5, 7, 8, 30, 31, 32, 60)},
    "ends": {"min_tokens": 9, "stop_token_ids": (5, 9)},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "logit_bias": {0: 2.0, 7: -1.0},
        "allowed_token_ids": tuple(range(40)),
        "min_tokens": 9,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_distribution_is_the_reference(name: str) -> None:
    row = {
        "sampling": SamplingParams(temperature=0.9, **RULES[name]),
        "prompt": [1, 2, 2, 50, 7],
        "output": [4, 4, 4, 60, 7, 5, 0],
        "bad_words": [(8,), (5, 0, 31), (7, 0, 1)] if name == "all" else [],
    }
    logits = make_logits(1, VOCAB, seed=3, scale=1.5)
    num_rows, num_steps = 200, 50
    counts = np.zeros(VOCAB, int)
    for step in range(num_steps):
        sampler = Sampler(VOCAB, [EOS])
        positions = [add(sampler, id, row, seed=step * num_rows + id) for id in range(num_rows)]
        rows = sampler.sample(list(range(num_rows)), positions, logits.repeat(num_rows, 1))
        np.add.at(counts, [row.token_id for row in rows], 1)
    weights = reference_weights(expected_of(logits[0], row), row["sampling"])
    assert_distribution(counts, weights)


# -------------------------------------------------------------------------- bad words


def greedy(num_tokens: int, logits: Tensor, sampler: Sampler, start: int) -> list[int]:
    """Tokens of sequence 0 while the model says the same at each position."""
    tokens = []
    for position in range(start, start + num_tokens):
        (row,) = sampler.sample([0], [position], logits.clone().unsqueeze(0))
        assert row.error is None
        tokens.append(row.token_id)
    return tokens


def falling(vocab_size: int = VOCAB) -> Tensor:
    """Logits in which the lower id is the better."""
    return torch.arange(vocab_size, 0, -1.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(0,)], [1, 1, 1, 1]),
        ([(0, 0)], [0, 1, 0, 1]),
        ([(0, 0, 0)], [0, 0, 1, 0]),
        ([(0, 0), (0, 1)], [0, 2, 0, 2]),
        ([(0, 0), (1, 0), (1,)], [0, 2, 0, 2]),
        ([(1, 1)], [0, 0, 0, 0]),
        ([(), (0,), (0,)], [1, 1, 1, 1]),
        ([(0, 1), (0, 0, 0), (0, 0, 2)], [0, 0, 3, 0]),
    ],
)
def test_bad_words_are_never_completed(words: list[tuple[int, ...]], expected: list[int]) -> None:
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(temperature=0), 0, 2, [0, 0], words)
    assert greedy(4, falling(), sampler, 2) == expected


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(temperature=0), 0, 1, [0], [(0, 0)])
    assert greedy(2, falling(), sampler, 1) == [0, 1]


# -------------------------------------------------------------------------- no token left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_row_without_a_token_fails_alone_and_is_the_request_s_fault(
    temperature: float, logprobs: int | None
) -> None:
    sampler = Sampler(VOCAB)
    plain = SamplingParams(temperature=temperature, logprobs=logprobs)
    strict = SamplingParams(
        temperature=temperature, logprobs=logprobs, allowed_token_ids=(4, 5), presence_penalty=1.0
    )
    for id in (0, 2):
        sampler.add(id, plain, id, 1, [1])
    logits = make_logits(3, VOCAB)
    good = sampler.sample([0, 2], [1, 1], logits[[0, 2]])
    sampler.add(1, strict, 1, 1, [1], [(5,), (4, 4)])
    first = sampler.sample([0, 1, 2], [1, 1, 1], logits.clone())
    assert first[1].token_id == 4
    assert [first[0], first[2]] == good
    (refused,) = sampler.sample([1], [2], logits[1:2].clone())
    assert refused.invalid
    assert refused.error is not None
    assert "token 2" in refused.error
    assert "allowed_token_ids and bad_words" in refused.error
    third = sampler.sample([0, 1, 2], [1, 2, 1], logits.clone())
    assert third[1] == refused
    assert [third[0], third[2]] == good


def test_padding_alone_may_not_be_allowed() -> None:
    sampler = Sampler(VOCAB, tokenizer_vocab_size=60)
    sampler.add(0, SamplingParams(allowed_token_ids=(60, 69)), 0, 1, [1])
    (row,) = sampler.sample([0], [1], torch.zeros(1, VOCAB))
    assert row.invalid


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["a masked id", "everywhere"])
def test_rules_do_not_hide_a_fault_of_the_model(bad: float, where: str) -> None:
    """Each row masks another way; -inf at one masked id alone is no fault."""
    logits = make_logits(5, VOCAB)
    logits[:4, slice(None) if where == "everywhere" else 7] = bad
    sampler = Sampler(VOCAB, [7])
    sampler.add(0, SamplingParams(allowed_token_ids=(1, 2)), 0, 1, [1])
    sampler.add(1, SamplingParams(), 1, 1, [1], [(7,)])
    sampler.add(2, SamplingParams(), 2, 1, [1, 6], [(6, 7)])
    sampler.add(3, SamplingParams(min_tokens=2, logprobs=1), 3, 1, [1])
    sampler.add(4, SamplingParams(logit_bias={7: 5.0}, presence_penalty=1.0), 4, 1, [1])
    rows = sampler.sample([0, 1, 2, 3, 4], [1, 1, 2, 1, 1], logits)
    for row in rows[:4]:
        if bad == -math.inf and where == "a masked id":
            assert row.error is None
        else:
            assert row.error is not None
            assert "the logits for token" in row.error
            assert not row.invalid
    assert rows[4].error is None


def test_an_end_comes_early_where_nothing_else_may_come() -> None:
    """``min_tokens`` yields to what is allowed, row by row, and with bias and penalties."""
    logits = falling().repeat(3, 1)
    sampler = Sampler(VOCAB, [EOS])
    fields = {"temperature": 0, "min_tokens": 5, "stop_token_ids": (4,)}
    sampler.add(0, SamplingParams(**fields, allowed_token_ids=(EOS, 4)), 0, 1, [1])
    sampler.add(1, SamplingParams(**fields, logit_bias={EOS: 100.0}), 0, 1, [1])
    biased = SamplingParams(**fields, allowed_token_ids=(EOS, 4), logit_bias={4: 2.0})
    sampler.add(2, biased, 0, 1, [1])
    rows = sampler.sample([0, 1, 2], [1, 1, 1], logits)
    assert [row.token_id for row in rows] == [EOS, 0, 4]


# ------------------------------------------------------------------------ bias, extremes


def test_a_bias_of_a_hundred_is_a_number_and_no_order() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 5] = 200.0
    sampler = Sampler(VOCAB)
    for id, bias in enumerate([{6: 100.0}, {5: -100.0, 6: 100.0}, {5: -100.0}, {5: 0.0}]):
        sampler.add(id, SamplingParams(temperature=0, logit_bias=bias), 0, 1, [1])
    rows = sampler.sample([0, 1, 2, 3], [1] * 4, logits)
    # 100 against 200; a tie at 100, which the lowest id wins; 100 against 0.
    assert [row.token_id for row in rows] == [5, 5, 5, 5]


def test_a_masked_id_is_not_brought_back() -> None:
    """Masks are final whatever is added to or multiplied with them."""
    sampling = SamplingParams(
        temperature=0,
        allowed_token_ids=(1, 2),
        logit_bias={0: 100.0},
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        repetition_penalty=0.01,
    )
    sampler = Sampler(VOCAB)
    sampler.add(0, sampling, 0, 1, [0, 0, 0, 0])
    (row,) = sampler.sample([0], [4], falling().unsqueeze(0))
    assert row.token_id == 1


@pytest.mark.parametrize("scale", [1e-30, 6e4, 3e35])
def test_extreme_logits_stay_numbers(scale: float) -> None:
    logits = make_logits(40, VOCAB, scale=1) * scale / 5
    sampler = Sampler(VOCAB)
    for id in range(40):
        sampling = SamplingParams(
            temperature=(0.0, 1.0, 1e-9, 100.0)[id % 4],
            repetition_penalty=(0.01, 100.0)[id % 2],
            frequency_penalty=(2.0, -2.0)[id // 2 % 2],
            logit_bias={1: 100.0, 2: -100.0},
        )
        sampler.add(id, sampling, id, 2, [1, 2, *range(20, 30)] * 3)
    rows = sampler.sample(list(range(40)), [36] * 40, logits)
    assert all(row.error is None for row in rows)


def test_without_rules_there_is_nothing() -> None:
    assert make_rules(SamplingParams(stop_token_ids=(5,)), 1, [1], (), {3, 5}) is None
    assert make_rules(SamplingParams(min_tokens=3), 1, [1], (), ()) is None
    assert make_rules(SamplingParams(top_k=3, logprobs=2, min_p=0.1), 1, [1], [()], {3}) is None
    sampler = Sampler(VOCAB, [EOS])
    sampler.add(0, SamplingParams(), 0, 1, [1])
    sampler.sample([0], [1], make_logits(1, VOCAB))
    assert sampler._prepared.rules is None


def test_ends_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3], logits[0, 5], logits[0, 6] = 9, 8, 7
    sampler = Sampler(8, [3])
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,), logprobs=3)
    sampler.add(0, sampling, 0, num_prompt_tokens=10)
    rows = [sampler.sample([0], [position], logits.clone())[0] for position in (10, 11, 12)]
    assert [row.token_id for row in rows] == [6, 6, 3]
    # Log probabilities are of what the model said.
    assert rows[0].logprobs is not None
    assert [id for id, _ in rows[0].logprobs.top] == [3, 5, 6]
    assert rows[0].logprobs.rank == 3
    sampler.add(0, SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), 0, 10)
    assert sampler.sample([0], [10], logits.clone())[0].token_id == 3
