"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import functools
import time

import orjson
from quart import Response

from trioserve.http.asgi import App
from trioserve.http.generation import GenerationCall, GenerationService, Order
from trioserve.http.render import ChatRenderer, CompletionRenderer, Head
from trioserve.http.schema import GenerationRequest, parse_chat, parse_completion


def register(app: App) -> None:
    """Add the routes."""
    routes = GenerationRoutes(GenerationService(app.context))
    app.add_url_rule("/v1/completions", view_func=routes.completions, methods=["POST"])
    app.add_url_rule("/v1/chat/completions", view_func=routes.chat, methods=["POST"])


class GenerationRoutes:
    """Handlers of one app."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def completions(self) -> Response:
        """Answer a POST to ``/v1/completions``."""
        call = self._service.open()
        body = await call.read(parse_completion)
        prompts: list[list[int]] = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                encode = functools.partial(
                    call.engine.encode_prompt, prompt, add_special_tokens=body.add_special_tokens
                )
                prompts.append(await call.run(encode))
            else:
                prompts.append(prompt)
        echoes = [
            prompt if body.echo and isinstance(prompt, str) else ""
            for prompt in body.prompts
            for _ in range(body.num_choices)
        ]
        call.submit(_order(body, prompts))
        renderer = CompletionRenderer(_head(f"cmpl-{call.id}", call, body), echoes)
        return await _answer(call, body, renderer)

    async def chat(self) -> Response:
        """Answer a POST to ``/v1/chat/completions``."""
        call = self._service.open()
        body = await call.read(parse_chat)
        render = functools.partial(
            call.engine.render_chat,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.template_kwargs,
        )
        prompt = await call.run(render)
        call.submit(_order(body, [prompt]))
        renderer = ChatRenderer(_head(f"chatcmpl-{call.id}", call, body), body.num_choices)
        return await _answer(call, body, renderer)


def _order(body: GenerationRequest, prompts: list[list[int]]) -> Order:
    return Order(
        prompts=prompts,
        samplings=[body.sampling_of(choice) for choice in range(body.num_choices)],
        priority=body.priority,
        cache_salt=body.cache_salt,
        prompt_field=body.prompt_field,
    )


def _head(answer_id: str, call: GenerationCall, body: GenerationRequest) -> Head:
    return Head(
        id=answer_id,
        created=int(time.time()),
        model=call.engine.served_names[0],
        with_usage=body.include_usage,
        want_logprobs=body.sampling.logprobs is not None,
    )


async def _answer(
    call: GenerationCall, body: GenerationRequest, renderer: ChatRenderer | CompletionRenderer
) -> Response:
    if body.stream:
        return await call.stream(renderer)
    choices = await call.collect()
    return call.respond(orjson.dumps(renderer.whole(choices, call.usage())))
