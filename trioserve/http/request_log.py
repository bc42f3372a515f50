"""One log line for each request, for operators who ask for it with ``log.requests``.

Nothing of what a client chose can look like a line of ours: routes are templates, and texts are
JSON strings in ASCII.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from trioserve.errors import RequestError

if TYPE_CHECKING:
    from trioserve.config.schema import LogConfig
    from trioserve.engine.api import RequestStream, TextDelta, Timings, Usage

LOGGER = "trioserve.requests"
MAX_METHOD = 20  # characters
CUT = "…"

log = logging.getLogger(LOGGER)


class RequestRecord:
    """What one request was, noted while it is answered. Written by its tasks alone.

    Args:
        config: says what is noted of its content, and how the line is made.
    """

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._input: str | None = None
        self._prompts: dict[int, int] = {}  # tokens, by the identity of the list
        self._answers: list[_Answer] = []

    def take_body(self, raw: bytes) -> None:
        """Note the beginning of the body, if bodies are wanted."""
        if self._config.inputs:
            most = self._config.max_content_chars
            text = raw[: 4 * most + 4].decode(errors="replace")
            self._input = text if len(text) <= most else text[:most] + CUT

    def follow(self, stream: RequestStream, prompt: list[int]) -> RequestStream:
        """The stream, noting what its reader gets. ``prompt`` is one list for all its answers."""
        self._prompts[id(prompt)] = len(prompt)
        most = self._config.max_content_chars if self._config.outputs else 0
        answer = _Answer(most)
        self._answers.append(answer)
        return FollowedStream(stream, answer)

    def write(
        self,
        *,
        id: str,
        method: str,
        route: str | None,
        status: int | None,
        seconds: float,
        client: Any,
    ) -> None:
        """Write the line. ``status`` is None where the client left before the answer, ``client``
        as in an ASGI scope."""
        entry: dict[str, Any] = {
            "request_id": id,
            "method": method[:MAX_METHOD],
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
            "client": client[0] if client else "unix",
        }
        if self._answers:
            entry["prompt_tokens"] = sum(self._prompts.values())
            entry["completion_tokens"] = sum(answer.num_tokens for answer in self._answers)
            entry["finish_reasons"] = [answer.finish_reason for answer in self._answers]
        if self._input is not None:
            entry["input"] = self._input
        if self._config.outputs and self._answers:
            entry["output"] = [answer.text for answer in self._answers]
        if self._config.format == "json":
            log.info("request", extra=entry)
        else:
            log.info("%s", _line(entry))


class _Answer:
    """One answer, its text up to ``max_chars`` characters."""

    def __init__(self, max_chars: int) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None  # or the code of the error that ended it
        self._max_chars = max_chars
        self._pieces: list[str] = []
        self._num_chars = 0

    @property
    def text(self) -> str:
        text = "".join(self._pieces)
        return text if len(text) <= self._max_chars else text[: self._max_chars] + CUT

    def add(self, delta: TextDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        if self._max_chars and self._num_chars <= self._max_chars:
            self._pieces.append(delta.text)
            self._num_chars += len(delta.text)


class FollowedStream:
    """A RequestStream whose deltas are noted as they are read."""

    def __init__(self, stream: RequestStream, answer: _Answer) -> None:
        self._stream = stream
        self._answer = answer

    @property
    def id(self) -> int:
        """As the stream's own; all else too."""
        return self._stream.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """As the stream's own."""
        return self._stream.prompt_token_ids

    @property
    def started(self) -> bool:
        """As the stream's own."""
        return self._stream.started

    @property
    def usage(self) -> Usage:
        """As the stream's own."""
        return self._stream.usage

    @property
    def timings(self) -> Timings:
        """As the stream's own."""
        return self._stream.timings

    async def __aenter__(self) -> FollowedStream:
        return self

    async def __aexit__(self, *args: object) -> None:
        self.close()

    def __aiter__(self) -> FollowedStream:
        return self

    async def __anext__(self) -> TextDelta:
        """As the stream's own; cancellation loses nothing."""
        try:
            delta = await self._stream.__anext__()
        except RequestError as error:
            self._answer.finish_reason = error.code
            raise
        self._answer.add(delta)
        return delta

    def close(self) -> None:
        """As the stream's own."""
        self._stream.close()


def _line(entry: dict[str, Any]) -> str:
    """The entry for people: the usual figures in words, texts as JSON."""
    status = entry["status"] or "client gone"
    line = f"{entry['method']} {entry['route'] or '(no route)'}: {status}"
    line += f" in {entry['seconds']:.4f} s"
    if "finish_reasons" in entry:
        reasons = ", ".join(reason or "unfinished" for reason in entry["finish_reasons"])
        line += f", tokens {entry['prompt_tokens']} in, {entry['completion_tokens']} out, {reasons}"
    line += f"; request {entry['request_id']} from {entry['client']}"
    for name in ("input", "output"):
        if name in entry:
            line += f", {name} {json.dumps(entry[name])}"
    return line
