"""An executor without a model: it simulates the KV cache by content and checks every read.

A slot of the cache holds what was written there: position and digest of all tokens up to it. A row
writes its positions and then reads all positions before them, as attention does. Wrong sharing,
reuse of a block that is still needed, a chunk off by one or a forgotten recompute all show as a
slot with other content than the reader's own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trioserve.core.batch import SampledRow, ScheduledBatch
from trioserve.ipc.messages import TokenLogprobs, Work

EOS = 0
VOCAB = 7


def extend(prefix: int, token_id: int) -> int:
    """Digest of a prefix and one more token."""
    return hash((prefix, token_id))


def next_token(prefix: int) -> int:
    """What the fake model says after a prefix."""
    return prefix // 3 % VOCAB


def score(prefix: int, token_id: int) -> TokenLogprobs:
    """What the fake model says of a token after a prefix."""
    return TokenLogprobs(token_id, -float(prefix % 997), 1, [])


def scores_alone(work: Work) -> list[TokenLogprobs | None]:
    """Scores of a prompt, the first token's None."""
    prefix = hash(work.cache_salt)
    scores: list[TokenLogprobs | None] = []
    for token_id in work.prompt_token_ids:
        scores.append(score(prefix, token_id))
        prefix = extend(prefix, token_id)
    return [None, *scores[1:]]


def run_alone(work: Work, max_model_len: int, eos: frozenset[int]) -> tuple[list[int], str]:
    """Output and finish reason of a sequence that has the machine to itself."""
    prefix = hash(work.cache_salt)
    for token_id in work.prompt_token_ids:
        prefix = extend(prefix, token_id)
    output: list[int] = []
    while True:
        output.append(next_token(prefix))
        prefix = extend(prefix, output[-1])
        if len(output) >= work.sampling.min_tokens:
            if output[-1] in eos and not work.sampling.ignore_eos:
                return output, "stop"
            if output[-1] in work.sampling.stop_token_ids:
                return output, "stop"
        if len(work.prompt_token_ids) + len(output) >= max_model_len:
            return output, "length"
        if len(output) == work.sampling.max_tokens:
            return output, "length"


@dataclass
class _State:
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    prefixes: list[int]  # [i] covers tokens [0, i)
    scored: bool = False

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prefixes.append(extend(self.prefixes[-1], token_id))


@dataclass
class FakeExecutor:
    """Keeps state between batches as a rank does: only what the batches say."""

    block_size: int
    salts: dict[int, str] = field(default_factory=dict)
    states: dict[int, _State] = field(default_factory=dict)
    slots: dict[tuple[int, int], object] = field(default_factory=dict)
    num_chunks: int = 0
    num_mixed: int = 0
    num_hits: int = 0
    num_recomputed: int = 0
    num_scored: int = 0

    def execute(self, batch: ScheduledBatch, failing: frozenset[int]) -> list[SampledRow]:
        for id in batch.removed_ids:
            del self.states[id]
        for new in batch.new:
            assert new.id not in self.states
            state = _State(
                [], new.num_prompt_tokens, list(new.block_ids), [hash(self.salts[new.id])]
            )
            state.scored = new.prompt_logprobs is not None
            assert not (state.scored and new.num_computed_tokens)
            for token_id in new.token_ids:
                state.append(token_id)
            self.states[new.id] = state
            self.num_hits += new.num_computed_tokens > 0
            self.num_recomputed += len(new.token_ids) > new.num_prompt_tokens
            self._read(state, new.num_computed_tokens)
        kinds = [row.num_tokens == 1 and row.sample for row in batch.rows]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        self.num_mixed += any(kinds) and not all(kinds)
        results = []
        for row in batch.rows:
            state = self.states[row.id]
            state.block_ids += row.new_block_ids
            end = row.start + row.num_tokens
            assert row.num_tokens > 0
            assert end <= len(state.token_ids)
            assert row.sample == (end == len(state.token_ids))
            self.num_chunks += not row.sample
            for position in range(row.start, end):
                content = (
                    ("poison", position) if row.id in failing else self._content(state, position)
                )
                self.slots[self._slot(state, position)] = content
            if row.id in failing:
                results.append(SampledRow(row.id, 0, error="made to fail"))
                continue
            self._read(state, end)
            scores = None
            if state.scored:
                last = min(end + 1, state.num_prompt_tokens)
                scores = [
                    score(state.prefixes[i], state.token_ids[i]) for i in range(row.start + 1, last)
                ]
                self.num_scored += len(scores)
            if row.sample:
                token_id = next_token(state.prefixes[-1])
                state.append(token_id)
                results.append(SampledRow(row.id, token_id, prompt_logprobs=scores))
            elif state.scored:
                results.append(SampledRow(row.id, 0, prompt_logprobs=scores))
        return results

    def _slot(self, state: _State, position: int) -> tuple[int, int]:
        return state.block_ids[position // self.block_size], position % self.block_size

    def _content(self, state: _State, position: int) -> object:
        return position, state.prefixes[position + 1]

    def _read(self, state: _State, end: int) -> None:
        for position in range(end):
            found = self.slots.get(self._slot(state, position))
            assert found == self._content(state, position), f"position {position} reads {found}"
