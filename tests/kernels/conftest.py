"""The thread team and a maker of batches, shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attrs import asdict, frozen

from trioserve.kernels.cpu.codes import BLOCK
from trioserve.kernels.cpu.panel_product import FEW_ROWS
from trioserve.kernels.cpu.runtime import Team, cache_directory
from trioserve.models.attention import BatchContext


@frozen(kw_only=True)
class Units:
    """A team's arguments."""

    threads: int = 2
    tiles: bool = True
    byte_products: bool = True
    word_products: bool = True
    rounded: bool = False


TEAMS = {
    "1 thread": Units(threads=1),
    "2 threads, rounded": Units(rounded=True),
    "2 threads": Units(),
    "2 threads, words": Units(tiles=False, byte_products=False),
    "2 threads, vector unit alone": Units(tiles=False, byte_products=False, word_products=False),
}


@pytest.fixture(scope="session", params=TEAMS.values(), ids=TEAMS)
def team(request: pytest.FixtureRequest) -> Team:
    return Team(cache=cache_directory(), **asdict(request.param))


@pytest.fixture(scope="session")
def assert_product(team: Team) -> Callable[..., None]:
    """Compares a product with its float64 truth; errors are held to the size of the terms."""

    def compare(out: torch.Tensor, x: np.ndarray, weight: np.ndarray, bias=None) -> None:
        expected = x.astype(np.float64) @ weight.T + (0 if bias is None else bias)
        relative = 2.0**-20 if team.tiles is None else 2.0**-16
        if team.parts == 1 and len(x) > FEW_ROWS:
            relative = 2.0**-8
        absolute, sizes = np.abs(x).astype(np.float64), np.abs(weight.T)
        limit = absolute @ sizes * relative + 1e-6
        if team.word_products and team.tiles is None and x.shape[1] % BLOCK == 0:
            # Each value of a block is off by up to half of a whole number.
            largest = absolute.reshape(len(x), -1, BLOCK).max(-1)
            limit += largest @ sizes.reshape(-1, BLOCK, len(weight)).sum(1) * 2.0**-15.99
        assert np.all(np.abs(out.numpy() - expected) <= limit)

    return compare


class Batch:
    """Rows of (tokens before, tokens now) over shuffled blocks, and their context."""

    def __init__(self, rows: list[tuple[int, int]], block_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rows = rows
        self.block_size = block_size
        needed = [-(-(start + count) // block_size) for start, count in rows]
        self.num_blocks = sum(needed) + 3
        shuffled = rng.permutation(self.num_blocks).astype(np.int32)
        tables = np.full((len(rows) + 2, max(needed)), 10**6, np.int32)  # far outside if used
        lines = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
        slots, positions = [], []
        for line, (start, count), blocks in zip(lines, rows, needed, strict=True):
            tables[line, :blocks], shuffled = shuffled[:blocks], shuffled[blocks:]
            where = np.arange(start, start + count)
            positions.append(where)
            slots.append(tables[line, where // block_size].astype(np.int64) * block_size)
            slots[-1] += where % block_size
        self.unused_blocks = shuffled
        self.ends = np.cumsum([0, *(count for _, count in rows)]).astype(np.int32)
        self.context = BatchContext(
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            query_starts=self.ends,
            row_starts=np.array([start for start, _ in rows], np.int32),
            row_tables=lines,
            block_tables=tables,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    def table(self, row: int) -> np.ndarray:
        """Block ids of one row."""
        start, count = self.rows[row]
        blocks = -(-(start + count) // self.block_size)
        return self.context.block_tables[self.context.row_tables[row], :blocks]

    def only(self, row: int) -> BatchContext:
        """The context of one row alone, over the same blocks."""
        first, last = self.ends[row : row + 2]
        return BatchContext(
            positions=self.context.positions[first:last],
            slots=self.context.slots[first:last],
            query_starts=np.array([0, last - first], np.int32),
            row_starts=self.context.row_starts[row : row + 1].copy(),
            row_tables=self.context.row_tables[row : row + 1].copy(),
            block_tables=self.context.block_tables,
        )


@pytest.fixture(scope="session")
def make_batch() -> type[Batch]:
    return Batch


@pytest.fixture(scope="session")
def single() -> Team:
    return Team(1, None)
