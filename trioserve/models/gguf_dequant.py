"""GGUF's block-quantized types, to float32 or as the codes that they are.

Each block holds 32 values: q8_0 a half scale and 32 signed bytes; q4_0 a half scale and 16 bytes
of nibbles, 8 standing for zero; q4_1 a half scale, a half minimum and 16 bytes of nibbles. Low
nibbles are the block's first half, high nibbles its second. Results equal ggml's bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trioserve.kernels.cpu.codes import Q4, Q8, Blocks

BLOCK_VALUES = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
CODE_BITS = {"Q8_0": Q8, "Q4_0": Q4, "Q4_1": Q4}
CHUNK_BLOCKS = 8192  # a chunk's values, 1 MiB, stay in the processor's cache between passes


def dequantize(raw: Tensor, dtype: str) -> Tensor:
    """Dequantize uint8 ``[blocks * block bytes]`` to a new float32 ``[blocks * 32]``.

    ``dtype`` is a key of ``BLOCK_BYTES``.
    """
    blocks = raw.view(-1, BLOCK_BYTES[dtype])
    values = torch.empty(blocks.shape[0], BLOCK_VALUES)
    fill = _q8_0 if dtype == "Q8_0" else _q4_0 if dtype == "Q4_0" else _q4_1
    for chunk, out in zip(blocks.split(CHUNK_BLOCKS), values.split(CHUNK_BLOCKS), strict=True):
        fill(chunk, out)
    return values.view(-1)


def read_codes(raw: Tensor, dtype: str, shape: Sequence[int]) -> Blocks:
    """uint8 ``[blocks * block bytes]`` as the codes of a matrix of ``shape``, nothing rounded.

    q4_0's zero point becomes a minimum of -8 scales, which is exact in half precision.

    Raises:
        RuntimeError: bytes and shape do not fit.
    """
    outputs, inputs = shape
    blocks = raw.view(outputs, inputs // BLOCK_VALUES, BLOCK_BYTES[dtype])
    scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1)
    if dtype == "Q8_0":
        return Blocks(Q8, blocks[:, :, 2:].view(torch.int8).flatten(1), scales, None)
    if dtype == "Q4_0":
        minima, nibbles = scales * -8, blocks[:, :, 2:]
    else:
        minima = blocks[:, :, 2:4].contiguous().view(torch.float16).squeeze(-1)
        nibbles = blocks[:, :, 4:]
    return Blocks(Q4, _split_nibbles(nibbles).view(outputs, inputs), scales, minima)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks[:, :2]))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scale_and_minimum = _halves(blocks[:, :4])
    _nibbles(blocks[:, 4:], out)
    # Two roundings, as ggml does; a fused multiply-add would round once.
    out.mul_(scale_and_minimum[:, :1]).add_(scale_and_minimum[:, 1:])


def _nibbles(packed: Tensor, out: Tensor) -> None:
    out.copy_(_split_nibbles(packed))


def _split_nibbles(packed: Tensor) -> Tensor:
    """uint8 ``[..., 16]`` to a new one ``[..., 32]``: the low nibbles, then the high ones."""
    # Eight bytes at a time: torch's cost is per element, and per row of a strided slice.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    halves = torch.cat((words, words >> 4), -1).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    return halves.view(torch.uint8)


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()
