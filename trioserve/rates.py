"""A line of rates while requests run, as operators know it from other servers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.ipc.messages import StepStats

logger = logging.getLogger("trioserve.rates")


async def log_rates(engine: Engine, interval_s: float) -> None:
    """Log every ``interval_s`` seconds in which tokens were computed; runs until cancelled."""
    if not interval_s:
        await trio.sleep_forever()
    before, then = engine.status.stats, time.monotonic()
    while True:
        await trio.sleep(interval_s)
        after, now = engine.status.stats, time.monotonic()
        if after is not None and (line := describe_rates(before, after, now - then)):
            logger.info("%s", line)
        before, then = after, now


def describe_rates(before: StepStats | None, after: StepStats, seconds: float) -> str | None:
    """One line of rates between two readings; None if nothing was computed.

    Totals that went down belong to another incarnation and count from zero.
    """
    if before is None or before.output_tokens > after.output_tokens:
        prompt, output, hits, queries = (
            after.prompt_tokens,
            after.output_tokens,
            after.prefix_hits,
            after.prefix_queries,
        )
    else:
        prompt = after.prompt_tokens - before.prompt_tokens
        output = after.output_tokens - before.output_tokens
        hits = after.prefix_hits - before.prefix_hits
        queries = after.prefix_queries - before.prefix_queries
    if not prompt and not output:
        return None
    return (
        f"prompt {prompt / seconds:.1f} tokens/s, output {output / seconds:.1f} tokens/s, "
        f"running {after.num_running}, waiting {after.num_waiting}, "
        f"KV cache {after.num_blocks_used / after.num_blocks:.0%}, "
        f"prefix hits {hits / queries if queries else 0.0:.0%}"
    )
