"""Weights in whole numbers: integers of 8 or 16 bits, one scale an output.

A panel is PANEL outputs: scales float32 [PANEL] (with WHOLE16 times 256), what unsigned bytes of x
would add to either sum int32 [2, PANEL], and groups of DEPTH inputs: for each byte of a weight two
halves of 16 outputs, int8 [16, 16, 4], four inputs of an output side by side. This is a tile as the
unit wants it, and each line of it a register.
"""

from __future__ import annotations

import torch

from trioserve.kernels.cpu.codes import BLOCK
from trioserve.kernels.cpu.panel_product import Panels

WHOLE8, WHOLE16 = 18, 116  # kinds of panels beside HALF and the bits of codes
KINDS = (WHOLE8, WHOLE16)
PANEL = 32
LANES = 16  # outputs of a tile
DEPTH = 64  # inputs of a tile
TILE_BYTES = 1024
HEAD_BYTES = 3 * PANEL * 4
LIMIT = 127 << 8  # of an integer of 16 bits whose high byte has a sign
MOST_INPUTS = 1 << 16  # sums of more could leave int32


def quantize(weight: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] to integers and scales, the largest of an output being 127 or LIMIT.

    Returns: int32 [out, in], float32 [out].
    """
    limit = 127 if kind == WHOLE8 else LIMIT
    largest = weight.abs().amax(-1)
    scales = largest / limit
    factors = torch.where(scales > 0, 1.0 / scales.double(), 0.0)
    codes = (weight.double() * factors.unsqueeze(-1)).round_().clamp_(-limit, limit)
    return codes.to(torch.int32), scales


def rounding_error(weight: torch.Tensor, kind: int) -> float:
    """How far the weight is changed by it, as a share of its own size (both as square roots of sums
    of squares)."""
    codes, scales = quantize(weight, kind)
    change = torch.linalg.vector_norm(codes * scales.unsqueeze(-1) - weight)
    return float(change / torch.linalg.vector_norm(weight).clamp_min(1e-30))


def pack(codes: torch.Tensor, scales: torch.Tensor, kind: int) -> torch.Tensor:
    """Integers int32 [out, in] and scales float32 [out] to panels, uint8 [panels, panel bytes]."""
    outputs, inputs = codes.shape
    panels, groups = -(-outputs // PANEL), -(-inputs // DEPTH)
    whole = torch.zeros(panels * PANEL, groups * DEPTH, dtype=torch.int32)
    whole[:outputs, :inputs] = codes
    low = ((whole + 128) & 255) - 128
    bytes_of = [whole] if kind == WHOLE8 else [(whole - low) >> 8, low]
    head = torch.zeros(panels, 3, PANEL, dtype=torch.int32)
    floats = torch.zeros(panels * PANEL)
    floats[:outputs] = scales if kind == WHOLE8 else scales * 256
    head[:, 0] = floats.view(torch.int32).view(panels, PANEL)
    sums = [part.sum(-1, dtype=torch.int32).view(panels, PANEL) for part in bytes_of]
    head[:, 1] = sums[0] * -128
    head[:, 2] = sum(sums) * -128
    parts = [
        part.to(torch.int8)
        .view(panels, 2, LANES, groups, DEPTH // 4, 4)
        .permute(0, 3, 1, 4, 2, 5)  # panel, group, half, line, output, input
        .reshape(panels, groups, 1, -1)
        for part in bytes_of
    ]
    tiles = torch.cat(parts, 2).view(panels, -1).view(torch.uint8)
    return torch.cat([head.view(panels, -1).view(torch.uint8), tiles], -1)


def panels_of(weight: torch.Tensor, kind: int) -> Panels:
    """float32 [out, in], ``in`` a multiple of 32, as panels of ``kind``.

    Raises:
        ValueError: too many inputs for sums of 32 bits.
    """
    if weight.shape[1] > MOST_INPUTS or weight.shape[1] % BLOCK:
        raise ValueError(
            f"{weight.shape[1]} inputs; a multiple of 32 up to {MOST_INPUTS} is needed"
        )
    return Panels(kind, *weight.shape, pack(*quantize(weight, kind), kind))
