"""Sampling as docs/sampling.md describes it, in plain numpy: float64, loops and full sorts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from trioserve.core.sampler import Sampler
from trioserve.sampling_params import SamplingParams

VOCAB = 517  # not a multiple of anything
FREE = SamplingParams(temperature=0.9)
TOP_K = SamplingParams(temperature=1.1, top_k=30)
TOP_P = SamplingParams(temperature=0.8, top_p=0.9)
MIN_P = SamplingParams(temperature=1.3, min_p=0.02)
ALL = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01)
GREEDY = SamplingParams(temperature=0)


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def reference_logits(
    logits: Tensor,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
    end_ids: Iterable[int] = (),
) -> np.ndarray:
    """What a row of logits is after the rules, float64 [vocab_size]."""
    x = logits.numpy().astype(np.float64)
    if sampling.allowed_token_ids is not None:
        for token_id in range(len(x)):
            if token_id not in sampling.allowed_token_ids:
                x[token_id] = -math.inf
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(output) and [*output][len(output) - num_before :] == [*word[:-1]]:
            x[word[-1]] = -math.inf
    ends = {*end_ids, *sampling.stop_token_ids}
    if len(output) < sampling.min_tokens and np.isfinite(np.delete(x, [*ends])).any():
        x[[*ends]] = -math.inf
    for token_id, bias in sampling.logit_bias.items():
        x[token_id] += bias
    counts = Counter(output)
    for token_id in {*prompt, *output}:
        if x[token_id] > 0:
            x[token_id] /= sampling.repetition_penalty
        else:
            x[token_id] *= sampling.repetition_penalty
    for token_id, count in counts.items():
        x[token_id] -= sampling.frequency_penalty * count
        x[token_id] -= sampling.presence_penalty
    return x


def reference_weights(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k, top_p; float64, equals by lowest id."""
    x = logits.astype(np.float64) / sampling.temperature
    p = np.exp(x - x.max())
    order = np.lexsort((np.arange(len(p)), -logits.astype(np.float64)))
    keep = np.isfinite(x)
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


def sample_one(sampling: SamplingParams, seed: int, position: int, logits: Tensor) -> int:
    sampler = Sampler(logits.shape[-1])
    sampler.add(0, sampling, seed, 1)
    (row,) = sampler.sample([0], [position], logits.clone().unsqueeze(0))
    assert row.error is None
    return row.token_id


def chi_square_bound(df: int) -> float:
    """What chi-square of df degrees exceeds once in ten thousand (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + 3.72 * math.sqrt(2 / (9 * df))) ** 3


def assert_distribution(counts: np.ndarray, weights: np.ndarray) -> None:
    """That ``counts`` [vocab_size] were drawn from ``weights``, by chi-square."""
    expected = weights * counts.sum()
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
