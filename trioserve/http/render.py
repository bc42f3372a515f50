"""What the answers of OpenAI's two generation routes have in common; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import attrs
import orjson

from trioserve.engine.api import TextDelta, TokenLogprob, Usage
from trioserve.errors import RequestError
from trioserve.http.errors import error_object
from trioserve.http.schema import Shape
from trioserve.http.sse import encode_event

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
AT_ONCE = 256  # tokens whose log probabilities are made into JSON at once
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
Timings = Callable[[], dict[str, Any]]


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log probability as JSON can carry it."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def in_batches(tokens: list[T]) -> Iterator[list[T]]:
    """``tokens`` in pieces small enough to be made into JSON at once."""
    return (tokens[start : start + AT_ONCE] for start in range(0, len(tokens), AT_ONCE))


def array(pieces: Iterable[list[Any]]) -> orjson.Fragment:
    """The items of all ``pieces`` as one array of JSON. They are written piece by piece: as objects
    those of a large answer take five times the memory of their JSON."""
    return joined(orjson.dumps(piece)[1:-1] for piece in pieces)


def joined(items: Iterable[bytes]) -> orjson.Fragment:
    """One array of JSON made of the insides of several, of which none is empty."""
    return orjson.Fragment(b"[" + b",".join(items) + b"]")


def prompt_logprobs_object(
    entries: list[TokenLogprob | None] | None, num_top: int | None
) -> orjson.Fragment | None:
    """For each token of a prompt ``{token id: {logprob, rank, decoded_token}}``, as vLLM has it:
    of the token itself and the best ``num_top``; null for the first. None if not asked for."""
    if entries is None or num_top is None:
        return None
    return array(
        [None if entry is None else _ranked(entry, num_top) for entry in batch]
        for batch in in_batches(entries)
    )


def _ranked(entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    ranks = {token.token_id: index + 1 for index, token in enumerate(entry.top)}
    return {
        str(token.token_id): {
            "logprob": finite(token.logprob),
            "rank": token.rank or ranks.get(token.token_id),
            "decoded_token": token.token,
        }
        for token in (entry, *entry.top[:num_top])
    }


@attrs.frozen(kw_only=True)
class Head:
    """What every chunk of one answer repeats, and what of it is shown.

    ``timings`` tells what took how long so far.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    num_prompt_tokens: int
    shape: Shape
    timings: Timings


class OpenAIRenderer:
    """Chunks of one answer, and the answer in one piece.

    Args:
        head: what all chunks repeat.
        num_choices: of all prompts.
    """

    whole_kind: str  # ``object`` of an answer in one piece
    chunk_kind: str

    def __init__(self, head: Head, num_choices: int) -> None:
        self._head = head
        self._shape = head.shape
        self._num_running = num_choices
        self._num_output_tokens = 0
        self._plain = head.shape.logprobs is None and not head.shape.token_ids
        repeated = orjson.dumps(self._base(self.chunk_kind))
        self._start = b"data: " + repeated[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if head.shape.usage else b"]}\n\n"

    def _delta(self, delta: TextDelta) -> dict[str, Any]:
        """Take note of a delta; what its chunk has beside its choice."""
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return {}
        self._num_running -= 1
        if self._num_running or self._shape.usage or not self._shape.timings:
            return {}
        return {"metrics": self._head.timings()}

    def _shows(self, delta: TextDelta) -> bool:
        return bool(
            delta.text
            or delta.logprobs
            or delta.finish_reason is not None
            or (self._shape.token_ids and delta.token_ids)
        )

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """The usage in a chunk without choices, if it was asked for, and the mark of success."""
        if not self._shape.usage:
            return DONE
        more: dict[str, Any] = {"usage": usage_object(usage())}
        if self._shape.timings:
            more["metrics"] = self._head.timings()
        return self._start + b"]," + orjson.dumps(more)[1:] + b"\n\n" + DONE

    def failure(self, error: RequestError) -> bytes:
        """An event with the error; no mark follows it."""
        return encode_event(error_object(error))

    def _chunk(self, choice: bytes, more: dict[str, Any] | None = None) -> bytes:
        if not more and not self._shape.running_usage:
            return self._start + choice + self._end
        more = dict(more or {})
        if self._shape.running_usage:
            prompt, output = self._head.num_prompt_tokens, self._num_output_tokens
            more["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
            }
        elif self._shape.usage:
            more["usage"] = None
        return self._start + choice + b"]," + orjson.dumps(more)[1:] + b"\n\n"

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._base(self.whole_kind) | {
            "choices": choices,
            "usage": usage_object(usage),
            "service_tier": None,
            "kv_transfer_params": None,
            "metrics": self._head.timings() if self._shape.timings else None,
        }

    def _base(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
