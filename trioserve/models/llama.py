"""Llama, and what shares its architecture (SmolLM2, Mistral without sliding window, …).

Read it from the top: what a checkpoint must hold, one layer, the model, its forward pass. The KV
cache and masks are the attention backend's; there is no state here but weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from trioserve.models.layers import Embedding, RMSNorm, Rotary, interleave, rotate_, silu_mul
from trioserve.models.linear import Layout, Linear, make_linear
from trioserve.models.spec import ModelSpec
from trioserve.models.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ROPE_FACTORS = "rope_freqs.weight"  # in GGUF files of Llama 3.1 and later


class Attention(Protocol):
    """What a layer asks of the attention backend. ``context`` belongs to the backend."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: Any
    ) -> Tensor:
        """Write key and value to the cache of ``layer`` and attend; rotary is applied already.

        query ``[n, heads, head_dim]``, key and value ``[n, kv_heads, head_dim]``: float32 slices
        of one tensor, dense in each token only, valid until the call returns. Gives float32
        ``[n, heads * head_dim]``.
        """


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        for part, has_bias, rows, columns in (
            ("self_attn.q_proj", spec.attention_bias, q_size, hidden),
            ("self_attn.k_proj", spec.attention_bias, kv_size, hidden),
            ("self_attn.v_proj", spec.attention_bias, kv_size, hidden),
            ("self_attn.o_proj", spec.attention_bias, hidden, q_size),
            ("mlp.gate_proj", spec.mlp_bias, inner, hidden),
            ("mlp.up_proj", spec.mlp_bias, inner, hidden),
            ("mlp.down_proj", spec.mlp_bias, hidden, inner),
        ):
            shapes[f"{name}.{part}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.{part}.bias"] = (rows,)
    shapes[FINAL_NORM] = (hidden,)
    if not spec.tie_embeddings:
        shapes[HEAD] = (spec.vocab_size, hidden)
    return shapes


def optional_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold ``name`` beside the expected tensors."""
    return (
        name == ROPE_FACTORS
        or name.endswith("rotary_emb.inv_freq")
        or (name == HEAD and spec.tie_embeddings)
    )


class Layer:
    """The weights of one decoder layer. q, k and v are one product; so are gate and up."""

    def __init__(self, spec: ModelSpec, weights: Weights, index: int, layout: Layout) -> None:
        name = f"model.layers.{index}"
        bias, eps = spec.mlp_bias, spec.rms_norm_eps
        self.attention_norm = RMSNorm(weights.take(f"{name}.input_layernorm.weight"), eps)
        self.qkv = _qkv(spec, weights, f"{name}.self_attn", layout)
        self.output = _projection(weights, layout, spec.attention_bias, f"{name}.self_attn.o_proj")
        self.mlp_norm = RMSNorm(weights.take(f"{name}.post_attention_layernorm.weight"), eps)
        self.gate_up = _projection(
            weights, layout, bias, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"
        )
        self.down = _projection(weights, layout, bias, f"{name}.mlp.down_proj")
        norms = self.attention_norm.num_bytes + self.mlp_norm.num_bytes
        projections = (self.qkv, self.output, self.gate_up, self.down)
        self.num_bytes = norms + sum(projection.num_bytes for projection in projections)


def _qkv(spec: ModelSpec, weights: Weights, name: str, layout: Layout) -> Linear:
    """q, k and v as one product, with the rows of q and k in rotary order."""

    def joined(kind: str) -> Tensor:
        q, k, v = (weights.take(f"{name}.{part}_proj.{kind}") for part in "qkv")
        return torch.cat([interleave(q, spec.head_dim), interleave(k, spec.head_dim), v])

    bias = joined("bias") if spec.attention_bias else None
    return make_linear(joined("weight"), bias, layout, f"{name}.qkv")


def _projection(weights: Weights, layout: Layout, has_bias: bool, *names: str) -> Linear:
    """One product of one or several projections, in the given order."""
    bias = weights.take_joined([f"{name}.bias" for name in names]) if has_bias else None
    weight = weights.take_joined([f"{name}.weight" for name in names])
    return make_linear(weight, bias, layout, " + ".join(names))


class Llama:
    """The model: its weights, and the forward pass over a flat batch of tokens.

    Args:
        spec: the model's shape.
        tensors: by Hugging Face names; each is looked up once, in the order of use, so that a
            mapping that reads files holds one tensor at a time.
        layout: of the projections, see ``trioserve.models.linear``.

    Raises:
        ModelError: tensors are missing or have another shape; it names them.

    Attributes:
        num_parameters: a tied head counts once.
        weight_bytes: memory that the weights take as they are now.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        expected = expected_tensors(spec)
        weights = Weights(tensors, expected, lambda name: optional_tensor(spec, name))
        self.spec = spec
        self.layout = layout
        self.num_parameters = sum(math.prod(shape) for shape in expected.values())
        self.rotary = Rotary(spec, weights.take_optional(ROPE_FACTORS))
        rows = weights.take(EMBEDDING)
        self.embedding = Embedding(rows, layout)
        head_rows = rows if spec.tie_embeddings else weights.take(HEAD)
        self.head = make_linear(head_rows, None, layout, "lm_head")
        shared = head_rows is self.embedding.rows and self.head.layout == "fp32"
        del rows, head_rows
        self.layers = [Layer(spec, weights, index, layout) for index in range(spec.num_layers)]
        self.norm = RMSNorm(weights.take(FINAL_NORM), spec.rms_norm_eps)
        self.weight_bytes = (
            self.embedding.num_bytes
            + (0 if shared else self.head.num_bytes)
            + self.norm.num_bytes
            + sum(layer.num_bytes for layer in self.layers)
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        context: Any,
        logits_rows: Tensor,
    ) -> Tensor:
        """Compute one step.

        Args:
            token_ids: int64 ``[n]``, the tokens of all sequences, one after another.
            positions: int64 ``[n]``, each token's place in its sequence.
            attention: knows from ``context`` which tokens belong together.
            context: passed through to ``attention``.
            logits_rows: int64 ``[r]``, which tokens' logits are wanted; may be empty.

        Returns:
            float32 ``[r, vocab_size]``.
        """
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        rotations = self.rotary.rotations(positions)
        hidden = self.embedding(token_ids)
        for index, layer in enumerate(self.layers):
            heads = layer.qkv(layer.attention_norm(hidden)).unflatten(-1, (-1, spec.head_dim))
            rotate_(heads[:, :rotated], rotations)
            query, key, value = heads.split(sizes, dim=1)
            mixed = attention.forward(index, query, key, value, context)
            if index == spec.num_layers - 1:
                # The cache is written; from here on only the rows that give logits matter.
                if logits_rows.shape[0] == 0:
                    return hidden.new_empty((0, spec.vocab_size))
                mixed, hidden = mixed[logits_rows], hidden[logits_rows]
            hidden += layer.output(mixed)
            hidden += layer.down(silu_mul(layer.gate_up(layer.mlp_norm(hidden))))
        return self.head(self.norm(hidden))
