"""Attention over the paged KV cache: one interface, its backends, and the batch they work on.

A backend owns the cache's tensors and their layout; everybody else knows block ids only.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor

from trioserve.errors import ModelError

log = logging.getLogger("trioserve.attention")


@frozen(kw_only=True)
class KVCacheSpec:
    """What one layer keeps of each token: keys and values in float32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: Literal["full"] = "full"

    def bytes_per_token(self, lanes: int) -> int:
        """Bytes of one token in this layer, where a value takes ``lanes`` elements."""
        return self.num_kv_heads * (self.head_dim + lanes) * 4


@define(kw_only=True)
class BatchContext:
    """Which tokens of a step belong together. Made by the ModelRunner, once a step.

    The tokens of all rows lie one after another: row r has ``[query_starts[r], query_starts[r+1])``
    of them, at the positions from ``row_starts[r]`` on; ``[0, row_starts[r])`` are in the cache.
    Valid until the next step is made: the arrays are views of buffers that are used again.
    """

    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block id × block size + offset in the block
    query_starts: np.ndarray  # int32 [num_rows + 1]
    row_starts: np.ndarray  # int32 [num_rows]
    row_tables: np.ndarray  # int32 [num_rows], each row's line of ``block_tables``
    block_tables: np.ndarray  # int32 [lines, max_blocks]

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.row_starts)


class AttentionBackend(ABC):
    """Causal attention of one model. Used by one thread.

    ``init_cache``, then for each step ``prepare`` and one ``forward`` a layer.

    Args:
        specs: one for each layer.
        block_size: tokens per block.
    """

    name: str

    def __init__(self, specs: list[KVCacheSpec], block_size: int) -> None:
        self.specs = specs
        self.block_size = block_size

    def describe(self) -> str:
        """For the log."""
        return self.name

    def compile(self) -> None:  # noqa: B027 - most have nothing to compile
        """Compile what ``forward`` needs, if it will be called: the decoder kernel does without."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of the cache for one token, over all layers."""

    @abstractmethod
    def init_cache(self, num_blocks: int) -> None:
        """Allocate, zeroed, in place of what was there. Raises MemoryError or RuntimeError."""

    @abstractmethod
    def prepare(self, context: BatchContext) -> None:
        """Take in a step, before its first layer."""

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: BatchContext
    ) -> Tensor:
        """Write the new keys and values to the cache, then attend to all up to each token.

        Args:
            layer: index into ``specs``.
            query: float32 [n, heads, head_dim], positions applied; slices of a larger tensor are
                read as they are, if the heads of a token lie together.
            key, value: float32 [n, kv_heads, head_dim].
            context: the one given to ``prepare``.

        Returns:
            float32 [n, heads × head_dim]; a row's values depend on that row alone.
        """


class TorchAttention(AttentionBackend):
    """Gathers each row's context and calls torch. Works wherever torch does.

    Keys and values of a layer: [num_blocks, kv_heads, block_size, head_dim].
    """

    name = "torch"

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token(spec.head_dim) for spec in self.specs)

    def init_cache(self, num_blocks: int) -> None:
        self.caches: list[tuple[Tensor, Tensor]] = []  # the old one goes first
        for spec in self.specs:
            shape = (num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim)
            self.caches.append((_lazy_zeros(shape), _lazy_zeros(shape)))

    def prepare(self, context: BatchContext) -> None:
        """Make each row's block ids and mask."""
        self._rows = []
        for row in range(context.num_rows):
            first, last = (int(end) for end in context.query_starts[row : row + 2])
            start, count = int(context.row_starts[row]), last - first
            num_blocks = -(-(start + count) // self.block_size)
            table = context.block_tables[context.row_tables[row], :num_blocks]
            mask = None
            if count > 1:
                mask = torch.ones((count, start + count), dtype=torch.bool).tril(start)
            self._rows.append((first, last, start + count, torch.from_numpy(table).long(), mask))
        self._blocks = context.slots // self.block_size
        self._offsets = context.slots % self.block_size

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: BatchContext
    ) -> Tensor:
        spec = self.specs[layer]
        keys, values = self.caches[layer]
        keys[self._blocks, :, self._offsets] = key
        values[self._blocks, :, self._offsets] = value
        out = torch.empty((query.shape[0], spec.num_heads, spec.head_dim))
        for first, last, length, table, mask in self._rows:
            mixed = F.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                self._gather(keys, table, length),
                self._gather(values, table, length),
                attn_mask=mask,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            out[first:last] = mixed[0].transpose(0, 1)
        return out.flatten(1)

    @staticmethod
    def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
        """A row's context [1, kv_heads, length, head_dim]."""
        return cache[table].transpose(0, 1).flatten(1, 2)[None, :, :length]


class NumbaAttention(AttentionBackend):
    """Reads the paged cache in place: ``trioserve.kernels.cpu.paged_attention``.

    Attributes:
        exact: what a token gets is the same to the bit whatever is computed beside it.

    Raises:
        Exception: from the constructor, whatever fails where numba does not work.
    """

    name = "numba"

    def __init__(
        self,
        specs: list[KVCacheSpec],
        block_size: int,
        threads: int,
        *,
        exact: bool = False,
        rounded: bool = False,
    ) -> None:
        super().__init__(specs, block_size)
        from trioserve.kernels.cpu.paged_attention import PagedAttention
        from trioserve.kernels.cpu.runtime import Team, cache_directory

        first = specs[0]
        if any(spec != first for spec in specs):
            raise ValueError("layers with different caches")
        self.team = Team(threads, cache_directory(), exact=exact, rounded=rounded)
        self.exact = exact
        self.kernel = PagedAttention(
            self.team,
            kv_heads=first.num_kv_heads,
            group=first.num_heads // first.num_kv_heads,
            head_dim=first.head_dim,
            block_size=block_size,
        )

    def describe(self) -> str:
        exact = "deterministic; " if self.exact else ""
        return f"{self.name} ({exact}{self.team.describe()})"

    def compile(self) -> None:
        self.kernel.compile()

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token(self.kernel.lanes) for spec in self.specs)

    def init_cache(self, num_blocks: int) -> None:
        self.caches: list[tuple[Tensor, Tensor]] = []
        for _ in self.specs:
            self.caches.append(self.kernel.new_cache(num_blocks))

    def prepare(self, context: BatchContext) -> None:
        self.kernel.prepare(
            slots=context.slots,
            query_starts=context.query_starts,
            row_starts=context.row_starts,
            row_tables=context.row_tables,
            tables=context.block_tables,
        )

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: BatchContext
    ) -> Tensor:
        return self.kernel(self.caches[layer], query, key, value)


def make_backend(
    wanted: Literal["auto", "numba", "torch"],
    specs: list[KVCacheSpec],
    block_size: int,
    threads: int,
    *,
    exact: bool = False,
    rounded: bool = False,
) -> AttentionBackend:
    """The backend as configured; with "auto" the first that works here, and the log says which.

    ``exact``: what a token gets is the same to the bit whatever is computed beside it.
    ``rounded``: what its team of threads multiplies is rounded to bfloat16, see ``Team``.

    Raises:
        ModelError: the one that was asked for does not work here, or not exactly.
    """
    if exact and wanted == "torch":
        raise ModelError(
            "[engine] deterministic = true needs numba's kernels; [kernels] attention = torch "
            "cannot be with it, leave it at auto"
        )
    if wanted == "torch":
        return TorchAttention(specs, block_size)
    try:
        return NumbaAttention(specs, block_size, threads, exact=exact, rounded=rounded)
    except Exception as error:  # a compiler has many ways to fail
        cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0] or 'no message'}"
        if exact:
            raise ModelError(
                f"[engine] deterministic = true cannot be kept here: numba's kernels do not work "
                f"({cause})"
            ) from error
        if wanted == "numba":
            raise ModelError(
                f"[kernels] attention = numba does not work here ({cause}); set it to auto"
            ) from error
        log.warning("attention kernels of numba do not work here (%s); torch takes over", cause)
        return TorchAttention(specs, block_size)


def _lazy_zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros whose memory is taken page by page as it is written."""
    return torch.from_numpy(np.zeros(shape, np.float32))
