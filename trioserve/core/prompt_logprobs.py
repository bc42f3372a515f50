"""Log probabilities of the tokens of a prompt, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trioserve.core.batch import NewSequence, ScheduledRow
from trioserve.core.logprobs import token_logprobs
from trioserve.ipc.messages import TokenLogprobs

ROWS = 64
"""Rows of logits that exist at once; fewer would read the head's weights more often."""


@frozen
class _Prompt:
    token_ids: list[int]
    num_top: int


@frozen(kw_only=True)
class Part:
    """Positions of one row whose logits say something about the prompt's next token."""

    id: int
    num_top: int
    first: int  # token of the step
    targets: list[int]  # the tokens that follow, one per position


class PromptScorer:
    """The prompts that are scored, among the sequences of the batch. Owned by the ModelRunner.

    Args:
        num_token_ids: ids from here on are padding of the model and no tokens.
    """

    def __init__(self, num_token_ids: int) -> None:
        self._num_token_ids = num_token_ids
        self._prompts: dict[int, _Prompt] = {}

    def add(self, new: NewSequence) -> None:
        """Take in a sequence, if its prompt is to be scored."""
        if new.prompt_logprobs is not None:
            prompt = new.token_ids[: new.num_prompt_tokens]
            self._prompts[new.id] = _Prompt(prompt, new.prompt_logprobs)

    def remove(self, id: int) -> None:
        """Forget a sequence; one that is not here is passed over."""
        self._prompts.pop(id, None)

    def parts(self, rows: Sequence[ScheduledRow], starts: np.ndarray) -> Sequence[Part]:
        """What of a step is to be scored; ``starts`` are the rows' first tokens in it."""
        if not self._prompts:
            return ()
        found = []
        for row, first in zip(rows, starts, strict=False):
            prompt = self._prompts.get(row.id)
            if prompt is None:
                continue
            targets = prompt.token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            if targets:
                found.append(
                    Part(id=row.id, num_top=prompt.num_top, first=int(first), targets=targets)
                )
        return found

    def score(
        self, parts: Sequence[Part], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> dict[int, list[TokenLogprobs]]:
        """The log probabilities of all targets, by sequence.

        Args:
            parts: of one step.
            hidden: float32 ``[rows_of(parts), hidden_size]``.
            logits_of: the model's head, of ``[n, hidden_size]``.
        """
        targets = [target for part in parts for target in part.targets]
        nums_top = [part.num_top for part in parts for _ in part.targets]
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), ROWS):
            chunk = slice(start, start + ROWS)
            logits = logits_of(hidden[chunk])
            logits[:, self._num_token_ids :] = -math.inf
            nothing: list[tuple[int, ...]] = [()] * len(logits)
            entries += token_logprobs(logits, targets[chunk], nums_top[chunk], nothing)
        found: dict[int, list[TokenLogprobs]] = {}
        for part in parts:
            found[part.id], entries = entries[: len(part.targets)], entries[len(part.targets) :]
        return found


def rows_of(parts: Sequence[Part]) -> Tensor:
    """The tokens of the step whose hidden states ``PromptScorer.score`` needs, int64, in order."""
    return torch.cat([torch.arange(part.first, part.first + len(part.targets)) for part in parts])
