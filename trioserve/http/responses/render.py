"""Response objects and the events that tell how one comes about; pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import orjson

from trioserve.engine.api import TextDelta, TokenLogprob, Usage
from trioserve.errors import RequestAborted, RequestCut, RequestError
from trioserve.http.generation import ChoiceSoFar
from trioserve.http.render import array, finite, in_batches
from trioserve.http.responses.schema import ResponsesRequest
from trioserve.sampling_params import SamplingParams

DELTA = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":%d,"delta":%b,"logprobs":%b,%b'
    b"\n\n"
)
"""There is one for each token or so, and making a dictionary of it costs five times as much."""


class ResponseCancelled(RequestError):
    """A background response was cancelled by a client. Ends its work."""

    def __init__(self) -> None:
        super().__init__("the response was cancelled", code="cancelled")


@attrs.frozen(kw_only=True)
class Head:
    """What stays the same from a response's first event to its last.

    ``stem`` is what the ids of the response and its message are made from; it is not guessed.
    """

    stem: str
    created: int
    model: str
    body: ResponsesRequest
    sampling: SamplingParams
    stored: bool

    @property
    def id(self) -> str:
        """The response's id."""
        return f"resp_{self.stem}"

    @property
    def message_id(self) -> str:
        """The id of its only item."""
        return f"msg_{self.stem}"


class Draft:
    """One response while it comes about. Written by the task that answers."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def add(self, delta: TextDelta) -> None:
        """Take in a delta."""
        self.text.append(delta.text)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason

    def take(self, choice: ChoiceSoFar) -> None:
        """Take in a whole answer."""
        self.text, self.logprobs = choice.text, choice.logprobs
        self.finish_reason = choice.finish_reason

    def begun(self, status: str) -> dict[str, Any]:
        """The response before its end: ``status`` is "queued" or "in_progress"."""
        return self._object(status, [])

    def finished(self, usage: Usage) -> dict[str, Any]:
        """The response once all of the answer is there."""
        whole = self.finish_reason != "length"
        status = "completed" if whole else "incomplete"
        response = self._object(status, [self.item(status)])
        response["usage"] = usage_object(usage)
        if whole:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def failed(self, error: RequestError) -> dict[str, Any]:
        """The response that ended with an error, with what there was of its answer."""
        stopped = isinstance(error, RequestAborted | RequestCut | ResponseCancelled)
        response = self._object(
            "cancelled" if stopped else "failed",
            [self.item("incomplete")] if any(self.text) else [],
        )
        if not isinstance(error, ResponseCancelled):
            response["error"] = {
                # The type of the official clients knows no other code for what goes wrong here.
                "code": "server_error",
                "message": error.message,
                "type": error.type,
                "param": None,
            }
        return response

    def item(self, status: str) -> dict[str, Any]:
        """The message so far."""
        return {
            "id": self.head.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
        }

    def part(self) -> dict[str, Any]:
        """The message's only part so far."""
        return {
            "type": "output_text",
            "text": "".join(self.text),
            "annotations": [],
            "logprobs": logprob_objects(self.logprobs),
        }

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head, body, sampling = self.head, self.head.body, self.head.sampling
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": body.background,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": head.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": head.stored,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice,
            "tools": [],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "auto" if body.truncate else "disabled",
            "usage": None,
            "user": body.user,
        }


class ResponsesRenderer:
    """The events of one response, each with its number.

    Args:
        draft: what to show; deltas are added to it here.
        on_end: given the response object as soon as it is final.
    """

    def __init__(self, draft: Draft, on_end: Callable[[dict[str, Any]], None]) -> None:
        self._draft = draft
        self._on_end = on_end
        self._number = 0
        self._item = {"item_id": draft.head.message_id, "output_index": 0, "content_index": 0}
        self._delta_end = orjson.dumps(self._item)[1:]

    def announcement(self) -> bytes:
        """For a background response, sent before its work begins; ``opening`` follows."""
        queued = self._draft.begun("queued")
        return self._event("response.created", response=queued) + self._event(
            "response.queued", response=queued
        )

    def opening(self) -> bytes:
        """The response, its message and the message's part, all still empty."""
        begun = self._draft.begun("in_progress")
        created = b"" if self._number else self._event("response.created", response=begun)
        return (
            created
            + self._event("response.in_progress", response=begun)
            + self._event(
                "response.output_item.added", output_index=0, item=self._draft.item("in_progress")
            )
            + self._event("response.content_part.added", part=empty_part(), **self._item)
        )

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """One event; none if nothing is to be shown."""
        self._draft.add(delta)
        if not delta.text and not delta.logprobs:
            return b""
        number, self._number = self._number, self._number + 1
        logprobs = orjson.dumps(logprob_objects(delta.logprobs)) if delta.logprobs else b"[]"
        return DELTA % (number, orjson.dumps(delta.text), logprobs, self._delta_end)

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """All that is done, from the inside out, and the final response."""
        final = self._draft.finished(usage())
        self._on_end(final)
        item = final["output"][0]
        part = item["content"][0]
        return (
            self._event(
                "response.output_text.done",
                text=part["text"],
                logprobs=part["logprobs"],
                **self._item,
            )
            + self._event("response.content_part.done", part=part, **self._item)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{final['status']}", response=final)
        )

    def failure(self, error: RequestError) -> bytes:
        """The response with the error; there is no event of its own for one that was cancelled."""
        final = self._draft.failed(error)
        self._on_end(final)
        return self._event("response.failed", response=final)

    def _event(self, name: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        body = orjson.dumps({"type": name, "sequence_number": number, **data})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


def empty_part() -> dict[str, Any]:
    """The part of a message that has no text yet."""
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def usage_object(usage: Usage) -> dict[str, Any]:
    """The API's ``usage``. Nothing is told apart as reasoning."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def logprob_objects(tokens: list[TokenLogprob]) -> orjson.Fragment:
    """Tokens with their log probabilities, the alternatives, and what was wanted beside them."""
    return array(
        [_token(token) | {"top_logprobs": _others(token)} for token in batch]
        for batch in in_batches(tokens)
    )


def _others(token: TokenLogprob) -> list[dict[str, Any]]:
    shown = {other.token_id for other in token.top}
    wanted = [other for other in token.wanted if other.token_id not in shown]
    return [_token(other) for other in (*token.top, *wanted)]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "bytes": list(token.token_bytes),
        "logprob": finite(token.logprob),
    }
