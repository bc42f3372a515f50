"""What came over a connection, read after the load is over: HTTP, events, tokens, times.

While requests run the client only notes when which bytes came; here they are understood.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import Any

import h11
from attrs import define, field, frozen

from lib.stats import summarize_ms

LINE_END = re.compile(rb"\r\n|\n|\r")


@define
class Exchange:
    """One request and what was received. Times are ``time.perf_counter`` seconds.

    ``pieces`` ends with ``b""`` if the server closed the connection. ``failure`` is what the
    client saw go wrong, if anything.
    """

    target: str
    sent_at: float = 0.0
    lag_s: float = 0.0  # sent this much later than planned
    pieces: list[tuple[float, bytes]] = field(factory=list)
    failure: str | None = None


@define
class Outcome:
    """What an exchange meant."""

    sent_at: float
    ended_at: float | None = None  # the last byte
    chunk_times: list[float] = field(factory=list)  # of chunks that show text
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None

    @property
    def output_tokens(self) -> int:
        """By the server's own count, else one for each chunk."""
        counted = self.completion_tokens
        return len(self.chunk_times) if counted is None else counted

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return self.chunk_times[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        """From sending to the last byte."""
        assert self.ended_at is not None
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, None with fewer than two tokens."""
        if self.output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring chunks."""
        times = self.chunk_times
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@frozen
class Response:
    """An HTTP response. ``body`` keeps the time of each part; ``flaw`` is None for a whole one."""

    status: int
    content_type: str
    body: list[tuple[float, bytes]]
    flaw: str | None

    @property
    def whole_body(self) -> bytes:
        return b"".join(data for _, data in self.body)


def read_response(exchange: Exchange) -> Response | None:
    """The HTTP response in an exchange, None where there is none."""
    connection = h11.Connection(h11.CLIENT)
    method, _, path = exchange.target.partition(" ")
    headers = [("Host", "bench"), ("Connection", "close")]  # nothing may follow the response
    connection.send(h11.Request(method=method, target=path, headers=headers))
    connection.send(h11.EndOfMessage())
    head: h11.Response | None = None
    body: list[tuple[float, bytes]] = []
    flaw: str | None = "cut short"
    try:
        for at, piece in exchange.pieces:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body.append((at, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    flaw = None
                elif isinstance(event, h11.ConnectionClosed):
                    break
    except h11.RemoteProtocolError:
        flaw = "cut short" if flaw and not piece else "broken HTTP"
    if head is None:
        return None
    content_type = dict(head.headers).get(b"content-type", b"")
    return Response(head.status_code, content_type.decode("latin-1"), body, flaw)


class SseParser:
    """Server-sent events out of bytes cut anywhere; gives the data of each event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that ``piece`` completes."""
        text = self._rest + piece
        # A carriage return at the very end may be half of a line end.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = LINE_END.split(text.removesuffix(b"\r"))
        self._rest = rest + held
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events


def read_answer(exchange: Exchange) -> Outcome:
    """The meaning of an exchange about a streamed completion, of text or chat."""
    outcome = Outcome(exchange.sent_at)
    received = [at for at, piece in exchange.pieces if piece]
    outcome.ended_at = received[-1] if received else None
    response = read_response(exchange)
    if response is not None and response.status != 200:
        outcome.failure = f"HTTP {response.status}{_code(response.whole_body)}"
        return outcome
    if response is not None:
        parser = SseParser()
        for at, data in response.body:
            for event in parser.feed(data):
                _take(event, at, outcome)
    outcome.failure = exchange.failure or outcome.failure or _flaw(response, outcome)
    return outcome


def _flaw(response: Response | None, outcome: Outcome) -> str | None:
    """Why an answer that no error ended is none."""
    if response is None:
        return "no HTTP response"
    if not response.content_type.startswith("text/event-stream"):
        return f"not an event stream: {response.content_type or 'no content type'}"
    return response.flaw or (None if outcome.finish_reason else "no finish_reason")


def _take(event: bytes, at: float, outcome: Outcome) -> None:
    """Enter one event."""
    if event == b"[DONE]":
        return
    try:
        chunk = json.loads(event)
    except ValueError:
        outcome.failure = "an event that is not JSON"
        return
    if chunk.get("error"):
        outcome.failure = f"error event{_code(event)}"
        return
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        # An answer that is all halves of characters shows itself by its end alone.
        if text or (outcome.finish_reason and not outcome.chunk_times):
            outcome.chunk_times.append(at)
    if usage := chunk.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens") or 0


def _code(body: bytes) -> str:
    """The code or the type of OpenAI's error object, after a blank."""
    try:
        error = json.loads(body)["error"]
        return f" {error.get('code') or error.get('type')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of one run. Tokens and times are of the answers that did not fail.

    Output tokens per second are counted from the first send to the last byte of any answer.
    """
    good = [outcome for outcome in outcomes if outcome.failure is None]
    ends = [outcome.ended_at for outcome in outcomes if outcome.ended_at is not None]
    duration_s = max(ends) - min(outcome.sent_at for outcome in outcomes) if ends else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in good)
    num_chunks = sum(len(outcome.chunk_times) for outcome in good)
    by_usage = all(outcome.completion_tokens is not None for outcome in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "failures": dict(Counter(o.failure for o in outcomes if o.failure)),
        "finish_reasons": dict(Counter(outcome.finish_reason for outcome in good)),
        "tokens_counted_by": "usage" if by_usage else "chunks",
        "prompt_tokens": sum(outcome.prompt_tokens or 0 for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output_tokens,
        "tokens_per_chunk": round(output_tokens / num_chunks, 3) if num_chunks else None,
        "duration_s": round(duration_s, 4),
        "output_tokens_per_s": round(output_tokens / duration_s, 2) if duration_s else None,
        "requests_per_s": round(len(good) / duration_s, 3) if duration_s else None,
        "ttft_ms": summarize_ms(outcome.ttft_s for outcome in good),
        "itl_ms": summarize_ms(gap for outcome in good for gap in outcome.gaps_s),
        "tpot_ms": summarize_ms(o.tpot_s for o in good if o.tpot_s is not None),
        "e2e_ms": summarize_ms(outcome.e2e_s for outcome in good),
    }
