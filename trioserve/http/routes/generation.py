"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

import orjson
import trio

from trioserve.errors import ContextLengthExceeded
from trioserve.http.asgi import App
from trioserve.http.generation import ChoiceSoFar, GenerationCall, GenerationService, Order
from trioserve.http.render import Head
from trioserve.http.render_chat import ChatRenderer
from trioserve.http.render_completion import CompletionRenderer, Prompt
from trioserve.http.reply import Reply
from trioserve.http.schema import (
    CompletionRequest,
    GenerationRequest,
    Rules,
    parse_chat,
    parse_completion,
)
from trioserve.http.timings import timings_object

LOGPROBS_AT_ONCE = 4096  # of a whole answer; beyond it others would wait

B = TypeVar("B", bound=GenerationRequest)


def register(app: App) -> None:
    """Add the routes."""
    routes = GenerationRoutes(GenerationService(app.context))
    app.add_prompt_route("/v1/completions", "completions", routes.completions)
    app.add_prompt_route("/v1/chat/completions", "chat", routes.chat)


class GenerationRoutes:
    """Handlers of one app."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def completions(self) -> Reply:
        """Answer a POST to ``/v1/completions``."""
        call = self._service.open()
        body = await self._read(call, parse_completion)
        prompts = [await _tokenize(call, body, prompt) for prompt in body.prompts]
        call.submit(_order(body, prompts))
        shown = [
            await _shown_prompt(call, body, text, token_ids)
            for text, token_ids in zip(body.prompts, prompts, strict=True)
        ]
        head = self._head(f"cmpl-{call.id}", call, body, prompts)
        renderer = CompletionRenderer(head, shown, body.num_choices, scores=body.scores)
        return await _answer(call, body, renderer, self._service.context.parsing)

    async def chat(self) -> Reply:
        """Answer a POST to ``/v1/chat/completions``."""
        call = self._service.open()
        body = await self._read(call, parse_chat)
        render = functools.partial(
            call.engine.render_chat,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            chat_template=body.chat_template,
            template_kwargs=body.template_kwargs or None,
        )
        try:
            prompt = await call.run(render)
        except ContextLengthExceeded as error:
            error.param = body.prompt_field  # the engine was given a text
            raise
        prompt = _cut(prompt, body, call.engine.max_model_len)
        prompt_text = None
        if body.prompt_text:
            prompt_text = await call.run(functools.partial(call.engine.decode, prompt))
        call.submit(_order(body, [prompt]))
        renderer = ChatRenderer(
            self._head(f"chatcmpl-{call.id}", call, body, [prompt]),
            body.num_choices,
            echo=body.echo,
            prompt_token_ids=prompt,
            prompt_text=prompt_text,
        )
        return await _answer(call, body, renderer, self._service.context.parsing)

    async def _read(self, call: GenerationCall, parse: Callable[..., B]) -> B:
        http = self._service.context.config.http
        rules = Rules.of(http, call.engine.generation_defaults)
        body = await call.read(functools.partial(parse, rules=rules))
        if body.request_id:
            call.rename(body.request_id)
        return body

    def _head(
        self,
        answer_id: str,
        call: GenerationCall,
        body: GenerationRequest,
        prompts: list[list[int]],
    ) -> Head:
        return Head(
            id=answer_id,
            created=int(time.time()),
            model=call.engine.served_names[0],
            fingerprint=self._service.fingerprint(),
            num_prompt_tokens=sum(map(len, prompts)),
            shape=body.shape,
            timings=functools.partial(timings_object, call.streams),
        )


async def _tokenize(
    call: GenerationCall, body: CompletionRequest, prompt: str | list[int]
) -> list[int]:
    if isinstance(prompt, str):
        encode = functools.partial(
            call.engine.encode_prompt, prompt, add_special_tokens=body.add_special_tokens
        )
        prompt = await call.run(encode)
    return _cut(prompt, body, call.engine.max_model_len)


def _cut(prompt: list[int], body: GenerationRequest, context_length: int) -> list[int]:
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = _room_for_prompt(body, context_length)
    if len(prompt) <= most:
        return prompt
    return prompt[-most:] if body.truncation_side == "left" else prompt[:most]


def _room_for_prompt(body: GenerationRequest, context_length: int) -> int:
    """The most tokens of a prompt beside those of an answer as long as was asked for."""
    asked = body.sampling.max_tokens or 1
    if asked < context_length:
        return context_length - asked
    if body.max_tokens_field:
        raise ContextLengthExceeded(
            f"truncate_prompt_tokens = -1 keeps what {body.max_tokens_field} = {asked} leaves of"
            f" this model's maximum context length of {context_length} tokens, which is nothing."
            f" Ask for at most {context_length - 1}, or give truncate_prompt_tokens a number",
            param=body.max_tokens_field,
        )
    return context_length - 1  # a default is lowered to what there is room for


async def _shown_prompt(
    call: GenerationCall, body: CompletionRequest, prompt: str | list[int], token_ids: list[int]
) -> Prompt:
    """What the answer may show of a prompt that was submitted."""
    if not body.echo:
        return Prompt(token_ids)
    first = ""
    if body.shape.logprobs is not None:
        first = await call.run(functools.partial(call.engine.decode, token_ids[:1]))
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return Prompt(token_ids, prompt, first)
    decode = functools.partial(
        call.engine.decode, token_ids, skip_special_tokens=body.sampling.skip_special_tokens
    )
    return Prompt(token_ids, await call.run(decode), first)


def _order(body: GenerationRequest, prompts: list[list[int]]) -> Order:
    return Order(
        prompts=prompts,
        samplings=body.samplings(),
        priority=body.priority,
        cache_salt=body.cache_salt,
        prompt_field=body.prompt_field,
        max_tokens_field=body.max_tokens_field,
    )


async def _answer(
    call: GenerationCall,
    body: GenerationRequest,
    renderer: ChatRenderer | CompletionRenderer,
    threads: trio.CapacityLimiter,
) -> Reply:
    """The answer; where it has many log probabilities it is put together in a thread."""
    if body.stream:
        return await call.stream(renderer)
    choices = _shown_choices(await call.collect(), body)

    def make() -> bytes:
        return orjson.dumps(renderer.whole(choices, usage))

    usage = call.usage()
    if sum(map(_num_logprobs, choices)) <= LOGPROBS_AT_ONCE:
        return call.respond(make())
    in_thread = functools.partial(
        trio.to_thread.run_sync, make, abandon_on_cancel=True, limiter=threads
    )
    return call.respond(await call.run(in_thread))


def _num_logprobs(choice: ChoiceSoFar) -> int:
    return len(choice.logprobs) + len(choice.prompt_logprobs or ())


def _shown_choices(choices: list[ChoiceSoFar], body: GenerationRequest) -> list[ChoiceSoFar]:
    """The best ``n`` of each prompt's answers, by the mean log probability of their tokens; of
    equals the earlier. Each has what only the first was asked: the prompt's log probabilities."""
    if body.best_of == 1:
        return choices
    shown: list[ChoiceSoFar] = []
    for start in range(0, len(choices), body.best_of):
        of_prompt = choices[start : start + body.best_of]
        prompt_logprobs = of_prompt[0].prompt_logprobs
        if body.best_of > body.num_choices:
            of_prompt = sorted(of_prompt, key=_mean_logprob, reverse=True)[: body.num_choices]
        for choice in of_prompt:
            choice.prompt_logprobs = prompt_logprobs
        shown += of_prompt
    return shown


def _mean_logprob(choice: ChoiceSoFar) -> float:
    if not choice.logprobs:
        return -math.inf
    return math.fsum(token.logprob for token in choice.logprobs) / len(choice.logprobs)
