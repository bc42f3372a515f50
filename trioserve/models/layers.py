"""The small pieces between the projections: embedding, norm, rotary positions, activation.

At batch 1 a torch call costs more than the arithmetic in it, so each piece is written for few
calls, and works in place where its input is its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trioserve.models.linear import Layout, fits_fp16
from trioserve.models.spec import ModelSpec, RopeScaling


class Embedding:
    """Token vectors. With a float16 layout its rows are kept as float16 and widened on lookup:
    the table is the largest tensor of a small model and a lookup reads a row or two of it.

    Attributes:
        rows: ``[vocab, hidden]``, float32 or float16.
    """

    def __init__(self, rows: Tensor, layout: Layout) -> None:
        self.rows = rows.half() if layout != "fp32" and fits_fp16(rows) else rows
        self.num_bytes = self.rows.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 ``[n]`` to a new float32 ``[n, hidden]``."""
        return F.embedding(token_ids, self.rows).float()


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * weight``, over the last dimension, in four calls.

    With d the width, the divisor is ``hypot(norm(x), sqrt(d * eps)) / sqrt(d)``; the last factor is
    part of the stored weight.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[0]
        self.num_bytes = weight.nbytes
        self._weight = weight * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """float32 ``[n, width]`` to a new one of the same shape."""
        divisor = torch.linalg.vector_norm(x, 2, -1, True)
        return x.div(divisor.hypot_(self._floor)).mul_(self._weight)


class Rotary:
    """Rotary positions on heads whose pairs are adjacent.

    Checkpoints pair element i with i + d/2. ``interleave`` reorders the rows of the q and k
    projections once, at load time, so that a pair is two neighbours in memory: one complex number,
    rotated by one multiplication in place. q and k are reordered alike, so their products, all that
    attention takes from them, are unchanged; a cached key is in this order too.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._frequencies = frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)

    def rotations(self, positions: Tensor) -> Tensor:
        """For int64 ``[n]`` the unit complex numbers ``[n, 1, head_dim / 2]``; once per step."""
        angles = torch.outer(positions.float(), self._frequencies)
        return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate float32 ``[n, heads, head_dim]``, pairs adjacent, in place."""
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    pairs.mul_(rotations)


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows ``[heads * head_dim, …]``, in each head: i and i + d/2 become 2i and 2i + 1."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for float32 ``[n, 2 * width]``, gate first; a new ``[n, width]``."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair: float32 ``[head_dim / 2]``, scaled as the model asks."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    # Llama 3: wavelengths short against the original context stay, long ones are stretched,
    # those between are blended by how many turns they make over that context.
    turns = scaling.original_max_position * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return torch.lerp(stretched, plain, share)
