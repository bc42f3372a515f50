"""What one step computes: the only thing that passes from the Scheduler to the Executor.

Plain values without a reference to a Sequence, so that a batch can be sent to another rank. Each
rank keeps the state of its sequences between steps and applies these deltas to it.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from trioserve.core.stages import StageReporter
from trioserve.ipc.messages import TokenLogprobs
from trioserve.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that enters the batch, fresh or back from preemption.

    ``token_ids`` holds all tokens known so far: the prompt and, after a preemption, the answer's
    beginning. ``[0, num_computed_tokens)`` are in the KV cache already. ``bad_words_ids`` are token
    sequences of which none is ever completed in the answer: ``Work.bad_words_ids`` unchanged.
    ``prompt_logprobs`` is how many of the best are wanted beside each token of the prompt, or None
    where the prompt is not scored, or has been already; such a sequence starts at token 0.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    seed: int
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None


class ScheduledRow(msgspec.Struct, frozen=True):
    """One sequence's share of the step: ``[start, start + num_tokens)`` of its tokens.

    ``new_block_ids`` are appended to the sequence's block table first. With ``sample`` the last
    token's logits give the next token (the row reaches the end of what is known).
    """

    id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    sample: bool


class ScheduledBatch(msgspec.Struct, frozen=True):
    """A step. Apply in this order: forget ``removed_ids``, add ``new``, compute ``rows``.

    Rows that decode (one token, known from the last step) come before rows that prefill.
    """

    step: int
    removed_ids: list[int]
    new: list[NewSequence]
    rows: list[ScheduledRow]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)


class SampledRow(msgspec.Struct, frozen=True):
    """The outcome for one row with ``sample``: a token, or an error that fails it alone.

    ``invalid`` says that the request was at fault and not the model: what was computed is sound,
    and the failure's code is "invalid".

    Where the prompt is scored there is one for any row, ``sample`` or not: ``prompt_logprobs`` are
    those of the prompt's tokens after each position of the row, ``token_id`` counts with ``sample``
    only.
    """

    id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    invalid: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None


class MemoryProfile(msgspec.Struct, frozen=True):
    """Memory as measured after a step of the largest size, in bytes."""

    total_bytes: int
    free_bytes: int  # that this process could still take
    weight_bytes: int
    activation_bytes: int  # peak beyond weights in that step


class Executor(Protocol):
    """Runs batches: the model on a device, or a simulation of it. Used by EngineCore alone.

    Called in this order: ``load``, ``profile``, ``init_kv_cache``, ``warm_up``, then ``execute``
    and ``sample`` in turns. Each of the first four reports its own stages.
    """

    kv_bytes_per_token: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int

    def load(self, report: StageReporter) -> None:
        """Stages device, distributed, weights. Raises ModelError for files at fault."""

    def profile(self, report: StageReporter) -> MemoryProfile:
        """Stage profile: run the largest step once without a cache and measure."""

    def init_kv_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache: ``num_blocks`` blocks over all layers."""

    def warm_up(self, report: StageReporter) -> None:
        """Stages warm-up and capture: run each kind of step once."""

    def execute(self, batch: ScheduledBatch) -> Any:
        """Launch the forward pass; the handle goes to ``sample``."""

    def sample(self, handle: Any, masks: Any = None) -> list[SampledRow]:
        """Sample every row with ``sample``, in row order."""

    def info(self) -> dict[str, Any]:
        """For ReadyInfo: architecture, weights, dtype, device, threads, attention."""
