"""From logits to tokens, for all rows of a step at once.

Order: ids that are no tokens are masked; the rules of logit_rules.py change the logits of rows that
have any; greedy rows take the best; the others are scaled by temperature in float32, cut by min_p,
then top_k, then top_p, and sampled by the Gumbel-max rule: the best of scaled logit plus noise.
Log probabilities are of the logits before rules, temperature and cuts. docs/sampling.md tells more.

The cuts need no full sort unless the logits are very flat: a row's best 64 candidates are looked
at first, then more, and a row leaves as soon as its cut is known. The result is the same at each
width: candidates are in order of (logit, lowest id first), and a row whose cut falls among equals
that reach the window's end goes on to the next width. Rows without a cut choose a block of ids by
its mass and then a token in it, both by the Gumbel-max rule, which has the same distribution as
one choice among all and needs noise for a few hundred values and not for all. So a row's token
depends on its own logits, parameters, seed and position alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trioserve.core.batch import SampledRow
from trioserve.core.candidates import (
    BLOCK,
    best_candidates,
    block_masses,
    count_survivors,
    first_best,
    in_blocks,
    surviving_mass,
)
from trioserve.core.logit_rules import BatchRules, Changes, RowRules, make_rules
from trioserve.core.logprobs import token_logprobs
from trioserve.core.noise import gumbel, mix_seed, row_keys, token_hashes
from trioserve.ipc.messages import TokenLogprobs
from trioserve.sampling_params import SamplingParams

_WIDTHS = (64, 1024, 4096)
T = TypeVar("T")
FirstBest = Callable[[Tensor], tuple[Tensor, Tensor]]
# Below this, float32 would divide by zero; it is greedy long before.
_MIN_TEMPERATURE = 1e-20
# Rows scaled and cut at once, so that their copies stay in the cache of a core.
_CHUNK = 8


@dataclass(frozen=True)
class _Row:
    """What is known of a sequence from ``add`` on."""

    sampling: SamplingParams
    mixed_seed: int
    rules: RowRules | None  # None if nothing changes its logits


@dataclass(frozen=True)
class _Params:
    """Parameters of some rows as tensors, [n] each; for rows that are not greedy."""

    rows: Tensor  # int64, row in the batch
    mixed_seeds: Tensor  # int64
    temperature: Tensor  # float32
    log_min_p: Tensor  # float32; -inf is off
    top_k: Tensor  # int64; the row's width is off
    top_p: Tensor  # float64; inf is off
    needs_totals: bool  # some row has top_p and no top_k

    def select(self, which: Tensor) -> _Params:
        return _Params(
            self.rows[which],
            self.mixed_seeds[which],
            self.temperature[which],
            self.log_min_p[which],
            self.top_k[which],
            self.top_p[which],
            self.needs_totals,
        )


@dataclass(frozen=True)
class _Prepared:
    """Everything that stays the same while the batch has the same sequences."""

    ids: list[int]
    rules: BatchRules | None  # None if no row has any
    logprobs: list[int]  # rows that ask
    free: list[_Params]  # temperature only, in chunks
    cut: list[_Params]  # with any of min_p, top_k, top_p, in chunks


class Sampler:
    """Samples the rows of each step; only the executor's thread calls it.

    Args:
        vocab_size: width of the logits.
        eos_token_ids: masked before ``min_tokens`` unless the sequence says ``ignore_eos``.
        tokenizer_vocab_size: ids from here on are padding of the model and never sampled.
        best: finds the largest logit of each row and its lowest id, as ``candidates.first_best``.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        *,
        tokenizer_vocab_size: int | None = None,
        device: torch.device | str = "cpu",
        best: FirstBest = first_best,
    ) -> None:
        self._first_best = best
        self._vocab_size = vocab_size
        self._num_token_ids = min(vocab_size, tokenizer_vocab_size or vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = torch.device(device)
        # Rows are copied for sampling and filled up with -inf to whole blocks of ids.
        self._width = -(-vocab_size // BLOCK) * BLOCK
        hashes = token_hashes(self._width + self._width // BLOCK).to(self._device)
        self._hashes, self._block_hashes = hashes[: self._width], hashes[self._width :]
        self._scaled = torch.full((_CHUNK, self._width), -math.inf, device=self._device)
        self._scratch = torch.empty_like(self._scaled)
        self._rows: dict[int, _Row] = {}
        self._prepared = _Prepared([], None, [], [], [])

    def add(
        self,
        id: int,
        sampling: SamplingParams,
        seed: int,
        num_prompt_tokens: int,
        token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Make a sequence known, or known anew.

        Args:
            id: of the sequence.
            sampling: validated.
            seed: 64 bits, with sign.
            num_prompt_tokens: how many of ``token_ids`` are the prompt.
            token_ids: all tokens known so far, prompt and answer; for penalties and bad words.
            bad_words_ids: token sequences of which none is ever completed in the answer.
        """
        end_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_ids |= self._eos_token_ids
        self._rows[id] = _Row(
            sampling=sampling,
            mixed_seed=mix_seed(seed),
            rules=make_rules(sampling, num_prompt_tokens, token_ids, bad_words_ids, end_ids),
        )
        self._forget_prepared(id)

    def remove(self, id: int) -> None:
        """Forget a sequence; unknown ids are passed over."""
        self._rows.pop(id, None)
        self._forget_prepared(id)

    def sample(self, ids: list[int], positions: list[int], logits: Tensor) -> list[SampledRow]:
        """One token for each row, in order.

        Args:
            ids: sequences, each known by ``add``.
            positions: index in its sequence of the token to be sampled.
            logits: float32 [len(ids), vocab_size]; changed in place.

        A row whose best logit is NaN or infinite gets an ``error`` and fails alone; so does one
        whose rules leave no token, which is ``invalid``.
        """
        if not ids:
            return []
        if self._prepared.ids != ids:
            self._prepared = self._prepare(ids)
        prepared = self._prepared
        if self._num_token_ids < self._vocab_size:
            logits[:, self._num_token_ids :] = -math.inf
        rules = prepared.rules
        if rules is None:
            changes, (best, chosen) = None, self._first_best(logits)
        else:
            changes, best, chosen = _apply(rules, positions, logits, self._first_best)
        if prepared.free or prepared.cut:
            self._draw(prepared, positions, logits, best, chosen)
        tokens = chosen.tolist()
        if rules is not None:
            rules.note(tokens)
        logprobs: dict[int, TokenLogprobs] = {}
        if prepared.logprobs:
            if changes is not None:
                changes.restore(logits)
            logprobs = self._logprobs(prepared.logprobs, logits, tokens)
        results = [
            SampledRow(id, token_id, logprobs.get(index))
            for index, (id, token_id) in enumerate(zip(ids, tokens, strict=True))
        ]
        for index, value in enumerate(best.tolist()):
            if not math.isfinite(value):
                if changes is not None:
                    changes.restore(logits)
                results[index] = _failed(ids[index], positions[index], value, logits[index])
        return results

    def _logprobs(
        self, rows: list[int], logits: Tensor, tokens: list[int]
    ) -> dict[int, TokenLogprobs]:
        """What the rows that ask for log probabilities get, by row."""
        results: dict[int, TokenLogprobs] = {}
        for part in _in_chunks(rows):
            all_sampling = [self._rows[self._prepared.ids[index]].sampling for index in part]
            x = logits if len(part) == len(logits) else logits[part]
            found = token_logprobs(
                x,
                [tokens[index] for index in part],
                [sampling.logprobs or 0 for sampling in all_sampling],
                [sampling.logprob_token_ids for sampling in all_sampling],
            )
            results.update(zip(part, found, strict=True))
        return results

    # ----------------------------------------------------------------------- preparation

    def _forget_prepared(self, id: int) -> None:
        if id in self._prepared.ids:
            self._prepared = _Prepared([], None, [], [], [])

    def _prepare(self, ids: list[int]) -> _Prepared:
        rows = [(index, self._rows[id]) for index, id in enumerate(ids)]
        random = [(index, row) for index, row in rows if row.sampling.temperature > 0]
        with_rules = [(index, row.rules) for index, row in rows if row.rules is not None]
        return _Prepared(
            ids=list(ids),
            rules=BatchRules(with_rules, self._device) if with_rules else None,
            logprobs=[index for index, row in rows if row.sampling.wants_logprobs],
            free=self._chunks([item for item in random if not _is_cut(item[1].sampling)]),
            cut=self._chunks([item for item in random if _is_cut(item[1].sampling)]),
        )

    def _chunks(self, rows: list[tuple[int, _Row]]) -> list[_Params]:
        return [self._params(part) for part in _in_chunks(rows)]

    def _params(self, rows: list[tuple[int, _Row]]) -> _Params:
        all_sampling = [row.sampling for _, row in rows]
        device, off = self._device, self._width
        return _Params(
            rows=torch.tensor([index for index, _ in rows], device=device),
            mixed_seeds=torch.tensor([row.mixed_seed for _, row in rows], device=device),
            temperature=torch.tensor(
                [max(s.temperature, _MIN_TEMPERATURE) for s in all_sampling],
                dtype=torch.float32,
                device=device,
            ),
            log_min_p=torch.tensor(
                [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in all_sampling],
                dtype=torch.float32,
                device=device,
            ),
            top_k=torch.tensor(
                [min(s.top_k, off) if s.top_k > 0 else off for s in all_sampling], device=device
            ),
            top_p=torch.tensor(
                [s.top_p if s.top_p < 1 else math.inf for s in all_sampling],
                dtype=torch.float64,
                device=device,
            ),
            needs_totals=any(s.top_p < 1 and s.top_k < 1 for s in all_sampling),
        )

    # -------------------------------------------------------------------------- sampling

    def _draw(
        self,
        prepared: _Prepared,
        positions: list[int],
        logits: Tensor,
        best: Tensor,
        chosen: Tensor,
    ) -> None:
        """Put the tokens of all rows that are not greedy into ``chosen``."""
        where = torch.tensor(positions, device=self._device)
        for params in prepared.free:
            chosen[params.rows] = self._sample_free(params, where, logits, best)
        for params in prepared.cut:
            chosen[params.rows] = self._sample_cut(params, where, logits, best)

    def _sample_free(
        self, params: _Params, positions: Tensor, logits: Tensor, best: Tensor
    ) -> Tensor:
        """Tokens of rows without a cut, int64 [n]."""
        x = self._scale(params, logits, best)
        keys = row_keys(params.mixed_seeds, positions[params.rows])
        mass = block_masses(x, self._scratch[: len(x)])
        noise = gumbel(self._block_hashes.unsqueeze(0), keys)
        block = (mass.log_() + noise).argmax(-1)
        ids = block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=self._device)
        inner = in_blocks(x)[torch.arange(len(x), device=self._device), block]
        offset = (inner + gumbel(self._hashes[ids], keys)).argmax(-1)
        return block * BLOCK + offset

    def _sample_cut(
        self, params: _Params, positions: Tensor, logits: Tensor, best: Tensor
    ) -> Tensor:
        """Tokens of rows with a cut, int64 [n]."""
        x = self._scale(params, logits, best)
        keys = row_keys(params.mixed_seeds, positions[params.rows])
        totals = torch.ones_like(params.top_p)
        if params.needs_totals:
            totals = surviving_mass(x, params.log_min_p, self._scratch[: len(x)])
        tokens = torch.empty_like(params.rows)
        todo = torch.arange(len(params.rows), device=self._device)
        for width in (*_WIDTHS, self._width):
            if width > self._width:
                continue
            values, candidates = best_candidates(x, width)
            num_kept, known = count_survivors(
                values,
                totals,
                log_min_p=params.log_min_p,
                top_k=params.top_k,
                top_p=params.top_p,
                vocab_size=self._width,
            )
            noise = gumbel(self._hashes[candidates], keys)
            outside = torch.arange(width, device=self._device) >= num_kept.unsqueeze(-1)
            chosen = (values + noise).masked_fill_(outside, -math.inf).argmax(-1, keepdim=True)
            tokens[todo] = candidates.gather(-1, chosen).squeeze(-1)
            if known.all():
                break
            left = (~known).nonzero().squeeze(-1)
            todo, x, totals = todo[left], x[left], totals[left]
            params, keys = params.select(left), (keys[0][left], keys[1][left])
        return tokens

    def _scale(self, params: _Params, logits: Tensor, best: Tensor) -> Tensor:
        """Logits of a chunk relative to the best, by temperature; at most 0, [n, width].

        The subtraction comes first: then the quotient cannot overflow into a NaN. The result is
        valid until the next call.
        """
        scaled = self._scaled[: len(params.rows)]
        x = scaled[:, : self._vocab_size]
        torch.index_select(logits, 0, params.rows, out=x)
        x.sub_(best[params.rows].unsqueeze(-1)).div_(params.temperature.unsqueeze(-1))
        return scaled


def _in_chunks(rows: list[T]) -> list[list[T]]:
    return [rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK)]


def _apply(
    rules: BatchRules, positions: list[int], logits: Tensor, first_best: FirstBest
) -> tuple[Changes, Tensor, Tensor]:
    """Apply the rules; the best logit of each row then and its lowest id, as ``first_best``."""
    changes = rules.apply(positions, logits)
    best, ids = first_best(logits)
    if changes.ending:
        # Where nothing but an end may come, one may come before ``min_tokens``.
        empty = best[changes.ending] == -math.inf
        if empty.any():
            may_end = [
                i for i, none_left in zip(changes.ending, empty.tolist(), strict=True) if none_left
            ]
            changes.restore(logits)
            changes = rules.apply(positions, logits, may_end=may_end)
            best, ids = first_best(logits)
    changes.show_faults(best)
    return changes, best, ids


def _failed(id: int, position: int, best: float, raw: Tensor) -> SampledRow:
    """The failure of a row of which ``best`` is not finite; ``raw`` are the model's logits."""
    if best == -math.inf and raw.amax() > best:
        error = f"no token is left that may come as token {position} of the sequence: "
        error += "allowed_token_ids and bad_words exclude all"
        return SampledRow(id, 0, error=error, invalid=True)
    what = "only -inf" if best == -math.inf else f"{best}"
    return SampledRow(id, 0, error=f"the logits for token {position} of the sequence hold {what}")


def _is_cut(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
