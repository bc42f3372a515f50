"""Log probabilities of tokens under rows of logits, as requests ask for them.

No row of log probabilities is ever written: what is asked for is a few logits less the log of the
row's sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trioserve.core.candidates import best_candidates, in_blocks
from trioserve.ipc.messages import TokenLogprobs
from trioserve.sampling_params import MAX_LOGPROBS

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which not every client's JSON has."""
CHUNK = 8
"""Rows looked at at once, so that copies of them stay in the cache of a core."""


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    nums_top: Sequence[int],
    wanted_ids: Sequence[Sequence[int]],
) -> list[TokenLogprobs]:
    """Log probabilities for each row: of its token, of the best, of those that are wanted.

    A row's result depends on that row alone. A row that holds NaN gives NaN.

    Args:
        logits: float32 [n, vocab_size].
        token_ids: the token of each row.
        nums_top: how many of the best, at most MAX_LOGPROBS, best first and equals by lowest id.
        wanted_ids: tokens whose log probability is wanted beside that.
    """
    results: list[TokenLogprobs] = []
    for start in range(0, len(logits), CHUNK):
        part = slice(start, start + CHUNK)
        results += _of_chunk(logits[part], token_ids[part], nums_top[part], wanted_ids[part])
    return results


def _of_chunk(
    x: Tensor,
    token_ids: Sequence[int],
    nums_top: Sequence[int],
    wanted_ids: Sequence[Sequence[int]],
) -> list[TokenLogprobs]:
    top, top_ids = best_candidates(x, min(MAX_LOGPROBS, x.shape[-1]))
    log_sum = _log_sum(x, top[:, :1])
    chosen = x.gather(-1, torch.tensor(token_ids, device=x.device).unsqueeze(-1))
    ranks = (top > chosen).sum(-1) + 1
    # Where all the best are above the token, the others have to be counted as well.
    beyond = (ranks > top.shape[-1]).nonzero().squeeze(-1)
    if len(beyond):
        ranks[beyond] = (x[beyond] > chosen[beyond]).count_nonzero(-1) + 1
    top_values, values = _clamped(top, log_sum), _clamped(chosen, log_sum).flatten()
    rows = zip(
        token_ids,
        values.tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_values.tolist(),
        nums_top,
        _wanted(x, log_sum, wanted_ids),
        strict=True,
    )
    return [
        TokenLogprobs(token_id, value, rank, list(zip(best_ids[:n], best[:n], strict=True)), wanted)
        for token_id, value, rank, best_ids, best, n, wanted in rows
    ]


def _log_sum(x: Tensor, best: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row, float64 [n, 1].

    Summed within blocks, then over them in float64: the order does not depend on the batch.
    """
    masses = in_blocks((x - best).exp_(), fill=0.0).sum(-1).to(torch.float64)
    return masses.sum(-1, keepdim=True).log_().add_(best)


def _clamped(x: Tensor, log_sum: Tensor) -> Tensor:
    return (x - log_sum).clamp_(MIN_LOGPROB, 0.0)


def _wanted(
    x: Tensor, log_sum: Tensor, wanted_ids: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, float], ...]]:
    if not any(wanted_ids):
        return [()] * len(wanted_ids)
    width = max(map(len, wanted_ids))
    padded = [[*ids, *[0] * (width - len(ids))] for ids in wanted_ids]
    values = _clamped(x.gather(-1, torch.tensor(padded, device=x.device)), log_sum)
    return [
        tuple(zip(ids, row[: len(ids)], strict=True))
        for ids, row in zip(wanted_ids, values.tolist(), strict=True)
    ]
