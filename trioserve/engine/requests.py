"""One request on the parent's side: a mailbox that never makes the engine wait, and its reader."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

import trio

from trioserve.engine.api import TextDelta, Timings, Usage
from trioserve.errors import RequestError
from trioserve.ipc.messages import Delta, TokenLogprobs, Work
from trioserve.text.stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.text.tokenizer import Tokenizer


BURST = 256
"""Tokens, or log probabilities, that are worked on before others get their turn."""


class Sent(enum.Enum):
    """How far a request has come toward the worker. Only the Engine writes it."""

    QUEUED = "queued"  # in the commands channel; an abort simply forgets it
    SENT = "sent"  # the worker has it; an abort is answered by a terminal delta
    ENDED = "ended"  # a terminal answer is in the mailbox, or the request is forgotten


class Mailbox:
    """What the engine task puts in and the reader takes out.

    Deltas coalesce in a list, so the engine never waits for a slow reader; a request's own
    ``max_tokens`` bounds it.

    Args:
        most: deltas given out at once, so that a reader far behind does not hold up the others.
    """

    def __init__(self, most: int = BURST) -> None:
        self._most = most
        self._deltas: list[Delta] = []
        self._error: RequestError | None = None
        self._wake: trio.Event | None = None  # of a reader that waits
        self._being_read = False

    def put(self, delta: Delta) -> None:
        """Add a delta. Engine task only."""
        self._deltas.append(delta)
        self._tell()

    def fail(self, error: RequestError) -> None:
        """End with an error, to be raised after what came before it is read. Engine task only."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def take(self) -> Delta:
        """What came since the last call, merged into one delta; waits only if there is nothing.

        Of very much it gives the beginning, and the rest next time, after a checkpoint.

        Cancellation loses nothing.

        Raises:
            RequestError: the one given to ``fail``, once the deltas before it were taken.
            trio.BusyResourceError: another task is waiting here.
        """
        if self._being_read:
            raise trio.BusyResourceError("another task reads this stream already")
        self._being_read = True
        try:
            if self._deltas or self._error is not None:
                await trio.lowlevel.checkpoint()
            while not self._deltas:
                if self._error is not None:
                    raise self._error
                self._wake = trio.Event()
                await self._wake.wait()
        finally:
            self._being_read = False
        deltas, self._deltas = self._deltas[: self._most], self._deltas[self._most :]
        return deltas[0] if len(deltas) == 1 else merge(deltas)


def merge(deltas: list[Delta]) -> Delta:
    """Several deltas of one sequence as one, in order."""
    last = deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        id=last.id,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=logprobs or None,
        num_cached_tokens=next(
            (d.num_cached_tokens for d in deltas if d.num_cached_tokens is not None), None
        ),
        prompt_logprobs=next(
            (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None
        ),
    )


class RequestStream:
    """The answer to one request, read by one task; see ``trioserve.engine.api.RequestStream``.

    Owned by the task that reads it. Detokenizing happens here, in the reader's task: its cost and
    its faults stay with this request.
    """

    def __init__(self, work: Work, tokenizer: Tokenizer, abort: Callable[[int], None]) -> None:
        self.work = work
        self.sent = Sent.QUEUED
        sampling = work.sampling
        num_logprobs = len(sampling.logprob_token_ids) + (sampling.logprobs or 0)
        self.mailbox = Mailbox(max(1, BURST // (1 + num_logprobs)))
        self.created_s = time.monotonic()
        # Only the Engine writes these three.
        self.started_s: float | None = None  # when a step worked on it first
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.resubmitted = False
        self._abort = abort
        self._text = TextStream(tokenizer, work.prompt_token_ids, work.sampling)
        self._cached_tokens = 0
        self._finished = False

    @property
    def id(self) -> int:
        """The request's id, unique in this engine."""
        return self.work.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids."""
        return self.work.prompt_token_ids

    @property
    def started(self) -> bool:
        """Whether a step has worked on it: it waits no more."""
        return self.started_s is not None

    @property
    def timings(self) -> Timings:
        """When it was submitted, begun, and when tokens came from the worker."""
        return Timings(self.created_s, self.started_s, self.first_token_s, self.last_token_s)

    @property
    def may_be_resubmitted(self) -> bool:
        """Whether another worker may start it anew: nothing of it was delivered, nor it aborted."""
        return self.first_token_s is None and not self.resubmitted and not self._finished

    @property
    def usage(self) -> Usage:
        """Tokens so far; output counts only what was delivered."""
        return Usage(
            len(self.work.prompt_token_ids), self._text.num_output_tokens, self._cached_tokens
        )

    async def __aenter__(self) -> RequestStream:
        """Enter at once."""
        return self

    async def __aexit__(self, *args: object) -> None:
        """Abort if still running; never waits, so it is safe under cancellation."""
        self.close()

    def __aiter__(self) -> RequestStream:
        """The stream is its own iterator."""
        return self

    async def __anext__(self) -> TextDelta:
        """What came since the last call as one delta; waits only if there is nothing.

        A reader that is hundreds of tokens behind gets them in several. Cancellation loses
        nothing: the next call returns it.

        Raises:
            RequestFailed: the worker failed this request, or died under it.
            RequestCut: the server's shutdown ended it.
            StopAsyncIteration: the last delta was returned already.
            trio.BusyResourceError: another task is waiting for it.
        """
        if self._finished:
            raise StopAsyncIteration
        while True:
            delta = await self.mailbox.take()
            if delta.num_cached_tokens is not None:
                self._cached_tokens = delta.num_cached_tokens
            if delta.prompt_logprobs is not None:
                await self._read_prompt(delta.prompt_logprobs)
            text = self._text.push(delta)
            if self._text.finished:
                self._finished = True
                self.close()  # a stop string ends it before the worker knows
            if text is not None:
                return text

    async def _read_prompt(self, scores: list[TokenLogprobs | None]) -> None:
        """Take in a prompt's log probabilities, a few at a time. Cancellation waits for it: a
        delta that has been taken must not be lost."""
        token_ids = self.work.prompt_token_ids
        size = max(1, BURST // (1 + (self.work.sampling.prompt_logprobs or 0)))
        for start in range(0, len(scores), size):
            part = slice(start, start + size)
            self._text.push_prompt(token_ids[part], scores[part])
            await trio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """Abort if still running. Idempotent, never fails, never waits."""
        self._finished = True
        if self.sent is not Sent.ENDED:
            self._abort(self.work.id)
