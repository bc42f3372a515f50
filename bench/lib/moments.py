"""Times to the first token in two moments that matter: a prefix that was seen, and after idling."""

from __future__ import annotations

import statistics
from typing import Any

import trio

from lib.answers import Exchange, Outcome
from lib.client import Target, Workload, exchange
from lib.stats import summarize_ms

BEFORE = 3  # requests right before the pause; the last of them is the one to compare with
Kinds = list[tuple[str, Exchange]]


async def shared_prefix(
    target: Target, workload: Workload, seed: str, num_pairs: int, timeout_s: float
) -> Kinds:
    """Pairs of requests, "first" and "second", one after another; the prompts of a pair begin
    alike, and as those of no other pair.

    Cancellation closes the connection.
    """
    found: Kinds = []
    for pair in range(num_pairs):
        for kind in ("first", "second"):
            shared = f"{seed}/{pair}"
            request = workload.request(target, f"{shared}/{kind}", shared)
            found.append((kind, await exchange(target, request, timeout_s)))
    return found


async def after_idle(
    target: Target, workload: Workload, seed: str, turns: int, idle_s: float, timeout_s: float
) -> Kinds:
    """In each turn requests right after another, the last of them "warm", then a pause in which
    nothing is asked, then one that is "idle".

    Cancellation closes the connection.
    """
    found: Kinds = []
    for turn in range(turns):
        for kind in (*[""] * (BEFORE - 1), "warm", "idle"):
            if kind == "idle":
                await trio.sleep(idle_s)
            request = workload.request(target, f"{seed}/{len(found)}/{turn}")
            found.append((kind, await exchange(target, request, timeout_s)))
    return found


def compared(kinds: list[str], outcomes: list[Outcome], pair: tuple[str, str]) -> dict[str, Any]:
    """Times to the first token of both kinds of ``pair``: their ratio, by how much the latter is
    slower, and how many of its tokens the server says it had already."""
    good = [(kind, one) for kind, one in zip(kinds, outcomes, strict=True) if one.failure is None]
    times = [summarize_ms(one.ttft_s for kind, one in good if kind == wanted) for wanted in pair]
    result: dict[str, Any] = {
        f"{kind}_ttft_ms": found for kind, found in zip(pair, times, strict=True)
    }
    if times[0] is not None and times[1] is not None:
        result["ratio"] = round(times[1]["median"] / times[0]["median"], 4)
        result["slower_ms"] = round(times[1]["median"] - times[0]["median"], 3)
        cached = [one.cached_tokens for kind, one in good if kind == pair[1]]
        result["cached_tokens"] = statistics.median(cached)
    return result
