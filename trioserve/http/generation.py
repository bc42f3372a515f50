"""Answering a request with generated text: all that does not depend on the API it came by.

A route opens a call, reads its body, makes token ids of its prompts, submits them, and then either
collects the whole answer or streams it through a renderer of its API.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import attrs
import msgspec

from trioserve.engine.api import EngineApi, Phase, RequestStream, TextDelta, TokenLogprob, Usage
from trioserve.errors import ContextLengthExceeded, InvalidRequest, NotReady
from trioserve.http.answer_size import check_num_logprobs
from trioserve.http.asgi import AppContext
from trioserve.http.bodies import printable_names, read_body, read_small
from trioserve.http.errors import InvalidBody, unknown_model
from trioserve.http.fields import MAX_FAULTS, MAX_SHOWN
from trioserve.http.fingerprint import system_fingerprint
from trioserve.http.open_requests import Answers, Limits, OpenRequest, refuse_abort
from trioserve.http.reply import Reply
from trioserve.http.request_state import RequestState, request_state
from trioserve.http.sse import HEADERS, EventStream, Renderer
from trioserve.http.watch import Watch
from trioserve.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class Body(Protocol):
    """What every parsed body has.

    ``model`` is empty for the served one; times are infinite where they were not given;
    ``ignored`` are names of unknown fields.
    """

    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def queue_timeout_s(self) -> float: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...


B = TypeVar("B", bound=Body)
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Order:
    """What is asked of the engine.

    Attributes:
        prompts: token ids of each prompt.
        samplings: one for each answer to a prompt; all prompts get the same.
        prompt_field: the field to name if a prompt is too long, or there are too many.
        max_tokens_field: the field to name if more tokens are asked for than there is room; empty
            where they were not asked for, so that they are lowered whatever the setting.
    """

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    priority: int = 0
    cache_salt: str = ""
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(map(len, self.prompts))


@attrs.define
class ChoiceSoFar:
    """One choice of a whole answer while it is collected."""

    text: list[str] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Take in a delta."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class GenerationService:
    """Opens the calls of one app."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        http = context.config.http
        self._fingerprint: str | None = None
        self.limits = Limits(http.request_timeout_s or math.inf, http.queue_timeout_s or math.inf)

    def fingerprint(self) -> str:
        """``system_fingerprint`` of every answer; only once the model is ready."""
        if self._fingerprint is None:
            self._fingerprint = system_fingerprint(self.context.engine.status)
        return self._fingerprint

    def open(self) -> GenerationCall:
        """Count the present request as open until its ASGI call ends.

        Raises:
            NotReady: the model is not ready, or the server shuts down.
        """
        context, state = self.context, request_state()
        state.accepted = False
        if context.stopping.is_set():
            raise NotReady("the server is shutting down; send the request to another")
        phase = context.engine.phase  # a whole status is dear
        if phase is not Phase.READY:
            raise NotReady(f"the model is not ready ({phase.value}); see /startup")
        opened = state.lifetime.enter_context(context.open_requests.opened(state.id))
        return GenerationCall(self, state, opened)


class GenerationCall:
    """One request, from its head to its answer. Used by the task of its handler alone.

    Its methods are called in this order: ``read``, ``run`` at will, ``submit``, then ``collect``
    and ``respond``, or ``stream``.

    Attributes:
        id: the request's id.
        streams: what was submitted, prompt by prompt.
    """

    def __init__(
        self, service: GenerationService, state: RequestState, opened: OpenRequest
    ) -> None:
        self._service = service
        self._context = service.context
        self._state = state
        self._opened = opened
        self._ignored: tuple[str, ...] = ()
        self._num_samplings = 1
        self._watch: Watch | None = None
        self.id = state.id
        self.streams = opened.streams

    @property
    def engine(self) -> EngineApi:
        """What answers."""
        return self._context.engine

    async def read(self, parse: Callable[[bytes], B]) -> B:
        """Read and check the body, and settle what happens if the client leaves.

        Raises:
            RequestError: the body is refused, its model is not served, or what ended the request.
        """
        self._opened.check()
        body = read_small(self._state, parse)  # most are, and a wait costs more than that
        if body is None:
            read = functools.partial(read_body, self._state, parse, self._context.parsing)
            body = await self.run(read)
        self._state.exchange.declare(streams=body.stream)
        limits = self._service.limits.at_most(Limits(body.timeout_s, body.queue_timeout_s))
        if limits.any:
            (await self._state.nursery()).start_soon(self._opened.keep, limits)
        if body.model and body.model not in self.engine.served_names:
            raise unknown_model(body.model, self.engine.served_names)
        self._ignored = body.ignored
        if self._ignored and self._context.config.http.strict_fields:
            fault = "is not a known field; leave it out, or set http.strict_fields = false"
            raise InvalidBody([(name[:MAX_SHOWN], fault) for name in self._ignored[:MAX_FAULTS]])
        return body

    def call_answer(self, id: str) -> None:
        """Have the open request found by ``id`` too, which its answer has."""
        self._opened.other_id = id

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()``; a deadline, a drain and a client that leaves cancel it.

        Raises:
            RequestError: what ended the request.
        """
        return await self._opened.run(work)

    def rename(self, id: str) -> None:
        """Give the request the id its body asks for, unless it came with one as a header."""
        if self._state.header(b"x-request-id") != self.id:
            self.id = self._state.id = self._opened.id = id

    def submit(self, order: Order) -> None:
        """Submit each prompt once per sampling; what was submitted ends with the request.

        Raises:
            RequestError: the engine refused one, or the request was ended.
        """
        self._opened.check()
        if self._ignored:
            names = printable_names(self._ignored)
            log.info("request %s: unknown fields ignored: %s", self.id, names)
        self._check_num_answers(order)
        check_num_logprobs(
            order.prompts,
            order.samplings,
            max_model_len=self.engine.max_model_len,
            most=self._context.config.http.max_answer_logprobs,
        )
        if order.priority and self._context.config.scheduler.policy != "priority":
            raise InvalidRequest(
                'priority: scheduler.policy is "fcfs" here, so there is none but 0; leave it out',
                param="priority",
            )
        self._num_samplings = len(order.samplings)
        for number, prompt in enumerate(order.prompts):
            try:
                self._submit_prompt(prompt, order)
            except InvalidRequest as error:
                if len(order.prompts) > 1 and error.param == order.prompt_field:
                    _name_prompt(error, number)
                raise
        self._watch = Watch(
            self._context.metrics,
            len(self.streams),
            order.num_prompt_tokens,
            streams=self.streams,
            samplings=order.samplings,
            streamed=bool(self._state.exchange.streams),
            trace=self._state.trace,
        )
        self._state.accepted = True
        self._state.lifetime.callback(self._watch.end)

    def _submit_prompt(self, prompt: list[int], order: Order) -> None:
        room = self._room(prompt, order)
        for sampling in order.samplings:
            stream = self._submit_one(prompt, self._fitting(sampling, room, order), order)
            if self._state.record is not None:
                stream = self._state.record.follow(stream, prompt)
            self._state.lifetime.callback(stream.close)
            self.streams.append(stream)

    def _submit_one(
        self, prompt: list[int], sampling: SamplingParams, order: Order
    ) -> RequestStream:
        try:
            return self.engine.submit(
                prompt, sampling, priority=order.priority, cache_salt=order.cache_salt
            )
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = order.prompt_field
            raise

    def _check_num_answers(self, order: Order) -> None:
        # Refused by the queue it would be tried again for ever.
        scheduler = self._context.config.scheduler
        most = scheduler.max_num_seqs + scheduler.max_waiting
        num_prompts, num_choices = len(order.prompts), len(order.samplings)
        if num_prompts * num_choices > most:
            raise InvalidRequest(
                f"{num_prompts} prompts with n = {num_choices} are more than the {most}"
                " answers this server takes at once; split the request",
                param="n" if num_prompts == 1 else order.prompt_field,
            )

    def _room(self, prompt: list[int], order: Order) -> int:
        context_length = self.engine.max_model_len
        room = context_length - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt is too long: this model's maximum context length is {context_length}"
                f" tokens, the prompt has {len(prompt)} and leaves no room for an answer",
                param=order.prompt_field,
            )
        return room

    def _fitting(self, sampling: SamplingParams, room: int, order: Order) -> SamplingParams:
        asked = sampling.max_tokens
        if asked is None or asked <= room:
            return sampling
        if order.max_tokens_field and self._context.config.http.max_tokens_policy == "refuse":
            context_length = self.engine.max_model_len
            num_tokens = context_length - room
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context_length} tokens; the prompt has"
                f" {num_tokens} and {order.max_tokens_field} is {asked}, together"
                f" {num_tokens + asked}. Shorten the prompt, or ask for at most {room}",
                param=order.max_tokens_field,
            )
        min_tokens = min(sampling.min_tokens, room)
        return msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min_tokens)

    def usage(self) -> Usage:
        """What was delivered so far: each prompt counted once, all answers summed."""
        prompt = cached = 0
        for stream in self.streams[:: self._num_samplings]:
            prompt += stream.usage.prompt_tokens
            cached += stream.usage.cached_tokens
        completion = sum(stream.usage.completion_tokens for stream in self.streams)
        return Usage(prompt, completion, cached)

    async def collect(self) -> list[ChoiceSoFar]:
        """The whole answers, in the order of ``streams``.

        Raises:
            RequestError: an answer failed, or what ended the request.
        """
        assert self._watch is not None
        with self._watch.failures():
            return await self.run(functools.partial(_collect_all, self.streams, self._watch))

    def respond(self, body: bytes) -> Reply:
        """The reply with a whole answer: ``body`` is JSON."""
        return self._finished(Reply(body))

    async def stream(self, renderer: Renderer) -> Reply:
        """The reply whose body are the ``events``; raises what they raise."""
        return self._finished(Reply(await self.events(renderer), headers=dict(HEADERS)))

    async def events(self, renderer: Renderer) -> EventStream:
        """The streamed answer, whose events ``renderer`` makes.

        Waits for the first delta, so that an early failure has a status of its own. Silence for a
        heartbeat, or a client that ended its sending, begin the answer without one: then only
        writing tells whether the client is still there.

        Raises:
            RequestError: an answer failed before its first delta, or what ended the request.
        """
        state, opened, watch = self._state, self._opened, self._watch
        assert watch is not None
        answers = await Answers.open(self.streams, state.nursery)
        state.exchange.on_half_close = opened.wake
        if state.exchange.half_closed:
            opened.wake()
        heartbeat_s = self._context.config.http.heartbeat_s
        with watch.failures():
            first = await opened.first_event(answers, heartbeat_s)
        return EventStream(
            answers,
            renderer,
            opened,
            state.exchange,
            heartbeat_s=heartbeat_s,
            first=first,
            usage=self.usage,
            watch=watch,
        )

    def _finished(self, reply: Reply) -> Reply:
        if self._ignored:
            reply.headers["X-Trioserve-Ignored-Fields"] = printable_names(self._ignored)
        return reply


def _name_prompt(error: InvalidRequest, number: int) -> None:
    """Have ``error``, which is about one of several prompts, say about which."""
    name, place = error.param, f"{error.param}[{number}]"
    if error.message.startswith(f"{name}["):
        error.message = place + error.message.removeprefix(f"{name}")
    else:
        error.message = f"{place}: {error.message}"
    error.param = place


async def _collect_all(streams: list[RequestStream], watch: Watch) -> list[ChoiceSoFar]:
    """Read all streams to their ends; one after the other, for none waits for its reader."""
    choices = []
    for index, stream in enumerate(streams):
        choice = ChoiceSoFar()
        async for delta in stream:
            refuse_abort(delta)
            watch.delta(delta, index)
            choice.add(delta)
        choices.append(choice)
    return choices
