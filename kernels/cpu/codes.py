"""A matrix as codes in blocks of 32 inputs that share a scale, in the order of its rows.

What loaders make and kernels pack; torch alone, so that no compiler is needed to load a model.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

BLOCK = 32  # inputs that share a scale
Q8, Q4 = 8, 4  # bits of a code
PIECE = 1 << 18  # elements that are quantized at once: 1 MiB, and enough for each thread


@frozen(eq=False)
class Blocks:
    """A matrix [out, in] as codes, in the order of its rows.

    Attributes:
        bits: Q8 or Q4.
        codes: int8 or uint8 [out, in].
        scales: float16 [out, in / 32].
        minima: float16 [out, in / 32], or None with Q8.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    minima: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, index: Tensor) -> Blocks:
        """The rows of int64 ``index``, in its order."""
        minima = None if self.minima is None else self.minima[index]
        return Blocks(self.bits, self.codes[index], self.scales[index], minima)

    @staticmethod
    def joined(parts: list[Blocks]) -> Blocks:
        """Several one below the other; all of the same ``bits``."""
        minima = [part.minima for part in parts]
        return Blocks(
            parts[0].bits,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            None if minima[0] is None else torch.cat(minima),
        )

    def dequantized(self) -> Tensor:
        """float32 [out, in]."""
        values = self.codes.float().unflatten(-1, (-1, BLOCK))
        values *= self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            values += self.minima.float().unsqueeze(-1)
        return values.flatten(-2)


def quantize_q8(weight: Tensor) -> Blocks:
    """float32 [out, in], ``in`` a multiple of 32, to 8 bits, the largest of a block being 127.

    In pieces of some rows, so that what is made of one on the way stays in the caches.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, inputs // BLOCK, dtype=torch.float16)
    rows = max(1, PIECE // inputs)
    for first in range(0, outputs, rows):
        groups = weight[first : first + rows].unflatten(-1, (-1, BLOCK))
        piece = scales[first : first + rows].copy_(groups.abs().amax(-1).div_(127))
        divisor = piece.float()
        divisor.masked_fill_(divisor == 0, math.inf)  # zeros, or too small for a scale
        values = (groups / divisor.unsqueeze(-1)).round_().clamp_(-127, 127)
        codes[first : first + rows] = values.flatten(-2)
    return Blocks(Q8, codes, scales, None)
