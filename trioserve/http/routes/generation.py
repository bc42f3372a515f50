"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

import orjson
import trio
from quart import Response, request

from trioserve.engine.api import Phase, RequestStream
from trioserve.errors import ContextLengthExceeded, InvalidRequest, NotReady
from trioserve.http.asgi import App, AppContext, RequestState
from trioserve.http.errors import JSON, WrongMediaType, unknown_model
from trioserve.http.open_requests import Answers, Limits, OpenRequest, refuse_abort
from trioserve.http.render import (
    ChatRenderer,
    ChoiceSoFar,
    CompletionRenderer,
    Head,
    total_usage,
)
from trioserve.http.routes import request_state
from trioserve.http.schema import (
    GenerationRequest,
    parse_chat,
    parse_completion,
    replace_sampling,
)
from trioserve.http.sse import HEADERS, EventStream, StreamResponse
from trioserve.http.watch import Watch

log = logging.getLogger(__name__)

LARGE_BODY_BYTES = 256 * 1024  # parsed in a thread from here on
MAX_LOGGED = 200  # characters of client-chosen names in a log line or header

B = TypeVar("B", bound=GenerationRequest)
Renderers = ChatRenderer | CompletionRenderer


def register(app: App) -> None:
    """Add the routes."""
    routes = GenerationRoutes(app.context)
    app.add_url_rule("/v1/completions", view_func=routes.completions, methods=["POST"])
    app.add_url_rule("/v1/chat/completions", view_func=routes.chat, methods=["POST"])


class GenerationRoutes:
    """Handlers of one app."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._engine = context.engine
        http = context.config.http
        self._limits = Limits(http.request_timeout_s or math.inf, http.queue_timeout_s or math.inf)

    async def completions(self) -> Response:
        """Answer a POST to ``/v1/completions``."""
        state, opened = self._open()
        body = await self._body(state, opened, parse_completion)
        prompts: list[list[int]] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                encode = functools.partial(
                    self._engine.encode_prompt, prompt, add_special_tokens=body.add_special_tokens
                )
                prompts.append(await opened.run(encode))
            else:
                prompts.append(prompt)
        echoes = [
            prompt if body.echo and isinstance(prompt, str) else ""
            for prompt in body.prompts
            for _ in range(body.num_choices)
        ]
        head = self._head(f"cmpl-{state.id}", body)
        return await self._answer(state, opened, body, prompts, CompletionRenderer(head, echoes))

    async def chat(self) -> Response:
        """Answer a POST to ``/v1/chat/completions``."""
        state, opened = self._open()
        body = await self._body(state, opened, parse_chat)
        render = functools.partial(
            self._engine.render_chat,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.template_kwargs,
        )
        prompt = await opened.run(render)
        renderer = ChatRenderer(self._head(f"chatcmpl-{state.id}", body), body.num_choices)
        return await self._answer(state, opened, body, [prompt], renderer)

    # ------------------------------------------------------------------------ before submit

    def _open(self) -> tuple[RequestState, OpenRequest]:
        """Count the request as open until its ASGI call ends; refuse it while not ready."""
        if self._context.stopping.is_set():
            raise NotReady("the server is shutting down; send the request to another")
        status = self._engine.status
        if status.phase is not Phase.READY:
            raise NotReady(f"the model is not ready ({status.phase.value}); see /startup")
        state = request_state()
        return state, state.lifetime.enter_context(self._context.open_requests.opened())

    async def _body(
        self, state: RequestState, opened: OpenRequest, parse: Callable[[bytes], B]
    ) -> B:
        """Read and check the body, and settle what happens if the client leaves."""
        _check_media_type()
        raw = await opened.run(functools.partial(request.get_data, False))
        assert isinstance(raw, bytes)
        if len(raw) < LARGE_BODY_BYTES:
            body = parse(raw)
        else:
            in_thread = functools.partial(
                trio.to_thread.run_sync,
                parse,
                raw,
                abandon_on_cancel=True,
                limiter=self._context.parsing,
            )
            body = await opened.run(in_thread)
        state.exchange.declare(streams=body.stream)
        limits = self._limits.at_most(Limits(body.timeout_s, body.queue_timeout_s))
        if limits.any:
            assert state.nursery is not None
            state.nursery.start_soon(opened.keep, limits)
        if body.model and body.model not in self._engine.served_names:
            raise unknown_model(body.model, self._engine.served_names)
        if body.ignored:
            log.info("request %s: unknown fields ignored: %s", state.id, _names(body.ignored))
        return body

    def _head(self, answer_id: str, body: GenerationRequest) -> Head:
        return Head(
            id=answer_id,
            created=int(time.time()),
            model=self._engine.served_names[0],
            with_usage=body.include_usage,
            want_logprobs=body.sampling.logprobs is not None,
        )

    def _submit(
        self,
        state: RequestState,
        opened: OpenRequest,
        body: GenerationRequest,
        prompts: list[list[int]],
    ) -> list[RequestStream]:
        """Submit each prompt ``num_choices`` times; what was submitted ends with the request."""
        opened.check()
        self._check_num_answers(body, len(prompts))
        streams = opened.streams
        for prompt in prompts:
            room = self._engine.max_model_len - len(prompt)
            if room < 1:
                raise ContextLengthExceeded(
                    f"the prompt has {len(prompt)} tokens and the context"
                    f" {self._engine.max_model_len}, which leaves no room for an answer; shorten"
                    " it",
                    param=body.prompt_field,
                )
            for choice in range(body.num_choices):
                sampling = body.sampling_of(choice)
                if sampling.max_tokens is not None and sampling.max_tokens > room:
                    min_tokens = min(sampling.min_tokens, room)
                    sampling = replace_sampling(sampling, max_tokens=room, min_tokens=min_tokens)
                stream = self._engine.submit(
                    prompt, sampling, priority=body.priority, cache_salt=body.cache_salt
                )
                state.lifetime.callback(stream.close)
                streams.append(stream)
        return streams

    def _check_num_answers(self, body: GenerationRequest, num_prompts: int) -> None:
        # Refused by the queue it would be tried again for ever.
        scheduler = self._context.config.scheduler
        most = scheduler.max_num_seqs + scheduler.max_waiting
        if num_prompts * body.num_choices > most:
            raise InvalidRequest(
                f"{num_prompts} prompts with n = {body.num_choices} are more than the {most}"
                " answers this server takes at once; split the request",
                param="n" if num_prompts == 1 else body.prompt_field,
            )

    # ------------------------------------------------------------------------- after submit

    async def _answer(
        self,
        state: RequestState,
        opened: OpenRequest,
        body: GenerationRequest,
        prompts: list[list[int]],
        renderer: Renderers,
    ) -> Response:
        streams = self._submit(state, opened, body, prompts)
        num_prompt_tokens = sum(map(len, prompts))
        watch = Watch(self._context.metrics, len(streams), num_prompt_tokens)
        state.lifetime.callback(watch.end)
        with watch.failures():
            if body.stream:
                response = await self._stream(state, opened, body, streams, renderer, watch)
            else:
                collect = functools.partial(_collect_all, streams, watch)
                choices = await opened.run(collect)
                usage = total_usage(streams, body.num_choices)
                response = Response(orjson.dumps(renderer.whole(choices, usage)), content_type=JSON)
        if body.ignored:
            response.headers["X-Trioserve-Ignored-Fields"] = _names(body.ignored)
        return response

    async def _stream(
        self,
        state: RequestState,
        opened: OpenRequest,
        body: GenerationRequest,
        streams: list[RequestStream],
        renderer: Renderers,
        watch: Watch,
    ) -> Response:
        """Wait for the first delta, so that an early failure has a status of its own.

        Silence for a heartbeat, or a client that ended its sending, begin the response without
        one: then only writing tells whether the client is still there.
        """
        assert state.nursery is not None
        answers = Answers(streams, state.nursery)
        exchange = state.exchange
        exchange.on_half_close = opened.wake
        if exchange.half_closed:
            opened.wake()
        heartbeat_s = self._context.config.http.heartbeat_s
        first = await opened.first_event(answers, heartbeat_s)
        stream = EventStream(
            answers,
            renderer,
            opened,
            exchange,
            heartbeat_s=heartbeat_s,
            first=first,
            usage=(lambda: total_usage(streams, body.num_choices)) if body.include_usage else None,
            watch=watch,
        )
        return StreamResponse(stream, headers=HEADERS)


async def _collect_all(streams: list[RequestStream], watch: Watch) -> list[ChoiceSoFar]:
    """Read all streams to their ends; one after the other, for none waits for its reader."""
    choices = []
    for stream in streams:
        choice = ChoiceSoFar()
        async for delta in stream:
            refuse_abort(delta)
            watch.delta(delta)
            choice.add(delta)
        choices.append(choice)
    return choices


def _check_media_type() -> None:
    kind = request.mimetype
    if kind and kind != JSON and not kind.endswith("+json"):
        raise WrongMediaType(f"the body must be application/json, not {kind[:100]}")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise WrongMediaType(f"the body must be UTF-8, not {charset[:100]}")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise WrongMediaType("compressed bodies are not supported; send it as it is")


def _names(names: tuple[str, ...]) -> str:
    """Names chosen by a client as printable ASCII of bounded length."""
    text = ", ".join(ascii(name)[1:-1] for name in names)
    return text if len(text) <= MAX_LOGGED else text[: MAX_LOGGED - 3] + "..."
