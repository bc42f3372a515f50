"""The sampler against plain numpy, and its promise: a row depends on nothing but itself."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from trioserve.core import sampler as sampler_module
from trioserve.core.noise import gumbel, mix_seed, row_keys, token_hashes
from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

VOCAB = 517  # not a multiple of anything
FREE = SamplingParams(temperature=0.9)
TOP_K = SamplingParams(temperature=1.1, top_k=30)
TOP_P = SamplingParams(temperature=0.8, top_p=0.9)
MIN_P = SamplingParams(temperature=1.3, min_p=0.02)
ALL = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01)
GREEDY = SamplingParams(temperature=0)
KINDS = {"free": FREE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "all": ALL}


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(sampling: SamplingParams, seed: int, position: int, logits: Tensor) -> int:
    sampler = Sampler(logits.shape[-1])
    sampler.add(0, sampling, seed, 1)
    (row,) = sampler.sample([0], [position], logits.clone().unsqueeze(0))
    assert row.error is None
    return row.token_id


def reference_weights(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k, top_p; float64, equals by lowest id."""
    x = logits.astype(np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    order = np.lexsort((np.arange(len(p)), -logits.astype(np.float64)))
    keep = np.ones(len(p), bool)
    if sampling.min_p > 0:
        keep &= p >= sampling.min_p
    if sampling.top_k > 0:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        ordered = np.where(keep, p, 0)[order]
        before = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
        cut = before >= sampling.top_p * ordered.sum()
        cut[0] = False
        keep[order[cut]] = False
    p = np.where(keep, p, 0)
    return p / p.sum()


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


def chi_square_bound(df: int) -> float:
    """What chi-square of df degrees exceeds once in ten thousand (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + 3.72 * math.sqrt(2 / (9 * df))) ** 3


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
    expected = reference_weights(logits.numpy(), sampling) * counts.sum()
    assert counts[expected == 0].sum() == 0
    # Rare ids are put together, as chi-square needs a few expected in each class.
    rare = (expected < 8) & (expected > 0)
    observed = np.append(counts[expected >= 8], counts[rare].sum())
    wanted = np.append(expected[expected >= 8], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < chi_square_bound(len(wanted) - 1)
    # And it is not a test that passes whatever comes.
    flat = np.full(len(wanted), wanted.sum() / len(wanted))
    assert ((observed - flat) ** 2 / flat).sum() > chi_square_bound(len(wanted) - 1)


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


# ----------------------------------------------------------------- SA-01: batch mates


@pytest.mark.parametrize("vocab_size", [VOCAB, 8192 + 64])
@pytest.mark.parametrize("name", KINDS)
def test_a_row_never_depends_on_its_batch(name: str, vocab_size: int) -> None:
    sampling = KINDS[name]
    logits = make_logits(8, vocab_size)
    mates = [FREE, ALL, GREEDY, TOP_P, MIN_P, TOP_K, FREE]
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
def test_seeds_differ_and_equal_seeds_agree(sampling: SamplingParams) -> None:
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
def test_limits_are_greedy(sampling: SamplingParams, scale: float) -> None:
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
def test_wide_limits_give_valid_tokens(sampling: SamplingParams) -> None:
    for scale in (1.0, 6e4):
        logits = make_logits(1, scale=scale)[0]
        tokens = {sample_one(sampling, seed, 3, logits) for seed in range(30)}
        assert all(0 <= token < VOCAB for token in tokens)
        assert len(tokens) > 1 or scale > 1


def test_top_k_of_equals_takes_the_lowest_ids() -> None:
    counts = draw(SamplingParams(top_k=3), torch.zeros(300), num_seeds=20, num_steps=10)
    assert np.flatnonzero(counts).tolist() == [0, 1, 2]


# --------------------------------------------------------------------- masks, padding


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


@pytest.mark.parametrize("sampling", [GREEDY, FREE, TOP_K, SamplingParams(temperature=50.0)])
def test_padding_is_never_sampled(sampling: SamplingParams) -> None:
    sampler = Sampler(128, tokenizer_vocab_size=100)
    logits = torch.zeros(1, 128)
    logits[0, 100:] = 50
    logits[0, 127] = math.nan
    sampler.add(0, sampling, 3, 1)
    for position in range(1, 60):
        (row,) = sampler.sample([0], [position], logits.clone())
        assert row.error is None
        assert row.token_id < 100


# --------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("sampling", [GREEDY, FREE, ALL])
def test_logprobs_are_of_the_raw_logits(sampling: SamplingParams) -> None:
    logits = make_logits(12)
    sampler = Sampler(VOCAB)
    asked = {0: 0, 2: 5, 3: 20, 11: 1}
    for id in range(12):
        fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        sampler.add(id, SamplingParams(**{**fields, "logprobs": asked.get(id)}), id, 1)
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


def test_logprobs_are_finite() -> None:
    sampler = Sampler(8, tokenizer_vocab_size=4)
    sampler.add(0, SamplingParams(temperature=0, logprobs=8), 0, 1)
    (row,) = sampler.sample([0], [1], torch.zeros(1, 8))
    assert row.logprobs is not None
    assert len(row.logprobs.top) == 8
    assert all(math.isfinite(value) for _, value in row.logprobs.top)


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
