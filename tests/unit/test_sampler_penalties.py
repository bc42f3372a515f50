"""Penalties: counts of prompt and answer, kept from step to step."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.core.penalties import PenalisedRow, Penalties, TokenCounts
from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

from .sampling_reference import make_logits, reference_logits

VOCAB = 300


def as_dict(counts: TokenCounts) -> dict[int, float]:
    assert len(counts.ids) == len(counts.counts) == len(counts)
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


@settings(max_examples=200, derandomize=True, database=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=100),
    actions=st.lists(st.none() | st.integers(0, VOCAB - 1), max_size=300),
)
def test_counts_are_those_of_a_counter(prompt: list[int], actions: list[int | None]) -> None:
    """None takes back the last token."""
    counts = TokenCounts(prompt)
    output: list[int] = []
    for action in actions:
        if action is not None:
            output.append(action)
            counts.add(action)
        elif output:
            counts.take_back(output.pop())
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert as_dict(counts) == expected


def test_counts_grow_beyond_their_first_room() -> None:
    counts = TokenCounts([5, 5, 7])
    for token_id in [*range(1000), 7, 999]:
        counts.add(token_id)
    assert as_dict(counts) == dict.fromkeys(range(1000), 1) | {7: 2, 999: 2}
    for token_id in [999, 7, *reversed(range(1000))]:
        counts.take_back(token_id)
    assert as_dict(counts) == {5: 0, 7: 0}


def test_only_what_was_seen_is_touched() -> None:
    logits = make_logits(4, VOCAB)
    before = logits.clone()
    first, second = TokenCounts([3, 299]), TokenCounts()
    second.add(0)
    second.add(0)
    penalties = Penalties(
        [PenalisedRow(3, first, 2.0, 0.0, 0.0), PenalisedRow(1, second, 1.0, 0.5, 0.25)],
        torch.device("cpu"),
    )
    (rows, ids), values = penalties.apply(logits)
    assert (logits != before).nonzero().tolist() == [[1, 0], [3, 3], [3, 299]]
    assert logits[1, 0] == pytest.approx(float(before[1, 0]) - 1.25)
    for token_id in (3, 299):
        old = float(before[3, token_id])
        assert logits[3, token_id] == pytest.approx(old / 2 if old > 0 else old * 2)
    logits[rows, ids] = values
    assert torch.equal(logits, before)


def test_infinities_and_nan_stay_what_they_are() -> None:
    logits = torch.tensor([[-math.inf, math.inf, math.nan, 0.0, -0.0]])
    counts = TokenCounts([0, 1, 2, 3, 4])
    for token_id in range(5):
        counts.add(token_id)
    penalties = Penalties([PenalisedRow(0, counts, 100.0, -2.0, -2.0)], torch.device("cpu"))
    penalties.apply(logits)
    assert logits[0, :2].tolist() == [-math.inf, math.inf]
    assert logits[0, 2].isnan()
    assert logits[0, 3:].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("sampling", "changed"),
    [
        (SamplingParams(temperature=0, repetition_penalty=1.5), {1, 2, 3, 4}),
        (SamplingParams(temperature=0, frequency_penalty=0.5), {3, 4}),
        (SamplingParams(temperature=0, presence_penalty=0.5), {3, 4}),
    ],
)
def test_repetition_counts_the_prompt_and_the_others_do_not(
    sampling: SamplingParams, changed: set[int]
) -> None:
    """An id wins by a small lead unless it is penalised."""
    for token_id in range(8):
        logits = torch.full((1, VOCAB), 5.0)
        logits[0, token_id] = 5.25
        sampler = Sampler(VOCAB)
        sampler.add(0, sampling, 0, 3, [1, 2, 2, 3, 4, 4])
        (row,) = sampler.sample([0], [6], logits)
        assert (row.token_id != token_id) == (token_id in changed)


def test_sampled_tokens_are_counted_step_by_step() -> None:
    """A penalised sequence walks as the reference says, among others that come and go."""
    sampling = SamplingParams(
        temperature=0, repetition_penalty=1.1, frequency_penalty=0.7, presence_penalty=0.3
    )
    sampler = Sampler(VOCAB)
    prompt, output = [5, 6, 6, 7], []
    sampler.add(1, sampling, 0, len(prompt), prompt)
    base = make_logits(1, VOCAB, seed=9, scale=1)
    for step in range(60):
        mate = 100 + step
        sampler.add(mate, sampling, 0, 1, [step])
        order = [1, mate] if step % 2 else [mate, 1]
        positions = [len(prompt) + step if id == 1 else 1 for id in order]
        rows = sampler.sample(order, positions, base.repeat(2, 1))
        token_id = next(row.token_id for row in rows if row.id == 1)
        expected = reference_logits(base[0], sampling, prompt=prompt, output=output)
        assert expected[token_id] >= expected.max() - 1e-4
        output.append(token_id)
        if step % 3:
            sampler.remove(mate)
    assert max(Counter(output).values()) > 1
    assert len(set(output)) > 10


def test_a_step_that_is_computed_again_counts_once() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 5.0, 2.5
    sampler = Sampler(VOCAB)
    sampler.add(0, sampling, 0, 1, [1])

    def sample(position: int) -> int:
        (row,) = sampler.sample([0], [position], logits.clone())
        return row.token_id

    assert [sample(position) for position in (1, 2, 3, 4)] == [5, 5, 6, 5]
    assert [sample(4), sample(4)] == [5, 5]
    assert [sample(position) for position in (2, 3, 4, 5)] == [5, 6, 5, 6]


def test_a_gap_in_what_is_known_is_a_fault() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(0, SamplingParams(presence_penalty=1.0), 0, 2, [1, 2, 3])
    with pytest.raises(RuntimeError, match="only 3 tokens"):
        sampler.sample([0], [4], make_logits(1, VOCAB))


def test_long_prompts_and_answers_of_one_token() -> None:
    sampler = Sampler(VOCAB)
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.001)
    sampler.add(0, sampling, 0, 50_000, [7] * 50_000 + [8] * 3000)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 7], logits[0, 8] = 3.3, 8.0
    (row,) = sampler.sample([0], [53_000], torch.from_numpy(logits))
    # 3.3 / 1.5 = 2.2 against 8 / 1.5 - 3 = 2.33
    assert row.token_id == 8
