"""What requests change in the logits before a token is chosen.

In this order, which docs/sampling.md explains: ``allowed_token_ids``, bad words, ids that would
end a sequence before ``min_tokens``, ``logit_bias``, penalties. A sequence that asks for none of it
has no rules, and a batch without any does none of what is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trioserve.core.bad_words import BadWords
from trioserve.core.penalties import PenalisedRow, Penalties, TokenCounts
from trioserve.sampling_params import SamplingParams

_NO_IDS = np.zeros(0, np.int64)


class History:
    """The answer of one sequence so far, as the sampler has chosen it.

    A step may be computed again after a fault, from any position that was sampled: what came
    later is then taken back first.
    """

    def __init__(self, start: int, output: Sequence[int], counts: TokenCounts | None) -> None:
        self._start = start
        self.output: list[int] = []
        self.counts = counts
        for token_id in output:
            self.append(token_id)

    def rewind(self, position: int) -> None:
        """Forget what stands at ``position`` of the sequence and after it.

        Raises:
            RuntimeError: tokens before ``position`` are not known.
        """
        num_output = position - self._start
        if num_output > len(self.output):
            raise RuntimeError(
                f"token {position} is to be sampled, "
                f"but only {self._start + len(self.output)} tokens of the sequence are known"
            )
        while len(self.output) > num_output:
            token_id = self.output.pop()
            if self.counts is not None:
                self.counts.take_back(token_id)

    def append(self, token_id: int) -> None:
        """Note the next token."""
        self.output.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)


@dataclass(frozen=True)
class RowRules:
    """The rules of one sequence; arrays of ids are int64 [n]."""

    sampling: SamplingParams
    allowed_ids: np.ndarray | None  # None: all
    bad_words: BadWords
    banned_ids: np.ndarray  # bad words of one token
    end_ids: np.ndarray  # masked at positions before ``first_end``
    first_end: int
    bias_ids: np.ndarray
    bias: np.ndarray  # float32, for each of ``bias_ids``
    history: History | None  # there if a rule depends on the answer


def make_rules(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    token_ids: Sequence[int],
    bad_words_ids: Iterable[Sequence[int]],
    end_ids: Iterable[int],
) -> RowRules | None:
    """The rules of a sequence, or None if nothing changes its logits.

    Args:
        num_prompt_tokens: how many of ``token_ids`` are the prompt.
        token_ids: all tokens known so far.
        end_ids: tokens that end the sequence.
    """
    bad_words = BadWords(bad_words_ids)
    ends = sorted(end_ids) if sampling.min_tokens > 0 else []
    penalised = _is_penalised(sampling)
    if not (
        penalised
        or ends
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or bad_words.always
        or bad_words.needs_output
    ):
        return None
    history = None
    if penalised or bad_words.needs_output:
        counts = None
        if penalised:
            seen = token_ids[:num_prompt_tokens] if sampling.repetition_penalty != 1 else ()
            counts = TokenCounts(seen)
        history = History(num_prompt_tokens, token_ids[num_prompt_tokens:], counts)
    allowed = sampling.allowed_token_ids
    return RowRules(
        sampling=sampling,
        allowed_ids=None if allowed is None else _ids(allowed),
        bad_words=bad_words,
        banned_ids=_ids(bad_words.always),
        end_ids=_ids(ends),
        first_end=num_prompt_tokens + sampling.min_tokens,
        bias_ids=_ids(sampling.logit_bias),
        bias=np.array(list(sampling.logit_bias.values()), np.float32),
        history=history,
    )


def _ids(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


def _is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


class Changes:
    """What the rules changed in the logits of one step, and the faults that this has hidden.

    ``ending``: rows in which the ids that would end the sequence are masked.
    """

    def __init__(self, ending: list[int]) -> None:
        self.ending = ending
        self._undo: list[tuple[tuple[Tensor, ...], Tensor]] = []
        self._faults: list[tuple[Tensor, Tensor]] = []

    def add(self, where: tuple[Tensor, ...], values: Tensor) -> None:
        """Note the values, [n], that stand in the logits at ``where`` and are about to change."""
        self._undo.append((where, values))

    def hide(self, rows: Tensor, values: Tensor) -> None:
        """Note values, [n], that are about to be masked in ``rows``."""
        sound = values < torch.inf  # false for NaN
        if not sound.all():
            self._faults.append((rows[~sound], values[~sound]))

    def show_faults(self, best: Tensor) -> None:
        """Put NaN and infinities that are masked into the best logits, [rows of the batch]."""
        for rows, values in self._faults:
            best[rows] = values

    def restore(self, logits: Tensor) -> None:
        """Undo all changes; a second time does nothing."""
        while self._undo:
            where, values = self._undo.pop()
            logits[where] = values


class BatchRules:
    """The rules of a batch, prepared once for the rows that have any.

    Args:
        rows: index in the batch and rules, at least one.
        device: where the logits are.
    """

    def __init__(self, rows: list[tuple[int, RowRules]], device: torch.device) -> None:
        self._device = device
        limited = [(i, rules.allowed_ids) for i, rules in rows if rules.allowed_ids is not None]
        self._limited = torch.tensor([i for i, _ in limited], dtype=torch.int64, device=device)
        self._allowed = self._pairs(limited)
        self._banned = self._pairs([(i, rules.banned_ids) for i, rules in rows])
        self._histories = [(i, rules.history) for i, rules in rows if rules.history is not None]
        self._cautious = [
            (i, rules.bad_words, rules.history)
            for i, rules in rows
            if rules.bad_words.needs_output and rules.history is not None
        ]
        self._ends = [(i, rules) for i, rules in rows if len(rules.end_ids)]
        self._ending: list[int] = []
        self._ending_ids = self._pairs([])
        self._biased = self._pairs([(i, rules.bias_ids) for i, rules in rows])
        bias = np.concatenate([rules.bias for _, rules in rows])
        self._bias = torch.from_numpy(bias).to(device)
        penalised = [
            PenalisedRow(
                index=i,
                counts=rules.history.counts,
                repetition=rules.sampling.repetition_penalty,
                frequency=rules.sampling.frequency_penalty,
                presence=rules.sampling.presence_penalty,
            )
            for i, rules in rows
            if rules.history is not None and rules.history.counts is not None
        ]
        self._penalties = Penalties(penalised, device) if penalised else None

    def apply(
        self, positions: list[int], logits: Tensor, *, may_end: Sequence[int] = ()
    ) -> Changes:
        """Change the logits in place.

        Args:
            positions: for each row of the batch, of the token to be sampled.
            logits: float32 [rows of the batch, vocab_size].
            may_end: rows that may end in spite of ``min_tokens``.
        """
        for index, history in self._histories:
            history.rewind(positions[index])
        changes = Changes(
            [i for i, rules in self._ends if positions[i] < rules.first_end and i not in may_end]
        )
        if len(self._limited):
            self._limit(logits, changes)
        self._mask(self._banned, logits, changes)
        if self._cautious:
            after = [
                (i, _ids(bad_words.banned_after(history.output)))
                for i, bad_words, history in self._cautious
            ]
            self._mask(self._pairs(after), logits, changes)
        self._mask(self._end_pairs(changes.ending), logits, changes)
        if len(self._bias):
            values = logits[self._biased]
            changes.add(self._biased, values)
            logits[self._biased] = values + self._bias
        if self._penalties is not None:
            changes.add(*self._penalties.apply(logits))
        return changes

    def note(self, token_ids: list[int]) -> None:
        """Take the tokens that were sampled after ``apply``, for each row, into the histories."""
        for index, history in self._histories:
            history.append(token_ids[index])

    def _limit(self, logits: Tensor, changes: Changes) -> None:
        """Mask all but ``allowed_token_ids``."""
        values, allowed = logits[self._limited], logits[self._allowed]
        changes.add((self._limited,), values)
        changes.hide(self._limited, values.amax(-1))
        logits[self._limited] = -torch.inf
        logits[self._allowed] = allowed

    @staticmethod
    def _mask(where: tuple[Tensor, Tensor], logits: Tensor, changes: Changes) -> None:
        if len(where[0]):
            values = logits[where]
            changes.add(where, values)
            changes.hide(where[0], values)
            logits[where] = -torch.inf

    def _end_pairs(self, ending: list[int]) -> tuple[Tensor, Tensor]:
        if self._ending != ending:
            self._ending, rows = ending, set(ending)
            self._ending_ids = self._pairs(
                [(i, rules.end_ids) for i, rules in self._ends if i in rows]
            )
        return self._ending_ids

    def _pairs(self, parts: list[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
        """Rows and ids, int64 [n] both, of all ids of all parts."""
        rows = np.repeat(_ids(i for i, _ in parts), [len(ids) for _, ids in parts])
        ids = np.concatenate([_NO_IDS, *(ids for _, ids in parts)])
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(ids).to(self._device)
