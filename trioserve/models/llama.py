"""Llama, and what shares its architecture (SmolLM2, Mistral without sliding window, …).

Read it from the top: one layer, the model, its forward pass; ``llama_tensors`` lists what a
checkpoint must hold. The KV cache and masks are the attention backend's; there is no state here but
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trioserve.kernels.cpu.codes import Blocks
from trioserve.models.layers import Embedding, RMSNorm, Rotary, interleave, rotate_, silu_mul
from trioserve.models.linear import Layout, Linear, make_linear
from trioserve.models.llama_tensors import expected_tensors
from trioserve.models.spec import ModelSpec
from trioserve.models.weights import Weights, make_pieces

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


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


def optional_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold ``name`` beside the expected tensors: tables made of what the
    spec holds already, and a tied head that is stored all the same."""
    return (
        name == "rope_freqs.weight"
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
        self.output = _projection(
            weights, layout, spec.attention_bias, f"{name}.self_attn.o_proj", robust=True
        )
        self.mlp_norm = RMSNorm(weights.take(f"{name}.post_attention_layernorm.weight"), eps)
        self.gate_up = _projection(
            weights, layout, bias, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", robust=True
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
    weight: Tensor | Blocks | None = None
    if layout == "packed":
        orders = [_rotary_order(spec, heads) for heads in (spec.num_heads, spec.num_kv_heads)]
        names = [f"{name}.{part}_proj.weight" for part in "qkv"]
        weight = weights.take_codes(names, [*orders, None])
    if weight is None:
        weight = joined("weight")
    return make_linear(weight, bias, layout, f"{name}.qkv")


def _rotary_order(spec: ModelSpec, num_heads: int) -> Tensor:
    """Which row of a checkpoint's projection comes where."""
    rows = torch.arange(num_heads * spec.head_dim).unsqueeze(1)
    return interleave(rows, spec.head_dim).flatten()


def _projection(
    weights: Weights, layout: Layout, has_bias: bool, *names: str, robust: bool = False
) -> Linear:
    """One product of one or several projections, in the given order."""
    bias = weights.take_joined([f"{name}.bias" for name in names]) if has_bias else None
    matrices = [f"{name}.weight" for name in names]
    weight: Tensor | Blocks | None = weights.take_codes(matrices) if layout == "packed" else None
    if weight is None:
        weight = weights.take_joined(matrices)
    return make_linear(weight, bias, layout, " + ".join(names), robust=robust)


def _ends(spec: ModelSpec, weights: Weights, layout: Layout) -> tuple[Embedding, Linear, int]:
    """Embedding and head, and the bytes of both; a tied float32 table serves as both."""
    codes = weights.take_codes([EMBEDDING]) if layout == "packed" and spec.tie_embeddings else None
    rows = weights.take(EMBEDDING) if codes is None else codes.dequantized()
    embedding = Embedding(rows, layout)
    head_rows: Tensor | Blocks | None = rows if codes is None else codes
    if not spec.tie_embeddings:
        head_rows = weights.take_codes([HEAD]) if layout == "packed" else None
        head_rows = weights.take(HEAD) if head_rows is None else head_rows
    head = make_linear(head_rows, None, layout, "lm_head")
    shared = head_rows is embedding.rows and head.layout == "fp32"
    return embedding, head, embedding.num_bytes + (0 if shared else head.num_bytes)


class Llama:
    """The model: its weights, and the forward pass over a flat batch of tokens.

    Args:
        spec: the model's shape.
        tensors: by Hugging Face names; each is looked up once and let go, from several threads,
            so that with a mapping that reads files the memory stays near its final size.
        layout: of the projections, see ``trioserve.models.linear``.
        piece_made: called from this thread after each layer.

    Raises:
        ModelError: tensors are missing or have another shape; it names them.

    Attributes:
        num_parameters: a tied head counts once.
        weight_bytes: memory that the weights take as they are now.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        layout: Layout,
        piece_made: Callable[[], None] = lambda: None,
    ) -> None:
        expected = expected_tensors(spec)
        weights = Weights(tensors, expected, lambda name: optional_tensor(spec, name))
        self.spec = spec
        self.layout = layout
        self.num_parameters = sum(math.prod(shape) for shape in expected.values())
        self.rotary = Rotary(spec)
        self.norm = RMSNorm(weights.take(FINAL_NORM), spec.rms_norm_eps)
        makers: list[Callable[[], Any]] = [partial(_ends, spec, weights, layout)]
        makers += [partial(Layer, spec, weights, i, layout) for i in range(spec.num_layers)]
        ends, *self.layers = make_pieces(makers, piece_made)
        self.embedding, self.head, ends_bytes = ends
        self.weight_bytes = ends_bytes + sum(part.num_bytes for part in (self.norm, *self.layers))

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        context: Any,
        logits_rows: Tensor,
    ) -> Tensor:
        """Compute one step: ``logits(hidden(…))``.

        Args:
            token_ids: int64 ``[n]``, the tokens of all sequences, one after another.
            positions: int64 ``[n]``, each token's place in its sequence.
            attention: knows from ``context`` which tokens belong together.
            context: passed through to ``attention``.
            logits_rows: int64 ``[r]``, which tokens' logits are wanted; may be empty.

        Returns:
            float32 ``[r, vocab_size]``.
        """
        rows = self.hidden(token_ids, positions, attention, context, logits_rows)
        return self.logits(rows)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        context: Any,
        rows: Tensor,
    ) -> Tensor:
        """The last layer's output for some tokens, float32 ``[r, hidden_size]``: what ``logits``
        takes, all at once or a part at a time. Arguments as of ``forward``."""
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
                mixed, hidden = mixed[rows], hidden[rows]
                if rows.shape[0] == 0:
                    return hidden
            hidden += layer.output(mixed)
            hidden += layer.down(silu_mul(layer.gate_up(layer.mlp_norm(hidden))))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of what ``hidden`` gave, float32 ``[r, vocab_size]``."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self.spec.vocab_size))
        return self.head(self.norm(hidden))
