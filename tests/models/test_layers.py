"""The pieces between the projections, against their definitions and against transformers."""

from __future__ import annotations

import pytest
import torch

from trioserve.models.layers import (
    Embedding,
    RMSNorm,
    Rotary,
    frequencies,
    interleave,
    rotate_,
    silu_mul,
)
from trioserve.models.spec import ModelSpec, RopeScaling


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(shape).normal_(0, std, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("std", [1e-4, 1.0, 1e4])
def test_rms_norm(n, std):
    x, weight = normal(n, 96, std=std), normal(96)
    before = x.clone()
    mean = x.double().square().mean(-1, keepdim=True)
    expected = x.double() / (mean + 1e-5).sqrt() * weight.double()
    found = RMSNorm(weight, 1e-5)(x)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(x, before)  # the residual is still needed


def test_rms_norm_of_zeros():
    norm = RMSNorm(torch.ones(4), 1e-6)
    assert norm(torch.zeros(1, 4)).tolist() == [[0.0] * 4]


def test_silu_mul():
    gate, up = normal(3, 10), normal(3, 10) + 1
    found = silu_mul(torch.cat([gate, up], -1))
    torch.testing.assert_close(found, gate * torch.sigmoid(gate) * up)


def test_embedding_layouts():
    rows = normal(20, 8)
    ids = torch.tensor([3, 3, 19])
    plain, half = Embedding(rows, "fp32"), Embedding(rows, "fp16")
    assert torch.equal(plain(ids), rows[ids])
    assert torch.equal(half(ids), rows[ids].half().float())
    assert (plain.num_bytes, half.num_bytes) == (20 * 8 * 4, 20 * 8 * 2)
    plain(ids).add_(1)
    assert torch.equal(plain(ids), rows[ids])  # a lookup is the caller's own


def test_embedding_beyond_float16_stays_float32():
    rows = normal(4, 8)
    rows[1, 1] = 1e6
    assert torch.equal(Embedding(rows, "fp16")(torch.tensor([1])), rows[1:2])


SCALINGS = {
    "none": (None, {"rope_type": "default"}),
    "linear": (RopeScaling(kind="linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama3": (
        RopeScaling(kind="llama3", factor=32.0),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3-other": (
        RopeScaling(
            kind="llama3",
            factor=8.0,
            low_freq_factor=2.0,
            high_freq_factor=6.0,
            original_max_position=4096,
        ),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 6.0,
            "original_max_position_embeddings": 4096,
        },
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500000.0), (26, 10000.0)])
def test_frequencies_equal_transformers(transformers, case, head_dim, theta):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, parameters = SCALINGS[case]
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(frequencies(head_dim, theta, scaling), expected, rtol=1e-6, atol=0)


def test_rotation_equals_the_half_split_definition():
    """Interleaving, then rotating neighbours, is rotating i with i + d/2, then interleaving."""
    head_dim, num_heads, n = 10, 3, 7
    spec = ModelSpec(
        architecture="llama",
        num_layers=1,
        hidden_size=30,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=8,
        vocab_size=8,
        max_position=4096,
    )
    positions = torch.tensor([0, 1, 2, 5, 100, 1000, 4095])
    x = normal(n, num_heads, head_dim)
    angles = positions[:, None, None] * frequencies(head_dim, spec.rope_theta, None)
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def in_rotary_order(heads: torch.Tensor) -> torch.Tensor:
        return interleave(heads.flatten(1).T, head_dim).T.contiguous().view(heads.shape)

    found = in_rotary_order(x)
    rotate_(found, Rotary(spec).rotations(positions))
    torch.testing.assert_close(found, in_rotary_order(expected), atol=1e-6, rtol=0)


def test_interleave():
    rows = torch.arange(12)[:, None]
    assert interleave(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(interleave(rows, 6)[:, 0], interleave(rows[:, 0], 6))  # a bias alike
