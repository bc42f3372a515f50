"""What several tests of products and layers do: random batches through a decoder, and rows that a
product has to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trioserve.kernels.cpu.decoder import Decoder, DecoderLayer, compile_decoder, reference
from trioserve.kernels.cpu.paged_attention import PagedAttention
from trioserve.kernels.cpu.panel_product import PanelProduct, Panels
from trioserve.kernels.cpu.runtime import Team
from trioserve.models.attention import BatchContext

VOCAB, EPS, BLOCK_SIZE = 90, 1e-5, 16


def prepare(attention: PagedAttention, context: BatchContext) -> None:
    """Get ready for a step."""
    attention.prepare(
        slots=context.slots,
        query_starts=context.query_starts,
        row_starts=context.row_starts,
        row_tables=context.row_tables,
        tables=context.block_tables,
    )


class RandomSteps:
    """A decoder of some layers, given twice: for the kernels, and plain for ``reference``.

    Args:
        heads: query heads, KV heads, head_dim.
    """

    def __init__(
        self,
        team: Team,
        layers: list[DecoderLayer],
        plain: list[dict[str, Any]],
        heads: tuple[int, int, int],
    ) -> None:
        q_heads, kv_heads, dim = heads
        self._plain, self._heads, self._num_layers = plain, heads, len(layers)
        self._attention = PagedAttention(
            team,
            kv_heads=kv_heads,
            group=q_heads // kv_heads,
            head_dim=dim,
            block_size=BLOCK_SIZE,
        )
        self._source = torch.Generator().manual_seed(5)
        width = layers[0].attention_norm.shape[0]
        self._embedding = torch.randn(VOCAB, width, generator=self._source)
        kernels = compile_decoder(team)
        self._decoder = Decoder(team, kernels, self._embedding, layers, self._attention, EPS)

    def begin(self, batch: Any, *, exact: bool = False) -> np.ndarray:
        """Random tokens for a batch; gives the outcome of all of them in float64, weights being
        used as they are if ``exact``, or as float16."""
        self._batch, n = batch, batch.num_tokens
        prepare(self._attention, batch.context)
        self._token_ids = torch.randint(VOCAB, (n,), generator=self._source)
        angles = torch.randn(n, self._heads[2] // 2, generator=self._source)
        self._rotations = torch.polar(torch.ones_like(angles), angles)
        return reference(
            self._embedding[self._token_ids].numpy(),
            self._rotations[batch.context.positions].unsqueeze(1).numpy(),
            self._plain,
            batch.ends,
            self._heads,
            EPS,
            exact=exact,
        )

    def run(self, wanted: Tensor) -> np.ndarray:
        """The outcome of the tokens of the batch that are wanted."""
        caches = [
            self._attention.new_cache(self._batch.num_blocks) for _ in range(self._num_layers)
        ]
        positions = self._batch.context.positions
        return self._decoder(self._token_ids, positions, self._rotations, caches, wanted).numpy()


def check_refusals(products: PanelProduct, pack: Callable[[Tensor], Panels], inputs: int) -> None:
    """Rows and biases of a wrong type, layout or size, for a weight [70, inputs]."""
    packed, x = pack(torch.randn(70, inputs)), torch.randn(3, inputs)
    with pytest.raises(ValueError, match=rf"x must be float32 \[n, {inputs}\]"):
        products(x.double(), packed)
    with pytest.raises(ValueError, match="its rows without gaps"):
        products(torch.randn(inputs, 3).t(), packed)
    with pytest.raises(ValueError, match=rf"x must be float32 \[n, {inputs}\]"):
        products(x[:, : inputs // 2], packed)
    with pytest.raises(ValueError, match=r"bias must be float32 \[70\]"):
        products(x, packed, torch.randn(69))
