"""What is noted of one request while it is answered; cheap, and without the SDK."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from trioserve.engine.api import RequestStream, TextDelta, Timings, Usage
from trioserve.errors import RequestError
from trioserve.sampling_params import SamplingParams

MAX_CONTENT = 64 * 1024  # characters of a prompt or an answer that are kept


@attrs.define
class ChoiceTrace:
    """One answer; the last three are set when it ends."""

    text: list[str] = attrs.field(factory=list)
    num_characters: int = 0
    reason: str = ""  # as the metrics count it
    timings: Timings | None = None
    usage: Usage | None = None


@attrs.define
class RequestTrace:
    """One request, from its head to its end. Written by the tasks that answer it.

    ``start_s`` is of ``time.monotonic``; ``start_ns`` is the same moment since the epoch.
    """

    request_id: str
    method: str
    path: str
    traceparent: str
    tracestate: str
    with_content: bool
    start_s: float = attrs.field(factory=time.monotonic)
    start_ns: int = attrs.field(factory=time.time_ns)
    end_s: float = 0.0
    route: str | None = None
    status: int | None = None  # None: the client left before the answer
    model: str = ""
    error: str | None = None
    prompt_ids: list[list[int]] = attrs.field(factory=list)  # with_content only
    prompts: list[str] = attrs.field(factory=list)  # the same as text
    num_prompts: int = 0
    sampling: SamplingParams | None = None  # of the first answer
    num_samplings: int = 0
    choices: list[ChoiceTrace] = attrs.field(factory=list)
    _streams: Sequence[RequestStream] = ()

    def accept(self, streams: Sequence[RequestStream], samplings: Sequence[SamplingParams]) -> None:
        """The request was submitted as ``streams``."""
        self._streams = streams
        self.choices = [ChoiceTrace() for _ in streams]
        self.sampling = samplings[0] if samplings else None
        self.num_samplings = len(samplings)
        prompts = [stream.prompt_token_ids for stream in streams[:: len(samplings) or 1]]
        self.num_prompts = len(prompts)
        if self.with_content:
            self.prompt_ids = prompts

    def add(self, choice: int, delta: TextDelta) -> None:
        """A delta of a choice was delivered."""
        if self.with_content:
            noted = self.choices[choice]
            if noted.num_characters < MAX_CONTENT:
                noted.text.append(delta.text)
                noted.num_characters += len(delta.text)

    def fail(self, error: RequestError) -> None:
        """The request was ended by an error, or refused."""
        self.error = error.code or type(error).__name__

    def end_choice(self, choice: int, reason: str) -> None:
        """A choice has ended."""
        noted = self.choices[choice]
        noted.reason = reason
        noted.timings = self._streams[choice].timings
        noted.usage = self._streams[choice].usage

    def end(
        self, route: str | None, status: int | None, model: str, error: Exception | None
    ) -> None:
        """The request is over; ``error`` is what became its answer."""
        if isinstance(error, RequestError):
            self.fail(error)
        self.end_s = time.monotonic()
        self.route, self.status, self.model = route, status, model
        self._streams = ()

    def ns(self, moment_s: float) -> int:
        """A moment of ``time.monotonic`` in ns since the epoch."""
        return self.start_ns + int((moment_s - self.start_s) * 1e9)
