"""The parent's side of the engine: the request registry, the phase, and what users call.

Only the methods of Engine write its state, and all run in one trio thread: the synchronous ones in
the task of whoever calls, the rest in the supervisor's tasks. Nothing here waits for a reader.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from trioserve.config.schema import DEFAULT_NAME, DEFAULT_SOURCE, Config
from trioserve.engine.api import EngineStatus, GenerationDefaults, Phase
from trioserve.engine.prompts import Prompts, as_prompt, is_chat
from trioserve.engine.questions import Questions
from trioserve.engine.registry import Registry
from trioserve.engine.requests import RequestStream
from trioserve.engine.startup import StageTree
from trioserve.engine.tally import StepTally
from trioserve.engine.watch import Watch
from trioserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestError,
    TrioserveError,
)
from trioserve.ipc.messages import (
    Check,
    Checked,
    Command,
    Control,
    Controlled,
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
        self._prompts: Prompts | None = None
        self._info: ReadyInfo | None = None
        self._stats: StepStats | None = None
        self._requests = Registry()
        self._questions = Questions()
        self.try_send: Callable[[Work], bool] | None = None  # the present worker's, if there is one
        self._paused = False
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
    def paused(self) -> bool:
        """Whether the worker computes no step until ``resume``."""
        return self._paused

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
            paused=self._paused,
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
        return self._text.tokenizer

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
        limit = self.max_model_len
        return await self._text.encode(text, limit, add_special_tokens=add_special_tokens)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Apply the chat template and tokenize. Cancellation abandons the result.

        Args:
            messages: as clients send them.
            add_generation_prompt: open an answer after the last message.
            continue_final_message: leave the last message open, for the answer to go on with it;
                not with ``add_generation_prompt``.
            add_special_tokens: have the tokenizer add its own; templates mostly write them.
            chat_template: the source of a template to use in place of the model's.
            template_kwargs: further variables for the template.

        Raises:
            InvalidRequest: there is no template, the one given is broken, or it refuses these
                messages.
            NotReady, ContextLengthExceeded: as ``encode_prompt``.
        """
        text = await self._text.render(
            messages,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return await self.encode_prompt(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; long lists in a thread. Cancellation abandons the result.

        Raises:
            InvalidRequest: an id outside the vocabulary.
            NotReady: the model is not loaded.
        """
        return await self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary writes it, empty for ids without one. Raises NotReady."""
        return self._text.token_text(token_id)

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model asks for where a request says nothing; nothing before it is inspected."""
        return self._model.generation if self._model else GenerationDefaults()

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
        bad_words_ids = self._text.bad_words_ids(sampling)
        scheduler = self.config.scheduler
        if len(self._requests) >= scheduler.max_num_seqs + scheduler.max_waiting:
            raise QueueFull(f"{len(self._requests)} requests run or wait already; try again later")
        seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
        work = Work(
            *(next(self._ids), prompt_token_ids, sampling, seed, priority, cache_salt),
            bad_words_ids=bad_words_ids,
        )
        stream = RequestStream(work, self.tokenizer, self.abort)
        self._requests.add(stream, self.try_send)
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

        Without ``sampling`` the model's ``generation_defaults`` apply; with it, it alone does.

        Raises:
            RequestError: as ``encode_prompt``, ``render_chat`` and ``submit``.
        """
        items = as_prompt(prompt)
        if isinstance(items, str):
            token_ids = await self.encode_prompt(items)
        else:
            token_ids = await self.render_chat(items) if is_chat(items) else items
        sampling = sampling or self.generation_defaults.as_sampling()
        async with self.submit(token_ids, sampling, priority=priority) as stream:
            yield stream

    def abort(self, request_id: int) -> None:
        """End a request. Idempotent, never fails, never waits."""
        self._requests.abort(request_id)

    async def check(self) -> Checked:
        """Ask the worker to check its invariants; for tests and debugging.

        Raises:
            NotReady: there is no worker to ask, or it ended before it answered.
        """
        answer = await self._ask(Check(next(self._ids)))
        assert isinstance(answer, Checked)
        return answer

    async def reset_prefix_cache(self) -> bool:
        """Forget the cached blocks that no sequence uses; False if some are used, and kept.

        Cancelled, the worker does it all the same. Raises NotReady as ``check``.
        """
        return await self._control("reset_prefix_cache")

    async def pause(self) -> None:
        """Compute no step until ``resume``; requests are taken and wait, aborts are answered.

        Idempotent. The pause outlives the worker: the next one is paused as it becomes ready.
        A drain does not end it: what is open then is cut at the drain deadline. Cancelled, the
        worker pauses all the same. Raises NotReady as ``check``.
        """
        await self._control("pause")

    async def resume(self) -> None:
        """Go on after ``pause``. Idempotent; cancelled, the worker goes on all the same.

        Raises NotReady as ``check``.
        """
        await self._control("resume")

    async def _control(self, action: str) -> bool:
        answer = await self._ask(Control(next(self._ids), action))
        assert isinstance(answer, Controlled)
        return answer.ok

    async def _ask(self, command: Check | Control) -> Checked | Controlled:
        if self._phase is not Phase.READY:
            raise self._not_ready()
        self._requests.send(command)
        answer = await self._questions.ask(command)
        if answer is None:
            raise self._not_ready()
        return answer

    def begin_drain(self) -> None:
        """From now on ``submit`` raises NotReady; what runs goes on."""
        self._draining = True
        self._notify()

    # ------------------------------------------------- the writer's side (supervisor tasks)

    async def next_command(self) -> Command:
        """The next command for the worker; pending aborts go first, as one. Waits if none.

        Cancellation loses nothing.
        """
        return await self._requests.next_command()

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
        self._model = model
        self._prompts = Prompts(model, tokenizer, template, self._long_texts)
        self._notify()

    def on_stage(self, stage: Stage) -> None:
        """A start-up stage began, moved on or ended."""
        self._stages.apply(stage)
        self._notify()

    def on_ready(self, event: Ready) -> None:
        """The worker has produced a token."""
        self._info = event.info
        self._phase = Phase.READY
        if self._paused:  # before the requests that were kept for this worker
            self._requests.send_first(Control(next(self._ids), "pause"))
        self._cause = None
        self._stages.finish()
        if self._ready_after_s is None:
            self._ready_after_s = time.monotonic() - self._started_s
        self._notify()

    def on_step(self, event: StepOutput) -> None:
        """Hand each delta to its request; late ones of requests that are gone are dropped."""
        self._stats = event.stats
        self._steps.add(event.stats)
        self._requests.deliver(event)

    def on_failed(self, event: WorkFailed) -> None:
        """The worker failed one request."""
        self._requests.fail(event)

    def on_answer(self, event: Checked | Controlled) -> None:
        """Answer to ``check``, ``pause``, ``resume`` or ``reset_prefix_cache``."""
        command = self._questions.answer(event)
        if isinstance(command, Control) and command.action in ("pause", "resume"):
            self._paused = command.action == "pause"
            logger.info("the engine is %s", "paused" if self._paused else "resumed")
            self._notify()

    def end_incarnation(
        self,
        phase: Phase,
        error: RequestError,
        cause: str | None,
        *,
        stage: str | None = None,
        resubmit: bool = False,
    ) -> None:
        """The worker is gone: open requests get ``error``. ``stage`` is the one that failed.

        With ``resubmit``, those of which nothing was delivered yet wait for the next worker
        instead; once, so that a request that kills workers does not go on for ever.
        """
        self._phase = phase
        if cause is not None:
            self._cause = cause
            self._stages.fail(stage)
        self._stats = None
        self.worker_pid = None
        self._requests.end_worker(error, resubmit=resubmit)
        self._questions.end_worker()
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
                f"the prompt is too long: this model's maximum context length is {limit} tokens, "
                f"the prompt has {num_tokens} and leaves no room for an answer",
                param="prompt",
            )
        for index, token_id in enumerate(prompt_token_ids):
            if type(token_id) is not int:  # the worker would take the frame for a broken one
                kind = type(token_id).__name__
                raise InvalidRequest(f"prompt[{index}] must be an int, not {kind}", param="prompt")
        check_token_ids("prompt", prompt_token_ids, info.vocab_size)
        sampling.validate(info.vocab_size)

    @property
    def _text(self) -> Prompts:
        if self._prompts is None:
            raise self._not_ready()
        return self._prompts

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
                return NotReady("the engine has failed; the server's log says why")
            case _:
                return NotReady("the engine is closed")


def default_name(source: str) -> str:
    """The served name made from a source that is not inspected yet."""
    return source.rstrip("/").rsplit("/", 1)[-1].rsplit("#", 1)[-1]
