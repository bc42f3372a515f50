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


@frozen(kw_only=True)
class _Views:
    """What a step of one shape takes of the buffers."""

    tables: np.ndarray  # int32 [num_rows], each row's line
    starts: np.ndarray  # int32 [num_rows]
    query_starts: np.ndarray  # int32 [num_rows + 1]; right already where all rows have one token
    positions: np.ndarray  # int64 [num_tokens], as the next two
    token_ids: np.ndarray
    slots: np.ndarray
    numbers: Tensor  # int64, 0 to num_rows - 1
    token_ids_tensor: Tensor
    context: BatchContext


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
        self._rooms = np.zeros(max_sequences, np.int64)  # tokens that the blocks of a line hold
        self._free = list(reversed(range(max_sequences)))
        # One place more than the longest sequence: the last token sampled is never computed.
        self._token_ids = np.zeros((max_sequences, max_model_len + 1), np.int32)
        self._tables = np.zeros((max_sequences, -(-max_model_len // block_size)), np.int32)
        self._row_ids: list[int]  # whose lines stand in ``_row_tables``
        self._views: _Views
        self._reserve(max_sequences, max_tokens)

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
        self._set_num_blocks(line, len(new.block_ids))

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence; one that is not here is passed over."""
        line = self._lines.pop(sequence_id, None)
        if line is not None:
            self._free.append(line)
            self._row_ids = []

    def add_blocks(self, sequence_id: int, block_ids: list[int]) -> None:
        """Append to a block table. A row that is tried again brings the same blocks again: they
        are taken once."""
        line = self._lines[sequence_id]
        end = self._num_blocks[line]
        table = self._tables[line]
        if table[max(0, end - len(block_ids)) : end].tolist() != block_ids:
            table[end : end + len(block_ids)] = block_ids
            self._set_num_blocks(line, end + len(block_ids))

    def set_tokens(
        self, sequence_ids: list[int], positions: list[int], token_ids: list[int]
    ) -> None:
        """Note sampled tokens, one for each of the sequences."""
        lines = [self._lines[id] for id in sequence_ids]
        self._token_ids[lines, positions] = token_ids

    def make_step(self, rows: list[ScheduledRow]) -> StepInputs:
        """The step that computes ``rows``, in their order.

        Raises:
            KeyError: a row's sequence is not here.
            ValueError: a row reaches past its blocks.
        """
        ids = [row.id for row in rows]
        counts = [row.num_tokens for row in rows]
        views = self._views_of(len(rows), sum(counts))
        if ids != self._row_ids:
            self._row_ids = []  # of the last step, should one not be here
            views.tables[:] = [self._lines[id] for id in ids]
            self._row_ids = ids
        views.starts[:] = [row.start for row in rows]
        lines, positions, ends = views.tables, views.positions, views.starts
        if len(positions) == len(rows):
            positions[:] = ends
        else:
            np.cumsum(counts, out=views.query_starts[1:])
            ends = views.starts + np.array(counts) - 1
            lines = np.repeat(lines, counts)
            positions[:] = np.repeat(views.starts - views.query_starts[:-1], counts)
            positions += self._numbers[: len(positions)]
        reaching = ends >= self._rooms[views.tables]
        if reaching.any():
            raise ValueError(f"sequence {ids[reaching.argmax()]} reaches past its blocks")
        views.token_ids[:] = self._token_ids[lines, positions]
        blocks, offsets = np.divmod(positions, self._block_size)
        np.multiply(self._tables[lines, blocks], self._block_size, out=views.slots, dtype=np.int64)
        views.slots[:] += offsets
        sampled = [i for i, row in enumerate(rows) if row.sample]
        last = views.numbers
        if len(sampled) < len(rows) or len(positions) > len(rows):
            last = torch.from_numpy(views.query_starts[1:][sampled].astype(np.int64) - 1)
        return StepInputs(
            token_ids=views.token_ids_tensor,
            context=views.context,
            logits_rows=last,
            sampled_ids=[ids[i] for i in sampled],
            sampled_positions=[rows[i].start + counts[i] for i in sampled],
        )

    def _views_of(self, num_rows: int, num_tokens: int) -> _Views:
        """The buffers of a step of this shape: those of the last step where it had the same."""
        if len(self._views.starts) == num_rows and len(self._views.positions) == num_tokens:
            return self._views
        if num_rows > self._max_rows or num_tokens > self._max_tokens:
            self._reserve(max(num_rows, self._max_rows), max(num_tokens, self._max_tokens))
        if num_tokens == num_rows:
            self._query_starts[: num_rows + 1] = self._numbers[: num_rows + 1]
        self._views = self._make_views(num_rows, num_tokens)
        return self._views

    def _make_views(self, num_rows: int, num_tokens: int) -> _Views:
        positions, token_ids, slots = (
            buffer[:num_tokens] for buffer in (self._positions, self._step_ids, self._slots)
        )
        tables, starts = self._row_tables[:num_rows], self._row_starts[:num_rows]
        query_starts = self._query_starts[: num_rows + 1]
        return _Views(
            tables=tables,
            starts=starts,
            query_starts=query_starts,
            positions=positions,
            token_ids=token_ids,
            slots=slots,
            numbers=torch.from_numpy(self._numbers[:num_rows]),
            token_ids_tensor=torch.from_numpy(token_ids),
            context=BatchContext(
                positions=torch.from_numpy(positions),
                slots=torch.from_numpy(slots),
                query_starts=query_starts,
                row_starts=starts,
                row_tables=tables,
                block_tables=self._tables,
            ),
        )

    def _set_num_blocks(self, line: int, num_blocks: int) -> None:
        self._num_blocks[line] = num_blocks
        self._rooms[line] = num_blocks * self._block_size

    def _add_lines(self) -> None:
        count = len(self._num_blocks)
        self._free += reversed(range(count, 2 * count))
        self._num_blocks += [0] * count
        self._rooms, self._token_ids, self._tables = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._rooms, self._token_ids, self._tables)
        )
        self._views = self._make_views(0, 0)

    def _reserve(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._row_tables = np.zeros(max_rows, np.int32)
        self._row_starts = np.zeros(max_rows, np.int32)
        self._query_starts = np.zeros(max_rows + 1, np.int32)
        self._numbers = np.arange(max(max_rows + 1, max_tokens))
        self._positions = np.zeros(max_tokens, np.int64)
        self._step_ids = np.zeros(max_tokens, np.int64)
        self._slots = np.zeros(max_tokens, np.int64)
        self._row_ids = []
        self._views = self._make_views(0, 0)
