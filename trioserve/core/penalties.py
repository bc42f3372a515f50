"""Repetition, frequency and presence penalties over the distinct tokens of each sequence.

Only the logits of tokens that a sequence has seen are touched: a step costs what its penalised
sequences have said, not the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one sequence and how often each stands in its answer.

    Tokens can be taken back in the reverse of the order they were added in, which leaves what was
    there before.

    Args:
        seen_ids: tokens that are seen, but are not counted: those of the prompt, or none.
    """

    def __init__(self, seen_ids: Sequence[int] = ()) -> None:
        ids = np.unique(np.array(seen_ids, np.int64))
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._num_seen = len(ids)
        self._ids = np.concatenate([ids, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> np.ndarray:
        """Distinct tokens, int64 [len(self)]; a view."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of ``ids`` was added, float32 [len(self)]; a view."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        """Count a token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slots[token_id] = slot
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1

    def take_back(self, token_id: int) -> None:
        """Undo the latest ``add`` that was not undone; it was of this token."""
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        # A token that only the answer brought was the last new one: its slot is the last.
        if self._counts[slot] == 0 and slot >= self._num_seen:
            del self._slots[token_id]


@dataclass(frozen=True)
class PenalisedRow:
    """A row of the batch with penalties."""

    index: int
    counts: TokenCounts
    repetition: float
    frequency: float
    presence: float


class Penalties:
    """The penalties of some rows of a batch, which stay the same from step to step.

    Args:
        rows: at least one.
        device: where the logits are.
    """

    def __init__(self, rows: list[PenalisedRow], device: torch.device) -> None:
        self._all_counts = [row.counts for row in rows]
        self._indices = np.array([row.index for row in rows], np.int64)
        parameters = [(row.repetition, row.frequency, row.presence) for row in rows]
        self._parameters = np.array(parameters, np.float32)
        self._device = device

    def apply(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Change the logits of what was seen, in place; infinities and NaN stay what they are.

        Args:
            logits: float32 [rows of the batch, vocab_size].

        Returns:
            Rows and ids, int64 [n] both, and the values that stood there.
        """
        sizes = [len(counts) for counts in self._all_counts]
        rows = self._tensor(np.repeat(self._indices, sizes))
        ids = self._tensor(np.concatenate([counts.ids for counts in self._all_counts]))
        count = self._tensor(np.concatenate([counts.counts for counts in self._all_counts]))
        parameters = self._tensor(np.repeat(self._parameters, sizes, axis=0))
        repetition, frequency, presence = parameters.unbind(-1)
        before = logits[rows, ids]
        values = torch.where(before > 0, before / repetition, before * repetition)
        logits[rows, ids] = values - frequency * count - presence * (count > 0)
        return (rows, ids), before

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
