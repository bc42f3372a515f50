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

NO_TOKEN_LEFT = "allowed_token_ids and bad_words leave no token that may come"


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
            self._append(token_id)

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

    def append(self, position: int, token_id: int) -> None:
        """Note the token sampled at ``position``."""
        self.rewind(position)
        self._append(token_id)

    def _append(self, token_id: int) -> None:
        self.output.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)


@dataclass(frozen=True)
class RowRules:
    """The rules of one sequence. ``history`` is there if a rule depends on the answer."""

    sampling: SamplingParams
    bad_words: BadWords
    end_ids: list[int]  # masked at positions before ``first_end``
    first_end: int
    history: History | None

    @property
    def is_penalised(self) -> bool:
        return _is_penalised(self.sampling)

    @property
    def masks_always(self) -> bool:
        """Whether something is masked at each position."""
        return self.sampling.allowed_token_ids is not None or bool(self.bad_words.always)


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
    return RowRules(sampling, bad_words, ends, num_prompt_tokens + sampling.min_tokens, history)


def _is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


@dataclass(frozen=True)
class RawRows:
    """Rows of logits as they were before the rules, where these mask values or log probabilities
    are wanted."""

    rows: Tensor  # int64 [n]
    logits: Tensor  # float32 [n, vocab_size]

    def find_refused(self, best: Tensor) -> list[int]:
        """The rows to which the rules have left no token.

        A fault of the model that the rules have masked is put back into ``best``, the largest
        logit of each row of the batch.
        """
        peaks = self.logits.amax(-1)
        sound = peaks.isfinite()
        best[self.rows[~sound]] = peaks[~sound]
        refused: list[int] = self.rows[sound & (best[self.rows] == -torch.inf)].tolist()
        return refused

    def restore(self, logits: Tensor) -> None:
        """Put them back."""
        logits.index_copy_(0, self.rows, self.logits)


class BatchRules:
    """The rules of a batch, prepared once for the rows that have any.

    Args:
        rows: index in the batch and rules, at least one.
        device: where the logits are.
    """

    def __init__(self, rows: list[tuple[int, RowRules]], device: torch.device) -> None:
        self._device = device
        self._rows = rows
        self._limited = [i for i, rules in rows if rules.sampling.allowed_token_ids is not None]
        self._allowed = self._pairs(
            [(i, rules.sampling.allowed_token_ids or ()) for i, rules in rows]
        )
        self._banned = self._pairs([(i, rules.bad_words.always) for i, rules in rows])
        self._cautious = [
            (i, rules.bad_words, rules.history)
            for i, rules in rows
            if rules.bad_words.needs_output and rules.history is not None
        ]
        self._ends = [(i, rules) for i, rules in rows if rules.end_ids]
        self._biased = self._pairs([(i, rules.sampling.logit_bias) for i, rules in rows])
        bias = [value for _, rules in rows for value in rules.sampling.logit_bias.values()]
        self._bias = torch.tensor(bias, dtype=torch.float32, device=device)
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

    def apply(self, positions: list[int], logits: Tensor) -> RawRows | None:
        """Change the logits in place.

        Args:
            positions: for each row of the batch, of the token to be sampled.
            logits: float32 [rows of the batch, vocab_size].

        Returns:
            The rows as they were, where something is masked or log probabilities are wanted.
        """
        for index, rules in self._rows:
            if rules.history is not None:
                rules.history.rewind(positions[index])
        ends = [(i, rules.end_ids) for i, rules in self._ends if positions[i] < rules.first_end]
        raw = self._keep({i for i, _ in ends}, logits)
        if self._limited:
            allowed = logits[self._allowed]
            logits[torch.tensor(self._limited, device=self._device)] = -torch.inf
            logits[self._allowed] = allowed
        if len(self._banned[0]):
            logits[self._banned] = -torch.inf
        if self._cautious:
            banned = [
                (i, words.banned_after(history.output)) for i, words, history in self._cautious
            ]
            logits[self._pairs(banned)] = -torch.inf
        if ends:
            self._mask_ends(ends, logits)
        if len(self._bias):
            logits[self._biased] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)
        return raw

    def note(self, positions: list[int], token_ids: list[int]) -> None:
        """Take the tokens that were sampled for the rows of the batch into their histories."""
        for index, rules in self._rows:
            if rules.history is not None:
                rules.history.append(positions[index], token_ids[index])

    def _keep(self, ending: set[int], logits: Tensor) -> RawRows | None:
        kept = [
            i
            for i, rules in self._rows
            if rules.masks_always
            or i in ending
            or rules.bad_words.needs_output
            or rules.sampling.wants_logprobs
        ]
        if not kept:
            return None
        rows = torch.tensor(kept, device=self._device)
        return RawRows(rows, logits[rows])

    def _mask_ends(self, ends: list[tuple[int, list[int]]], logits: Tensor) -> None:
        """Mask the ids that would end a sequence, but not where nothing else may come."""
        where = self._pairs(ends)
        values = logits[where]
        logits[where] = -torch.inf
        rows = torch.tensor([i for i, _ in ends], device=self._device)
        if (only_ends := logits[rows].amax(-1) == -torch.inf).any():
            restored = torch.isin(where[0], rows[only_ends])
            logits[where[0][restored], where[1][restored]] = values[restored]

    def _pairs(self, parts: Sequence[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor]:
        """Rows and ids, int64 [n] both, of all ids of all parts."""
        rows, ids = [], []
        for index, part in parts:
            part = list(part)
            rows += [index] * len(part)
            ids += part
        both = torch.from_numpy(np.array([rows, ids], np.int64)).to(self._device)
        return both[0], both[1]
