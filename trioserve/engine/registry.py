"""The open requests, and the commands that wait to be sent to the worker.

Only the Registry writes its state; the Engine calls it, in one trio thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import trio

from trioserve.engine.requests import RequestStream, Sent
from trioserve.errors import InvalidRequest, RequestError, RequestFailed
from trioserve.ipc.messages import Abort, Command, Delta, StepOutput, Work, WorkFailed

logger = logging.getLogger("trioserve.engine")


class Registry:
    """Each request from its submission to its end, across workers. Never waits for a reader."""

    def __init__(self) -> None:
        self._requests: dict[int, RequestStream] = {}
        self._commands: deque[Command] = deque()
        self._aborts: set[int] = set()
        self._wake = trio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------- to the worker

    def add(self, stream: RequestStream, try_send: Callable[[Work], bool] | None) -> None:
        """A new request: sent at once if nothing waits before it and ``try_send`` can."""
        self._requests[stream.id] = stream
        at_once = try_send if not (self._commands or self._aborts) else None
        if at_once is not None and at_once(stream.work):
            stream.sent = Sent.SENT
        else:
            self.send(stream.work)

    def send(self, command: Command) -> None:
        """After all that waits."""
        self._commands.append(command)
        self._wake.set()

    def send_first(self, command: Command) -> None:
        """Before all that waits for a worker that has just become ready."""
        self._commands.appendleft(command)

    def abort(self, request_id: int) -> None:
        """See ``Engine.abort``."""
        stream = self._requests.get(request_id)
        if stream is None:
            return
        if stream.sent is Sent.QUEUED:
            # The writer passes over a Work whose request is gone, so no Abort can overtake it.
            stream.sent = Sent.ENDED
            del self._requests[request_id]
            stream.mailbox.put(Delta(request_id, [], "abort"))  # to a task that waits for it
        else:
            self._aborts.add(request_id)
            self._wake.set()

    async def next_command(self) -> Command:
        """See ``Engine.next_command``. Cancellation loses nothing."""
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()  # the pipe is a checkpoint for each
            if self._aborts:
                ids, self._aborts = sorted(self._aborts), set()
                return Abort(ids)
            while self._commands:
                command = self._commands.popleft()
                if not isinstance(command, Work):
                    return command
                stream = self._requests.get(command.id)
                if stream is not None:
                    stream.sent = Sent.SENT
                    return command
            self._wake = trio.Event()
            await self._wake.wait()

    # ----------------------------------------------------------------- from the worker

    def deliver(self, event: StepOutput) -> None:
        """Hand each delta to its request; late ones of requests that are gone are dropped."""
        now = 0.0
        for delta in event.deltas:
            stream = self._requests.get(delta.id)
            if stream is None:
                continue
            if stream.started_s is None and delta.finish_reason != "abort":
                # The step that began it is told of at its end.
                now = now or time.monotonic()
                stream.started_s = max(stream.created_s, now - event.stats.step_s)
            if delta.token_ids:
                stream.last_token_s = now = now or time.monotonic()
                if stream.first_token_s is None:
                    stream.first_token_s = now
            elif delta.finish_reason is None and delta.prompt_logprobs is None:
                continue
            if delta.finish_reason is not None:
                stream.sent = Sent.ENDED
                self._forget(delta.id)
            stream.mailbox.put(delta)

    def fail(self, event: WorkFailed) -> None:
        """The worker failed one request."""
        stream = self._requests.get(event.id)
        if stream is None:
            return
        stream.sent = Sent.ENDED
        self._forget(event.id)
        if event.code == "invalid":
            stream.mailbox.fail(InvalidRequest(event.message))
        else:
            logger.error("request %d failed in the worker: %s", event.id, event.message)
            stream.mailbox.fail(RequestFailed("the request failed inside the engine"))

    def end_worker(self, error: RequestError, *, resubmit: bool) -> None:
        """The worker is gone, and with it what was to be sent: requests get ``error``.

        With ``resubmit``, those of which nothing was delivered yet wait for the next worker.
        """
        self._commands.clear()
        self._aborts.clear()
        requests, self._requests = self._requests, {}
        for stream in requests.values():
            if resubmit and stream.may_be_resubmitted:
                stream.sent = Sent.QUEUED
                stream.started_s = None
                stream.resubmitted = True
                self._requests[stream.id] = stream
                self._commands.append(stream.work)
            else:
                stream.sent = Sent.ENDED
                stream.mailbox.fail(error)

    def _forget(self, request_id: int) -> None:
        del self._requests[request_id]
        self._aborts.discard(request_id)
