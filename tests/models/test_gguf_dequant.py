"""Dequantization, held to the ``gguf`` package bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from trioserve.models.gguf_dequant import BLOCK_BYTES, CHUNK_BLOCKS
from trioserve.models.gguf_dequant import dequantize as ours

TYPES = ["Q8_0", "Q4_0", "Q4_1"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_blocks", [1, 7, CHUNK_BLOCKS, CHUNK_BLOCKS + 3])
def test_equals_gguf_on_quantized_values(dtype, num_blocks):
    values = np.random.default_rng(0).normal(0, 0.05, (num_blocks, 32)).astype(np.float32)
    raw = quantize(values, GGMLQuantizationType[dtype])
    expected = dequantize(raw, GGMLQuantizationType[dtype]).reshape(-1)
    assert np.array_equal(ours(torch.from_numpy(raw.reshape(-1)), dtype).numpy(), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_equals_gguf_on_every_nibble_and_any_scale(dtype):
    """Random bytes: all codes, subnormal and negative scales, minima of any sign."""
    raw = np.random.default_rng(1).integers(0, 256, (500, BLOCK_BYTES[dtype]), dtype=np.uint8)
    raw[:, 1] &= 0xBF  # scale and minimum below 2: no infinities, whose products differ in NaN
    raw[:, 3] &= 0xBF
    expected = dequantize(raw, GGMLQuantizationType[dtype]).reshape(-1)
    found = ours(torch.from_numpy(raw.reshape(-1)), dtype)
    assert np.array_equal(found.numpy(), expected)
