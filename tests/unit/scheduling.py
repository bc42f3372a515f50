"""A scheduler of a small machine, and steps of it, for tests."""

from __future__ import annotations

from typing import Any

from trioserve.core.batch import SampledRow, ScheduledBatch
from trioserve.core.scheduler import Scheduler
from trioserve.ipc.messages import Delta, Work, WorkFailed
from trioserve.sampling_params import SamplingParams

EOS = 0


def make(**changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "eos_token_ids": [EOS],
    }
    return Scheduler(**{**settings, **changes})


def work(id: int, prompt: list[int] | int, *, priority: int = 0, salt: str = "", **s: Any) -> Work:
    """A prompt of a number stands for that many tokens, different from other ids' prompts."""
    if isinstance(prompt, int):
        prompt = [1000 * (id + 1) + i for i in range(prompt)]
    return Work(id, prompt, SamplingParams(**s), seed=0, priority=priority, cache_salt=salt)


def run(
    scheduler: Scheduler, batch: ScheduledBatch | None, token_id: int = 7
) -> tuple[list[Delta], list[WorkFailed]]:
    assert batch is not None
    sampled = [SampledRow(row.id, token_id) for row in batch.rows if row.sample]
    out = scheduler.update(batch, sampled)
    scheduler.check_integrity()
    return out


def step(scheduler: Scheduler, token_id: int = 7) -> tuple[ScheduledBatch, list[Delta]]:
    """One step, and its deltas but for those that only say that a prefill has begun."""
    batch = scheduler.schedule()
    scheduler.check_integrity()
    deltas, failed = run(scheduler, batch, token_id)
    assert batch is not None
    assert failed == []
    return batch, [delta for delta in deltas if delta.token_ids or delta.finish_reason]


def shares(batch: ScheduledBatch) -> dict[int, int]:
    return {row.id: row.num_tokens for row in batch.rows}


def steps_to_first_token(scheduler: Scheduler, id: int, limit: int = 500) -> int:
    for num_steps in range(1, limit):
        if any(delta.id == id for delta in step(scheduler)[1]):
            return num_steps
    raise AssertionError("no token")
