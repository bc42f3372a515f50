"""A device that runs no model: made-up tokens, for tests of everything around the model.

The next token is a hash of the tokens before it, so answers do not depend on chunking, batch
mates, preemption or prefix hits, exactly as with a real model in exact arithmetic. Imports nothing
heavy: a worker on it starts in a fraction of a second.
"""

from __future__ import annotations

import time
from typing import Any

from trioserve.config.schema import Config
from trioserve.core.batch import (
    MemoryProfile,
    NewSequence,
    SampledRow,
    ScheduledBatch,
    ScheduledRow,
)
from trioserve.core.stages import StageReporter
from trioserve.ipc.messages import TokenLogprobs
from trioserve.models.spec import ResolvedModel

_GIB = 1 << 30
_MASK = (1 << 64) - 1


def mix(state: int, token_id: int) -> int:
    """Fold one token into a 64-bit prefix hash (the finalizer of SplitMix64)."""
    x = (state ^ (token_id + 0x9E3779B97F4A7C15)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class _State:
    """Tokens of one sequence and the hash of each prefix that has been computed."""

    def __init__(self, new: NewSequence) -> None:
        self.token_ids = list(new.token_ids)
        self.logprobs = new.sampling.logprobs
        self.prompt_logprobs = new.prompt_logprobs
        self.num_prompt_tokens = new.num_prompt_tokens
        self.hashes: list[int] = [0]

    def hash_to(self, length: int) -> int:
        """Hash of the first ``length`` tokens."""
        while len(self.hashes) <= length:
            self.hashes.append(mix(self.hashes[-1], self.token_ids[len(self.hashes) - 1]))
        return self.hashes[length]

    def scores(self, row: ScheduledRow) -> list[TokenLogprobs] | None:
        """Of the prompt's tokens after each position of ``row``, if they are wanted."""
        if self.prompt_logprobs is None:
            return None
        end = min(row.start + row.num_tokens + 1, self.num_prompt_tokens)
        return [_made_up(id, self.prompt_logprobs) for id in self.token_ids[row.start + 1 : end]]


def _made_up(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)] if num_top else [])


class SimulatedExecutor:
    """An Executor without tensors. Owns the made-up state of the sequences in the batch."""

    kv_bytes_per_token = 1024
    num_parameters = 0
    weight_bytes = 0

    def __init__(self, model: ResolvedModel, config: Config) -> None:
        self.vocab_size = model.spec.vocab_size
        self._num_token_ids = min(self.vocab_size, model.num_token_ids or self.vocab_size)
        self._eos = set(model.spec.eos_token_ids)
        self._architecture = model.spec.architecture
        self._config = config
        self._states: dict[int, _State] = {}

    def load(self, report: StageReporter) -> None:
        """Stages device, distributed and weights, as long as ``device.simulated_load_s`` says."""
        with report.stage("device", "simulated"):
            pass
        with report.stage("distributed", "one rank"):
            pass
        with report.stage("weights") as stage:
            ends = time.monotonic() + self._config.device.simulated_load_s
            while (left := ends - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
                stage.progress(1 - max(0.0, left) / self._config.device.simulated_load_s)

    def profile(self, report: StageReporter) -> MemoryProfile:
        """Stage profile: made-up memory of 1 GiB."""
        with report.stage("profile"):
            return MemoryProfile(
                total_bytes=2 * _GIB, free_bytes=_GIB, weight_bytes=0, activation_bytes=0
            )

    def init_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Nothing to allocate."""

    def warm_up(self, report: StageReporter) -> None:
        """Stages warm-up and capture, at once."""
        with report.stage("warm-up"):
            pass
        with report.stage("capture", "nothing to capture"):
            pass

    def execute(self, batch: ScheduledBatch) -> list[ScheduledRow]:
        """Take the step's deltas in and spend ``device.simulated_step_s``."""
        for sequence_id in batch.removed_ids:
            self._states.pop(sequence_id, None)
        for new in batch.new:
            self._states[new.id] = _State(new)
        if self._config.device.simulated_step_s:
            time.sleep(self._config.device.simulated_step_s)
        states = self._states
        return [
            row for row in batch.rows if row.sample or states[row.id].prompt_logprobs is not None
        ]

    def sample(self, handle: list[ScheduledRow], masks: Any = None) -> list[SampledRow]:
        """One token per row with ``sample``, never an end-of-sequence token."""
        return [self._sample(row) for row in handle]

    def _sample(self, row: ScheduledRow) -> SampledRow:
        state = self._states[row.id]
        scores = state.scores(row)
        if not row.sample:
            return SampledRow(row.id, 0, prompt_logprobs=scores)
        token_id = state.hash_to(row.start + row.num_tokens) % self._num_token_ids
        while token_id in self._eos:
            token_id = (token_id + 1) % self._num_token_ids
        state.token_ids.append(token_id)
        logprobs = None
        if state.logprobs is not None:
            logprobs = _made_up(token_id, state.logprobs)
        return SampledRow(row.id, token_id, logprobs, prompt_logprobs=scores)

    def info(self) -> dict[str, Any]:
        """For ReadyInfo."""
        return {
            "architecture": self._architecture,
            "weights": "none",
            "dtype": "none",
            "device": "simulated",
            "threads": 1,
            "attention": "none",
        }
