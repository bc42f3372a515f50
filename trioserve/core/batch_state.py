"""What a rank keeps of its sequences between steps, and the step's tensors made from it."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trioserve.core.batch import NewSequence, ScheduledRow
from trioserve.models.attention import BatchContext


@frozen(kw_only=True)
class StepInputs:
    """The tensors of one step; views of buffers that the next step overwrites."""

    token_ids: Tensor  # int64 [num_tokens]
    context: BatchContext
    logits_rows: Tensor  # int64 [num_sampled], the tokens whose logits are wanted
    sampled_ids: list[int]
    sampled_positions: list[int]  # where each sampled token will stand in its sequence


class BatchState:
    """Token ids and block tables of all sequences in the batch, one line each.

    Only what a batch says has changed is written; making a step is a few array operations, whatever
    the number of rows. Lines and buffers grow when more is asked for than was said.

    Args:
        max_sequences: lines to begin with.
        max_model_len: most tokens of a sequence.
        max_tokens: tokens of a step to begin with.
        block_size: tokens per block.
    """

    def __init__(
        self, *, max_sequences: int, max_model_len: int, max_tokens: int, block_size: int
    ) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._lines: dict[int, int] = {}
        self._num_blocks = [0] * max_sequences
        self._free = list(reversed(range(max_sequences)))
        # One place more than the longest sequence: the last token sampled is never computed.
        self._token_ids = np.zeros((max_sequences, max_model_len + 1), np.int32)
        self._tables = np.zeros((max_sequences, -(-max_model_len // block_size)), np.int32)
        self._reserve_tokens(max_tokens)
        self._reserve_rows(max_sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, new: NewSequence) -> None:
        """Take in a sequence.

        Raises:
            ValueError: it has more tokens or blocks than a sequence may have.
        """
        if len(new.token_ids) > self._max_model_len or len(new.block_ids) > self._tables.shape[1]:
            raise ValueError(
                f"sequence {new.id} has {len(new.token_ids)} tokens and {len(new.block_ids)} "
                f"blocks; at most {self._max_model_len} and {self._tables.shape[1]} fit"
            )
        self.remove(new.id)
        if not self._free:
            self._add_lines()
        line = self._free.pop()
        self._lines[new.id] = line
        self._token_ids[line, : len(new.token_ids)] = new.token_ids
        self._tables[line, : len(new.block_ids)] = new.block_ids
        self._num_blocks[line] = len(new.block_ids)

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence; one that is not here is passed over."""
        line = self._lines.pop(sequence_id, None)
        if line is not None:
            self._free.append(line)

    def add_blocks(self, sequence_id: int, block_ids: list[int]) -> None:
        """Append to a block table. A row that is tried again brings the same blocks again: they
        are taken once."""
        line = self._lines[sequence_id]
        end = self._num_blocks[line]
        table = self._tables[line]
        if table[max(0, end - len(block_ids)) : end].tolist() != block_ids:
            table[end : end + len(block_ids)] = block_ids
            self._num_blocks[line] = end + len(block_ids)

    def set_token(self, sequence_id: int, position: int, token_id: int) -> None:
        """Note a sampled token."""
        self._token_ids[self._lines[sequence_id], position] = token_id

    def make_step(self, rows: list[ScheduledRow]) -> StepInputs:
        """The step that computes ``rows``, in their order.

        Raises:
            KeyError: a row's sequence is not here.
            ValueError: a row reaches past its blocks.
        """
        num_rows = len(rows)
        if num_rows >= len(self._query_starts):
            self._reserve_rows(num_rows)
        tables, starts = self._row_tables[:num_rows], self._row_starts[:num_rows]
        query_starts = self._query_starts[: num_rows + 1]
        tables[:] = [self._lines[row.id] for row in rows]
        starts[:] = [row.start for row in rows]
        counts = np.array([row.num_tokens for row in rows], np.int32)
        np.cumsum(counts, out=query_starts[1:])
        for row, line in zip(rows, tables.tolist(), strict=True):
            if row.start + row.num_tokens > self._num_blocks[line] * self._block_size:
                raise ValueError(f"sequence {row.id} reaches past its blocks in this step")
        num_tokens = int(query_starts[-1])
        if num_tokens > len(self._positions):
            self._reserve_tokens(num_tokens)
        positions = self._positions[:num_tokens]
        lines: np.ndarray = tables
        if num_tokens == num_rows:
            positions[:] = starts
        else:
            lines = np.repeat(tables, counts)
            positions[:] = np.repeat(starts - query_starts[:-1], counts)
            positions += self._arange[:num_tokens]
        self._step_ids[:num_tokens] = self._token_ids[lines, positions]
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = self._slots[:num_tokens]
        np.multiply(self._tables[lines, blocks], self._block_size, out=slots, dtype=np.int64)
        slots += offsets
        sampled = [i for i, row in enumerate(rows) if row.sample]
        return StepInputs(
            token_ids=self._step_ids_tensor[:num_tokens],
            context=BatchContext(
                positions=self._positions_tensor[:num_tokens],
                slots=self._slots_tensor[:num_tokens],
                query_starts=query_starts,
                row_starts=starts,
                row_tables=tables,
                block_tables=self._tables,
            ),
            logits_rows=torch.from_numpy(query_starts[1:][sampled].astype(np.int64) - 1),
            sampled_ids=[rows[i].id for i in sampled],
            sampled_positions=[rows[i].start + rows[i].num_tokens for i in sampled],
        )

    def _add_lines(self) -> None:
        count = len(self._num_blocks)
        self._free += reversed(range(count, 2 * count))
        self._num_blocks += [0] * count
        self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
        self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])

    def _reserve_rows(self, count: int) -> None:
        self._row_tables = np.zeros(count, np.int32)
        self._row_starts = np.zeros(count, np.int32)
        self._query_starts = np.zeros(count + 1, np.int32)

    def _reserve_tokens(self, count: int) -> None:
        self._arange = np.arange(count)
        self._positions = np.zeros(count, np.int64)
        self._step_ids = np.zeros(count, np.int64)
        self._slots = np.zeros(count, np.int64)
        self._positions_tensor = torch.from_numpy(self._positions)
        self._step_ids_tensor = torch.from_numpy(self._step_ids)
        self._slots_tensor = torch.from_numpy(self._slots)
