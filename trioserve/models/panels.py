"""Float16 weights in panels, and a Llama's layers as one kernel.

Replaces, where numba works, the packed projections of a loaded model by panels of the same float16
values that this project's own kernels read, and hands all layers to one parallel region.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from trioserve.kernels.cpu.decoder import Decoder, DecoderLayer
from trioserve.kernels.cpu.half_linear import HalfLinear
from trioserve.models.attention import BatchContext, NumbaAttention
from trioserve.models.layers import RMSNorm, silu_mul
from trioserve.models.linear import Layout, PackedFp16Linear

log = logging.getLogger(__name__)
PROJECTIONS = ("qkv", "output", "gate_up", "down")


class PanelLinear:
    """A projection whose float16 weight lies in panels; see ``models.linear.Linear``."""

    layout: Layout = "fp16"

    def __init__(self, packed: PackedFp16Linear, product: HalfLinear) -> None:
        weight, self.bias = torch.ops.quantized.linear_unpack_fp16(packed._packed)
        self.out_features, self.in_features = weight.shape
        self.panels = HalfLinear.pack(weight)
        self.num_bytes = self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self._product = product

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.panels, self.out_features, self.bias)


class FusedLlama:
    """A Llama whose layers run in ``kernels.cpu.decoder``. Same results, same interface.

    Takes the model over: its projections are replaced one by one, so that no more than one of them
    is in memory twice.
    """

    def __init__(self, model: Any, attention: NumbaAttention) -> None:
        self._model = model
        self._attention = attention
        self.spec = model.spec
        self.layout: Layout = "fp16"
        self.num_parameters = model.num_parameters
        product = HalfLinear(attention.team)
        for layer in model.layers:
            for name in PROJECTIONS:
                setattr(layer, name, PanelLinear(getattr(layer, name), product))
        model.head = PanelLinear(model.head, product)
        self.weight_bytes = (
            model.embedding.num_bytes
            + model.head.num_bytes
            + model.norm.num_bytes
            + sum(
                part.num_bytes
                for layer in model.layers
                for part in (
                    layer.attention_norm,
                    layer.mlp_norm,
                    *(getattr(layer, name) for name in PROJECTIONS),
                )
            )
        )
        layers = [_decoder_layer(layer) for layer in model.layers]
        self._decoder = Decoder(attention.team, layers, attention.kernel, model.spec.rms_norm_eps)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: NumbaAttention,
        context: BatchContext,
        logits_rows: Tensor,
    ) -> Tensor:
        """As ``Llama.forward``; ``attention`` is the one given to the constructor, prepared."""
        model = self._model
        hidden = model.embedding(token_ids)
        mixed = self._decoder(hidden, model.rotary.rotations(positions), attention.caches)
        if logits_rows.shape[0] == 0:
            return hidden.new_empty((0, self.spec.vocab_size))
        # The decoder leaves after the last layer's attention.
        layer = model.layers[-1]
        mixed, hidden = mixed[logits_rows], hidden[logits_rows]
        hidden += layer.output(mixed)
        hidden += layer.down(silu_mul(layer.gate_up(layer.mlp_norm(hidden))))
        return model.head(model.norm(hidden))


def can_fuse(model: Any) -> bool:
    """Whether every projection is packed float16 (one with large values stays float32)."""
    projections = [getattr(layer, name) for layer in model.layers for name in PROJECTIONS]
    return all(isinstance(one, PackedFp16Linear) for one in [*projections, model.head])


def _decoder_layer(layer: Any) -> DecoderLayer:
    tensors = {name: getattr(layer, name).panels for name in PROJECTIONS}
    biases = {f"{name}_bias": getattr(layer, name).bias for name in PROJECTIONS}
    return DecoderLayer(
        attention_norm=_weight(layer.attention_norm),
        mlp_norm=_weight(layer.mlp_norm),
        **tensors,
        **biases,
    )


def _weight(norm: RMSNorm) -> Tensor:
    """The norm's own weight; it keeps a multiple of it."""
    return norm._weight / math.sqrt(norm._weight.shape[0])
