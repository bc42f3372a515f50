"""The sampler against plain numpy, and its promise: a row depends on nothing but itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trioserve.core import sampler as sampler_module
from trioserve.core.noise import gumbel, mix_seed, row_keys, token_hashes
from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

from .sampling_reference import (
    ALL,
    FREE,
    GREEDY,
    MIN_P,
    TOP_K,
    TOP_P,
    VOCAB,
    assert_distribution,
    chi_square_bound,
    make_logits,
    reference_weights,
    sample_one,
)

KINDS = {"free": FREE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "all": ALL}


def draw(sampling: SamplingParams, logits: Tensor, num_seeds: int, num_steps: int) -> np.ndarray:
    """How often each id is sampled over seeds and positions."""
    vocab_size = logits.shape[-1]
    sampler = Sampler(vocab_size)
    ids = list(range(num_seeds))
    for id in ids:
        sampler.add(id, sampling, seed=id, num_prompt_tokens=1)
    counts = np.zeros(vocab_size, int)
    for position in range(1, num_steps + 1):
        rows = sampler.sample(ids, [position] * num_seeds, logits.repeat(num_seeds, 1))
        np.add.at(counts, [row.token_id for row in rows], 1)
    return counts


# -------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 517, 4096])
def test_greedy_takes_the_lowest_of_the_best(vocab_size: int) -> None:
    logits = make_logits(9, vocab_size).round()
    sampler = Sampler(vocab_size)
    for id in range(9):
        sampler.add(id, GREEDY, 0, 1)
    rows = sampler.sample(list(range(9)), [1] * 9, logits.clone())
    assert [row.token_id for row in rows] == [int(np.argmax(row)) for row in logits.numpy()]


@pytest.mark.parametrize("sampling", [GREEDY, *KINDS.values()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "only -inf"])
def test_a_bad_row_fails_alone(sampling: SamplingParams, bad: float | str) -> None:
    logits = make_logits(5)
    sampler = Sampler(VOCAB)
    for id in range(5):
        sampler.add(id, sampling, id, 1)
    good = sampler.sample([0, 1, 2, 3, 4], [7] * 5, logits.clone())
    if isinstance(bad, str):
        logits[2] = -math.inf
    else:
        logits[2, 77] = bad
    rows = sampler.sample([0, 1, 2, 3, 4], [7] * 5, logits.clone())
    assert rows[2].error is not None
    assert "token 7" in rows[2].error
    assert str(bad) in rows[2].error
    assert rows[:2] + rows[3:] == good[:2] + good[3:]


def test_a_few_minus_infinities_are_no_fault() -> None:
    for sampling in (GREEDY, *KINDS.values()):
        logits = torch.full((VOCAB,), -math.inf)
        logits[100] = 1.0
        assert sample_one(sampling, 1, 1, logits) == 100


# --------------------------------------------------------------------------------- cuts

CUTS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=64),
    SamplingParams(top_k=60),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.999),
    SamplingParams(top_p=0.9, temperature=3.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.001, temperature=3.0),
    SamplingParams(min_p=0.05, top_p=0.7),
    SamplingParams(min_p=0.001, top_p=0.9, temperature=3.0),
    SamplingParams(min_p=0.1, top_p=0.4, temperature=3.0),
    SamplingParams(min_p=0.02, top_k=9, top_p=0.8),
    SamplingParams(top_k=50, top_p=0.9, temperature=3.0),
    SamplingParams(min_p=0.0001, top_k=50, top_p=0.95, temperature=5.0),
]


@pytest.mark.parametrize("sampling", CUTS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("widths", [(64, 1024, 4096), (2, 16), ()])
def test_exactly_the_reference_survives(
    sampling: SamplingParams, ties: bool, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is read off the sampler by noise that favours each candidate in turn."""
    monkeypatch.setattr(sampler_module, "_WIDTHS", widths)
    logits = make_logits(1, 83, seed=5)[0]
    logits = (logits * 2).round() / 2 if ties else logits
    survivors = set(np.flatnonzero(reference_weights(logits.numpy(), sampling)).tolist())
    sampler = Sampler(83)
    hashes = sampler._hashes
    found = set()
    for token_id in range(83):
        monkeypatch.setattr(
            sampler_module,
            "gumbel",
            lambda h, keys, favourite=hashes[token_id]: torch.where(h == favourite, 1e6, 0.0),
        )
        sampler.add(0, sampling, 0, 1)
        (row,) = sampler.sample([0], [1], logits.clone().unsqueeze(0))
        if row.token_id == token_id:
            found.add(token_id)
    # The best of all wins wherever its own turn or nobody's favourite is in.
    assert found | {int(logits.argmax())} == survivors


@pytest.mark.parametrize("name", KINDS)
def test_distribution_is_the_reference(name: str) -> None:
    sampling = KINDS[name]
    logits = make_logits(1, 150, seed=3, scale=1.5)[0]
    counts = draw(sampling, logits, num_seeds=160, num_steps=60)
    assert_distribution(counts, reference_weights(logits.numpy(), sampling))


def test_noise_is_gumbel_and_rows_are_independent() -> None:
    seeds = torch.tensor([mix_seed(seed) for seed in range(40)])
    hashes = token_hashes(2000).unsqueeze(0)
    noise = gumbel(hashes, row_keys(seeds, torch.arange(40))).double()
    u = torch.exp(-torch.exp(-noise))  # uniform if the noise is Gumbel
    assert abs(float(u.mean()) - 0.5) < 0.005
    assert abs(float(u.var()) - 1 / 12) < 0.002
    counts = torch.histc(u, 50, 0, 1).numpy()
    expected = u.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(49)
    correlation = np.corrcoef(u.numpy()) - np.eye(40)
    assert np.abs(correlation).max() < 5 / math.sqrt(2000)
    assert np.abs(np.corrcoef(u.numpy()[:, :-1].ravel(), u.numpy()[:, 1:].ravel())[0, 1]) < 0.02


def test_both_halves_of_a_key_count() -> None:
    hashes = token_hashes(500).unsqueeze(0)
    one, two = torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    rows = [gumbel(hashes, keys)[0].numpy() for keys in ((one, one), (one, two), (two, one))]
    assert np.abs(np.corrcoef(rows) - np.eye(3)).max() < 0.2


def test_the_choice_of_a_block_says_nothing_of_the_token() -> None:
    """Ids 0 and 1 would share their noise with the first two blocks if it were by index."""
    logits = torch.full((128,), -math.inf)
    logits[[0, 5, 65, 70]] = 0.0
    counts = draw(FREE, logits, num_seeds=80, num_steps=50)[[0, 5, 65, 70]]
    assert ((counts - 1000) ** 2 / 1000).sum() < chi_square_bound(3)


def test_top_k_of_equals_takes_the_lowest_ids() -> None:
    counts = draw(SamplingParams(top_k=3), torch.zeros(300), num_seeds=20, num_steps=10)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2]


# ------------------------------------------------------------------------ bookkeeping


def test_what_is_prepared_is_kept_until_the_batch_changes() -> None:
    sampler = Sampler(VOCAB)
    for id in range(3):
        sampler.add(id, FREE, id, 1)
    sampler.sample([0, 1], [1, 1], make_logits(2))
    prepared = sampler._prepared
    sampler.sample([0, 1], [2, 2], make_logits(2))
    assert sampler._prepared is prepared
    sampler.remove(2)
    assert sampler._prepared is prepared
    sampler.sample([1, 0], [3, 3], make_logits(2))
    assert sampler._prepared.ids == [1, 0]
    sampler.remove(0)
    sampler.add(0, GREEDY, 0, 1)
    logits = make_logits(2)
    rows = sampler.sample([1, 0], [4, 4], logits.clone())
    assert rows[1].token_id == int(logits[1].argmax())
    sampler.remove(0)
    sampler.remove(0)
    with pytest.raises(KeyError):
        sampler.sample([0], [1], make_logits(1))
    assert sampler.sample([], [], make_logits(0)) == []
