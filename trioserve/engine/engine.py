"""The parent's side of the engine: the request registry, the phase, and what users call.

Only the methods of Engine write its state, and all run in one trio thread: the synchronous ones in
the task of whoever calls, the rest in the supervisor's tasks. Nothing here waits for a reader.
"""

from __future__ import annotations

import itertools
import logging
import operator
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import trio

from trioserve.config.schema import DEFAULT_NAME, DEFAULT_SOURCE, Config
from trioserve.engine.api import EngineStatus, Phase
from trioserve.engine.requests import RequestStream, Sent
from trioserve.engine.startup import StageTree
from trioserve.engine.tally import StepTally
from trioserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestError,
    RequestFailed,
    TrioserveError,
)
from trioserve.ipc.messages import (
    Abort,
    Check,
    Checked,
    Command,
    Delta,
    Ready,
    ReadyInfo,
    Stage,
    StepOutput,
    StepStats,
    Work,
    WorkFailed,
)
from trioserve.models.spec import ResolvedModel
from trioserve.sampling_params import SamplingParams, check_token_ids
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer

logger = logging.getLogger("trioserve.engine")

LONG_TEXT = 16 * 1024  # characters; beyond it, tokenizing goes to a thread

T = TypeVar("T")


class Engine:
    """A model being served; made by ``open_engine``.

    Attributes:
        config: as given.
        failure: why the engine ended, once it has.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.failure: TrioserveError | None = None
        self.num_restarts = 0
        self.worker_pid: int | None = None  # the supervisor writes it
        self._steps = StepTally()
        self._phase = Phase.LOADING
        self._incarnation = 1
        self._stages = StageTree()
        self._cause: str | None = None
        self._model: ResolvedModel | None = None
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._info: ReadyInfo | None = None
        self._stats: StepStats | None = None
        self._requests: dict[int, RequestStream] = {}
        self._commands: deque[Command] = deque()
        self._commands_wake = trio.Event()
        self._aborts: set[int] = set()
        self._checks: dict[int, _Answer] = {}
        self._ids = itertools.count()
        self._draining = False
        self._started_s = time.monotonic()
        self._ready_after_s: float | None = None
        self._changed = trio.Event()
        self._long_texts = trio.CapacityLimiter(1)

    # ------------------------------------------------------------------ what users look at

    @property
    def phase(self) -> Phase:
        """Where the engine is."""
        if self._draining and self._phase in (Phase.LOADING, Phase.READY, Phase.RESTARTING):
            return Phase.DRAINING
        return self._phase

    @property
    def status(self) -> EngineStatus:
        """A snapshot: phase, stages, counters."""
        return EngineStatus(
            phase=self.phase,
            incarnation=self._incarnation,
            stages=self._stages.snapshot(),
            cause=self._cause,
            model_name=self.served_names[0],
            info=self._info,
            stats=self._stats,
            num_requests=len(self._requests),
            uptime_s=time.monotonic() - self._started_s,
            ready_after_s=self._ready_after_s,
            num_restarts=self.num_restarts,
            worker_pid=self.worker_pid,
            steps=self._steps,
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names clients may use for the model; the first is echoed."""
        if self.config.model.served_names:
            return self.config.model.served_names
        if self.config.model.source == DEFAULT_SOURCE:
            return (DEFAULT_NAME,)
        return (self._model.name,) if self._model else (default_name(self.config.model.source),)

    @property
    def model(self) -> ResolvedModel:
        """The inspected model. Raises NotReady before the stage inspect has ended."""
        if self._model is None:
            raise self._not_ready()
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether the model is inspected and its tokenizer loaded."""
        return self._model is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises NotReady before it is loaded."""
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens. Raises NotReady before the first Ready."""
        if self._info is None:
            raise self._not_ready()
        return self._info.max_model_len

    def watch(self) -> Watch:
        """Statuses as they change, the present one first, until the engine has ended."""
        return Watch(self)

    async def wait_change(self) -> None:
        """Wait for the next change of phase, stage or model. Cancellation changes nothing."""
        await self._changed.wait()

    async def wait_ready(self) -> None:
        """Wait for phase READY. Cancellation changes nothing.

        Raises:
            TrioserveError: the failure that ended the engine first.
        """
        while self._phase is not Phase.READY:
            if self.failure is not None:
                raise self.failure
            if self._phase is Phase.CLOSED:
                raise self._not_ready()
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    async def wait_ended(self) -> None:
        """Wait until the engine has failed or closed. Cancellation changes nothing."""
        while self._phase not in (Phase.FAILED, Phase.CLOSED):
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    # ----------------------------------------------------------------------- what users do

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize; long texts in a thread. Cancellation abandons the result.

        Raises:
            NotReady: the model is not loaded.
            ContextLengthExceeded: the text cannot fit, whatever the tokenizer makes of it.
        """
        tokenizer, limit = self.tokenizer, self.max_model_len
        least = tokenizer.min_num_tokens(text, limit + 1)
        if least > limit:
            raise ContextLengthExceeded(
                f"the maximum context length is {limit} tokens; a prompt of {len(text)} "
                f"characters is at least {least} tokens",
                param="prompt",
            )
        return await self._off_loop(len(text), tokenizer.encode, text, add_special_tokens)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Apply the chat template and tokenize. Cancellation abandons the result.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
            NotReady, ContextLengthExceeded: as ``encode_prompt``.
        """
        _ = self.tokenizer
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or set model.chat_template"
            )
        kwargs = dict(template_kwargs or {})
        if "add_generation_prompt" in kwargs:
            raise InvalidRequest(
                "add_generation_prompt is a field of its own",
                param="chat_template_kwargs.add_generation_prompt",
            )
        render = partial(
            self._template.render, messages, add_generation_prompt=add_generation_prompt, **kwargs
        )
        text = await self._off_loop(text_length(messages), render)
        return await self.encode_prompt(text, add_special_tokens=False)

    def submit(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Start a request. Never waits.

        Raises:
            InvalidRequest: a parameter out of range, an id outside the vocabulary, no prompt.
            ContextLengthExceeded: it can never fit; both numbers are in the message.
            QueueFull: ``max_waiting`` requests wait already.
            NotReady: loading, restarting, draining or dead.
        """
        if self.phase is not Phase.READY:
            raise self._not_ready()
        self._check(prompt_token_ids, sampling)
        if type(priority) is not int or not isinstance(cache_salt, str):
            raise InvalidRequest("priority must be an int and cache_salt a str", param="priority")
        scheduler = self.config.scheduler
        if len(self._requests) >= scheduler.max_num_seqs + scheduler.max_waiting:
            raise QueueFull(f"{len(self._requests)} requests run or wait already; try again later")
        seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
        work = Work(next(self._ids), prompt_token_ids, sampling, seed, priority, cache_salt)
        stream = RequestStream(work, self.tokenizer, self.abort)
        self._requests[work.id] = stream
        self._send(work)
        return stream

    @asynccontextmanager
    async def generate(
        self,
        prompt: str | Sequence[int] | list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestStream]:
        """Generate from a text, token ids, or chat messages; leaving the context aborts.

        Raises:
            RequestError: as ``encode_prompt``, ``render_chat`` and ``submit``.
        """
        if isinstance(prompt, str):
            token_ids = await self.encode_prompt(prompt)
        else:
            items = _items(prompt)
            if items and isinstance(items[0], dict):
                token_ids = await self.render_chat(items)
            else:
                token_ids = [_plain(item) for item in items]
        async with self.submit(token_ids, sampling or SamplingParams(), priority=priority) as s:
            yield s

    def abort(self, request_id: int) -> None:
        """End a request. Idempotent, never fails, never waits."""
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
            self._commands_wake.set()

    async def check(self) -> Checked:
        """Ask the worker to check its invariants; for tests and debugging.

        Raises:
            NotReady: there is no worker to ask, or it ended before it answered.
        """
        if self._phase is not Phase.READY:
            raise self._not_ready()
        token = next(self._ids)
        answer = self._checks[token] = _Answer()
        self._send(Check(token))
        await answer.came.wait()
        if answer.checked is None:
            raise self._not_ready()
        return answer.checked

    def begin_drain(self) -> None:
        """From now on ``submit`` raises NotReady; what runs goes on."""
        self._draining = True
        self._notify()

    # ------------------------------------------------- the writer's side (supervisor tasks)

    async def next_command(self) -> Command:
        """The next command for the worker; pending aborts go first, as one. Waits if none.

        Cancellation loses nothing.
        """
        while True:
            await trio.lowlevel.checkpoint()
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
            self._commands_wake = trio.Event()
            await self._commands_wake.wait()

    # ------------------------------------------------- the engine task's side

    def begin_incarnation(self, number: int) -> None:
        """A worker is about to be started."""
        self._incarnation = number
        self._steps.begin_worker()
        self._stages = StageTree(keep=("resolve", "fetch", "inspect"), of=self._stages)
        self._notify()

    def set_model(
        self, model: ResolvedModel, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        """The model is inspected and its text side loaded."""
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._notify()

    def on_stage(self, stage: Stage) -> None:
        """A start-up stage began, moved on or ended."""
        self._stages.apply(stage)
        self._notify()

    def on_ready(self, event: Ready) -> None:
        """The worker has produced a token."""
        self._info = event.info
        self._phase = Phase.READY
        self._cause = None
        self._stages.finish()
        if self._ready_after_s is None:
            self._ready_after_s = time.monotonic() - self._started_s
        self._notify()

    def on_step(self, event: StepOutput) -> None:
        """Hand each delta to its request; late ones of requests that are gone are dropped."""
        self._stats = event.stats
        self._steps.add(event.stats)
        now = 0.0
        for delta in event.deltas:
            stream = self._requests.get(delta.id)
            if stream is None:
                continue
            stream.started = True
            if not delta.token_ids and delta.finish_reason is None:
                continue
            if stream.first_token_s is None and delta.token_ids:
                stream.first_token_s = now = now or time.monotonic()
            if delta.finish_reason is not None:
                stream.sent = Sent.ENDED
                self._forget(delta.id)
            stream.mailbox.put(delta)

    def on_failed(self, event: WorkFailed) -> None:
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

    def on_checked(self, event: Checked) -> None:
        """Answer to ``check``."""
        if answer := self._checks.pop(event.token, None):
            answer.checked = event
            answer.came.set()

    def end_incarnation(
        self, phase: Phase, error: RequestError, cause: str | None, *, resubmit: bool = False
    ) -> None:
        """The worker is gone: open requests get ``error``.

        With ``resubmit``, those of which nothing was delivered yet wait for the next worker
        instead; once, so that a request that kills workers does not go on for ever.
        """
        self._phase = phase
        if cause is not None:
            self._cause = cause
            self._stages.fail()
        self._stats = None
        self.worker_pid = None
        self._commands.clear()
        self._aborts.clear()
        requests, self._requests = self._requests, {}
        for stream in requests.values():
            if resubmit and stream.may_be_resubmitted:
                stream.sent = Sent.QUEUED
                stream.started = False
                stream.resubmitted = True
                self._requests[stream.id] = stream
                self._commands.append(stream.work)
            else:
                stream.sent = Sent.ENDED
                stream.mailbox.fail(error)
        checks, self._checks = self._checks, {}
        for answer in checks.values():
            answer.came.set()
        self._notify()

    @property
    def running_stage(self) -> str:
        """Name of the stage that runs, or of the one that would come next."""
        return self._stages.current

    # ----------------------------------------------------------------------------- private

    def _check(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        info = self._info
        assert info is not None  # phase READY
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        num_tokens, limit = len(prompt_token_ids), info.max_model_len
        if num_tokens >= limit:
            raise ContextLengthExceeded(
                f"the maximum context length is {limit} tokens; the prompt has {num_tokens} and "
                "leaves no room for an answer",
                param="prompt",
            )
        for index, token_id in enumerate(prompt_token_ids):
            if type(token_id) is not int:  # the worker would take the frame for a broken one
                kind = type(token_id).__name__
                raise InvalidRequest(f"prompt[{index}] must be an int, not {kind}", param="prompt")
        check_token_ids("prompt", prompt_token_ids, info.vocab_size)
        sampling.validate(info.vocab_size)

    async def _off_loop(self, length: int, function: Callable[..., T], *args: Any) -> T:
        """Call ``function``, in a thread if it works on a long text; cancellation abandons it."""
        if length <= LONG_TEXT:
            await trio.lowlevel.checkpoint()
            return function(*args)
        return await trio.to_thread.run_sync(
            function, *args, limiter=self._long_texts, abandon_on_cancel=True
        )

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._commands_wake.set()

    def _forget(self, request_id: int) -> None:
        del self._requests[request_id]
        self._aborts.discard(request_id)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _not_ready(self) -> NotReady:
        match self.phase:
            case Phase.LOADING:
                return NotReady(f"the model is loading (stage {self._stages.current})")
            case Phase.RESTARTING:
                return NotReady("the engine is restarting after a fault")
            case Phase.DRAINING:
                return NotReady("the server is shutting down")
            case Phase.FAILED:
                return NotReady(f"the engine has failed: {self._cause}")
            case _:
                return NotReady("the engine is closed")


class Watch:
    """Iterates over statuses; changes that come while the reader is busy are seen as one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: EngineStatus | None = None
        self._ended = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> EngineStatus:
        """The next status that differs. Cancellation loses nothing."""
        await trio.lowlevel.checkpoint()
        while not self._ended:
            status = self._engine.status
            if self._last is None or self._key(status) != self._key(self._last):
                self._last = status
                self._ended = status.phase in (Phase.FAILED, Phase.CLOSED)
                return status
            await self._engine.wait_change()
        raise StopAsyncIteration

    @staticmethod
    def _key(status: EngineStatus) -> tuple[object, ...]:
        return (status.phase, status.incarnation, status.stages, status.cause, status.info)


class _Answer:
    """What ``check`` waits for; ``checked`` stays None if the worker ends first."""

    def __init__(self) -> None:
        self.came = trio.Event()
        self.checked: Checked | None = None


def default_name(source: str) -> str:
    """The served name made from a source that is not inspected yet."""
    return source.rstrip("/").rsplit("/", 1)[-1].rsplit("#", 1)[-1]


def text_length(value: Any) -> int:
    """Characters of all text anywhere inside a JSON-like value; a cheap measure of work."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_length, value))
    return 0


def _items(prompt: Any) -> list[Any]:
    """A prompt that is no text, as a list; arrays of other libraries as well."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes | bytearray):
        return list(prompt)
    raise InvalidRequest(
        f"a prompt is a text, token ids or chat messages, not {type(prompt).__name__}",
        param="prompt",
    )


def _plain(item: Any) -> Any:
    """An integer of another library as an int; anything else as it is, to be refused."""
    if isinstance(item, bool):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item
