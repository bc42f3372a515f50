"""The best of a row of logits, without sorting it: exact, and the same for any batch.

A row is seen in blocks of 64 ids. The maxima of the blocks are made at memory speed, and a row's
best n ids lie in the n blocks with the largest maxima; argmax, topk and sort over the whole row
cost 10 to 1000 times as much on CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
"""Ids per block; not a block of the KV cache."""


def in_blocks(x: Tensor, fill: float = -math.inf) -> Tensor:
    """[n, vocab] as [n, blocks, BLOCK], the last block filled up."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = pad(x, (0, missing), value=fill)
    return x.view(len(x), -1, BLOCK)


def first_best(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its lowest id, [n] both; NaN counts as largest."""
    blocks = in_blocks(x)
    block = blocks.amax(-1).argmax(-1)
    inner = blocks[torch.arange(len(x), device=x.device), block]
    offset = inner.argmax(-1, keepdim=True)
    return inner.gather(-1, offset).squeeze(-1), offset.squeeze(-1) + block * BLOCK


def best_candidates(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best ``width`` values of each row and their ids, [n, width] both.

    Best first, equals by lowest id; only which of those equal to the last value are in is not
    defined, unless ``width`` is the whole row.
    """
    vocab_size = x.shape[-1]
    if width >= vocab_size:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values, ids
    if width * BLOCK * 4 <= vocab_size:
        blocks = in_blocks(x)
        best = blocks.amax(-1).topk(width, -1, sorted=False).indices.sort(dim=-1).values
        inner = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1)
        place = inner.topk(width, -1, sorted=False).indices.sort(dim=-1).values
        values = inner.gather(-1, place)
        ids = best.gather(-1, place // BLOCK) * BLOCK + place % BLOCK
    else:
        ids = x.topk(width, -1, sorted=False).indices.sort(dim=-1).values
        values = x.gather(-1, ids)
    # In order of ids so far, which a stable sort keeps among equals.
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def block_masses(x: Tensor, scratch: Tensor) -> Tensor:
    """Sum of exp over each block, float64 [n, blocks]; ``scratch`` is overwritten."""
    return in_blocks(torch.exp(x, out=scratch)).sum(-1).to(torch.float64)


def surviving_mass(x: Tensor, log_min_p: Tensor, scratch: Tensor) -> Tensor:
    """Sum of exp over what min_p leaves, float64 [n]; ``scratch`` is overwritten.

    Within blocks, then over them in float64: whatever else is in the batch, the order is the same
    or does not show.
    """
    if (log_min_p > -math.inf).any():
        x = torch.where(x >= log_min_p.unsqueeze(-1), x, -math.inf)
    return block_masses(x, scratch).sum(-1)


def count_survivors(
    values: Tensor,
    totals: Tensor,
    *,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """How many of a window of candidates survive min_p, top_k and top_p in this order.

    Args:
        values: float32 [n, width], log weights relative to the best, best first.
        totals: float64 [n], of ``surviving_mass``; used where top_k is off.
        log_min_p: float32 [n]; -inf is off.
        top_k: int64 [n]; ``vocab_size`` is off.
        top_p: float64 [n]; inf is off.
        vocab_size: length of the whole row.

    Returns:
        int64 [n], at least 1; bool [n], whether the window was wide enough to know.
    """
    width = values.shape[-1]
    num_min_p = (values >= log_min_p.unsqueeze(-1)).sum(-1)
    num_left = torch.minimum(num_min_p, top_k).clamp_(min=1)
    ends_inside = (num_min_p < width) | (top_k <= width)
    mass = values.exp().to(torch.float64).cumsum(-1)
    # Where min_p and top_k end inside the window, what they leave is the whole for top_p.
    inside = mass.gather(-1, num_left.clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
    aim = top_p * torch.where(ends_inside, inside, totals)
    num_below = (mass < aim.unsqueeze(-1)).sum(-1)
    num_kept = torch.minimum(num_left, num_below + 1).clamp_(max=width)
    if width >= vocab_size:
        return num_kept, torch.ones_like(ends_inside)
    known = ends_inside | ((num_below < width) & (top_k >= vocab_size))
    last = values.gather(-1, num_kept.unsqueeze(-1) - 1).squeeze(-1)
    return num_kept, known & (last > values[:, -1])
