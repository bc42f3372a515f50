"""``message`` objects and the events of a streamed one; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import orjson

from trioserve.engine.api import TextDelta, Usage
from trioserve.errors import RequestError
from trioserve.http.messages.errors import error_event

DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%b}}\n\n'
)


@attrs.frozen
class Head:
    """What is known before the answer."""

    id: str
    model: str
    request_id: str


class MessagesRenderer:
    """A message, whole and in events.

    Args:
        head: what is known before the answer.
        usage: that of the request so far; the first event tells the prompt's.
    """

    def __init__(self, head: Head, usage: Callable[[], Usage]) -> None:
        self._head = head
        self._usage = usage
        self._finish: dict[str, Any] = {}

    def opening(self) -> bytes:
        """An empty message, its empty block, and the ping that clients are used to."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, self._usage())
        return (
            _event("message_start", message=message)
            + _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            + _event("ping")
        )

    def delta(self, choice: int, delta: TextDelta) -> bytes:
        """One event; none if there is no text."""
        if delta.finish_reason is not None:
            self._finish = stop_fields(delta.finish_reason, delta.stop_reason)
        if not delta.text:
            return b""
        return DELTA % orjson.dumps(delta.text)

    def closing(self, usage: Callable[[], Usage]) -> bytes:
        """The end of the block, why it ended with the usage, the end of the message."""
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=self._finish, usage=usage_object(usage()))
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        """An error event; no ``message_stop`` follows it."""
        return error_event(error, self._head.request_id)

    def whole(
        self, text: str, finish_reason: str | None, stop_reason: str | int | None, usage: Usage
    ) -> dict[str, Any]:
        """The message in one piece."""
        content = [{"type": "text", "text": text}]
        return self._message(content, stop_fields(finish_reason, stop_reason), usage)

    def _message(
        self, content: list[dict[str, Any]], finish: dict[str, Any], usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **finish,
            "usage": usage_object(usage),
        }


def stop_fields(finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    """Why an answer ended; a stop token that was asked for counts as the end of the turn."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic's ``usage``: tokens read from the cache are not among the input's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(name: str, **data: Any) -> bytes:
    body = orjson.dumps({"type": name, **data})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
