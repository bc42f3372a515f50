"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

import functools

import orjson

from trioserve.http.asgi import App
from trioserve.http.generation import GenerationCall, GenerationService, Order
from trioserve.http.messages.render import Head, MessagesRenderer
from trioserve.http.messages.schema import PromptRequest, parse_count, parse_messages
from trioserve.http.reply import Reply
from trioserve.http.request_state import request_state
from trioserve.http.sampling_fields import Rules


def register(app: App) -> None:
    """Add the routes."""
    routes = MessageRoutes(GenerationService(app.context))
    app.add_prompt_route("/v1/messages", "messages", routes.create)
    app.add_prompt_route("/v1/messages/count_tokens", "messages_count", routes.count)


class MessageRoutes:
    """Handlers of one app."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._engine = service.context.engine

    async def create(self) -> Reply:
        """Answer a POST to ``/v1/messages``."""
        call = self._service.open()
        rules = Rules.of(self._service.context.config.http, self._engine.generation_defaults)
        body = await call.read(functools.partial(parse_messages, rules=rules))
        order = Order(
            prompts=[await self._render(call, body)],
            samplings=[body.sampling],
            priority=body.priority,
            cache_salt=body.cache_salt,
            prompt_field="messages",
        )
        call.submit(order)
        head = Head(f"msg_{call.id}", self._engine.served_names[0], call.id)
        renderer = MessagesRenderer(head, call.usage)
        if body.stream:
            return _named(await call.stream(renderer), call.id)
        [choice] = await call.collect()
        text = "".join(choice.text)
        whole = renderer.whole(text, choice.finish_reason, choice.stop_reason, call.usage())
        return _named(call.respond(orjson.dumps(whole)), call.id)

    async def count(self) -> Reply:
        """How many tokens the prompt of such a body has."""
        call = self._service.open()
        request_state().accepted = None  # it asks for no text
        body = await call.read(parse_count)
        prompt = await self._render(call, body)
        return _named(call.respond(orjson.dumps({"input_tokens": len(prompt)})), call.id)

    async def _render(self, call: GenerationCall, body: PromptRequest) -> list[int]:
        render = functools.partial(
            self._engine.render_chat,
            body.messages,
            add_generation_prompt=not body.prefill,
            continue_final_message=body.prefill,
            template_kwargs=body.template_kwargs,
        )
        return await call.run(render)


def _named(reply: Reply, request_id: str) -> Reply:
    """With the header in which Anthropic's clients look for the request's id."""
    reply.headers["Request-Id"] = request_id
    return reply
