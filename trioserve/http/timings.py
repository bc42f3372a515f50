"""What took how long, as an answer may tell it."""

from __future__ import annotations

from typing import Any

from trioserve.engine.api import RequestStream

NAMES = (
    "queue_time_ms",
    "time_to_first_token_ms",
    "generation_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)


def timings_object(streams: list[RequestStream]) -> dict[str, Any]:
    """Times of one request in milliseconds; null for what has not happened.

    Of several answers the first token of any counts as the first, the last of all as the last.
    ``tokens_per_second`` is the rate after the first token, of all answers together.
    """
    begin = min(stream.timings.submitted_s for stream in streams)
    started = [t.started_s for t in (s.timings for s in streams) if t.started_s is not None]
    spans = [
        (t.first_token_s, t.last_token_s)
        for t in (stream.timings for stream in streams)
        if t.first_token_s is not None and t.last_token_s is not None
    ]
    shown: dict[str, Any] = dict.fromkeys(NAMES)
    if started:
        shown["queue_time_ms"] = _ms(min(started) - begin)
    if not spans:
        return shown
    first_s, last_s = min(first for first, _ in spans), max(last for _, last in spans)
    shown["time_to_first_token_ms"] = _ms(first_s - begin)
    shown["generation_time_ms"] = _ms(last_s - first_s)
    num_gaps = sum(stream.usage.completion_tokens for stream in streams) - len(spans)
    if num_gaps > 0 and last_s > first_s:
        shown["mean_itl_ms"] = _ms(sum(last - first for first, last in spans) / num_gaps)
        shown["tokens_per_second"] = round(num_gaps / (last_s - first_s), 3)
    return shown


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
