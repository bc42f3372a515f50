"""Narrow weights in panels, and a Llama's layers as one kernel.

Where numba works the projections are kept in panels that this project's own kernels read, and all
layers are handed to one parallel region.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from trioserve.errors import ModelError
from trioserve.kernels.cpu.best import FirstBest
from trioserve.kernels.cpu.blocks import HALF
from trioserve.kernels.cpu.codes import Blocks
from trioserve.kernels.cpu.decoder import Decoder, DecoderKernels, DecoderLayer, compile_decoder
from trioserve.kernels.cpu.panel_product import PanelProduct, Panels
from trioserve.kernels.cpu.runtime import Team
from trioserve.kernels.cpu.whole_panels import KINDS, WHOLE8, panels_of
from trioserve.kernels.cpu.whole_product import WholeProduct
from trioserve.models.attention import BatchContext, NumbaAttention
from trioserve.models.layers import RMSNorm, Rotary
from trioserve.models.linear import Layout

log = logging.getLogger(__name__)
PROJECTIONS = ("qkv", "output", "gate_up", "down")


class PanelLinear:
    """A projection whose weight lies in panels; see ``models.linear.Linear``. A float32 weight is
    rounded to ``kind``: HALF, or whole numbers, see ``trioserve.kernels.cpu.whole_product``.

    ``product`` is set by ``PanelKernels.finish`` before the first call: one kernel serves all.
    """

    layout: Layout = "panels"
    product: PanelProduct | WholeProduct

    def __init__(
        self, weight: Tensor | Blocks, bias: Tensor | None = None, kind: int = HALF
    ) -> None:
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, Blocks):
            self.panels = Panels.of_blocks(weight)
        elif kind == HALF:
            self.panels = Panels.half(weight)
        else:
            self.panels = panels_of(weight, kind)
        self.bias = bias
        self.num_bytes = self.panels.data.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, norm: Tensor | None = None) -> Tensor:
        """The product; ``norm`` as ``PanelProduct`` has it."""
        return self.product(x, self.panels, self.bias, norm)


@frozen(kw_only=True)
class PanelKernels:
    """The compiled kernels. Raises whatever numba raises where it does not work."""

    team: Team
    product: PanelProduct
    decoder: DecoderKernels
    best: FirstBest

    @classmethod
    def compile(cls, team: Team) -> PanelKernels:
        return cls(
            team=team,
            product=PanelProduct(team),
            decoder=compile_decoder(team),
            best=FirstBest(team),
        )

    def finish(self, model: Any, attention: NumbaAttention) -> Any:
        """Make a model that was loaded into panels ready to run.

        Returns:
            a FusedLlama or, where a projection had to stay float32, the model itself.
        """
        projections = [getattr(layer, name) for layer in model.layers for name in PROJECTIONS]
        panels = [one for one in (*projections, model.head) if isinstance(one, PanelLinear)]
        whole = [one for one in panels if one.panels.kind in KINDS]
        for one in panels:
            one.product = self.product
        if whole:
            product = WholeProduct(self.team)
            for one in whole:
                one.product = product
            narrow = sum(one.panels.kind == WHOLE8 for one in whole)
            log.info(
                "weights: %d projections in 8 bits, %d in 16, products in whole numbers by %s",
                narrow,
                len(whole) - narrow,
                product.unit,
            )
        if len(panels) == len(projections) + 1:
            return FusedLlama(model, attention, self)
        if attention.exact:
            raise ModelError(
                "[engine] deterministic = true cannot be kept with this checkpoint: some weights "
                "are beyond float16 and stay float32 (the log names them)"
            )
        log.info("layers: one by one, not all weights lie in panels")
        attention.compile()
        return model


class FusedLlama:
    """A Llama whose layers run in ``kernels.cpu.decoder``. Same results, same interface."""

    def __init__(self, model: Any, attention: NumbaAttention, kernels: PanelKernels) -> None:
        self.model = model
        self.spec = model.spec
        self.layout: Layout = model.layout
        self.num_parameters = model.num_parameters
        self.weight_bytes = model.weight_bytes
        self.decoder = Decoder(
            attention.team,
            kernels.decoder,
            model.embedding.rows,
            [_decoder_layer(layer) for layer in model.layers],
            attention.kernel,
            model.spec.rms_norm_eps,
        )
        self._rotations = RotationTable(model.rotary)
        eps = torch.tensor([model.spec.rms_norm_eps])
        self._norm = torch.cat([_weight(model.norm), eps])

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
        return self.logits(self.hidden(token_ids, positions, attention, context, logits_rows))

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: NumbaAttention,
        context: BatchContext,
        rows: Tensor,
    ) -> Tensor:
        """As ``Llama.hidden``; valid until the next call.

        Raises:
            IndexError: a token id is not in the embedding.
        """
        end = int(context.row_starts.max()) + len(token_ids) if len(token_ids) else 0
        rotations = self._rotations.up_to(end)
        return self.decoder(token_ids, positions, rotations, attention.caches, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """As ``Llama.logits``."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self.spec.vocab_size))
        head: PanelLinear = self.model.head
        return head(hidden, self._norm)


class RotationTable:
    """Rotations by position, made in pieces of fixed size and kept: the same to the bit whatever
    positions are asked for together."""

    PIECE = 1024  # positions

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table = rotary.rotations(torch.arange(self.PIECE)).squeeze(1)

    def up_to(self, end: int) -> Tensor:
        """A table by position, complex64 ``[positions, head_dim / 2]``, of ``end`` at least."""
        while end > (length := len(self._table)):
            piece = self._rotary.rotations(torch.arange(length, length + self.PIECE)).squeeze(1)
            self._table = torch.cat([self._table, piece])
        return self._table


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
