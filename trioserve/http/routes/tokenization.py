"""``/tokenize`` and ``/detokenize``, in the shapes of vLLM."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import attrs
import orjson
import trio

from trioserve.http.asgi import App
from trioserve.http.fields import Fields, decode_object
from trioserve.http.generation import GenerationService
from trioserve.http.prompt_fields import read_messages
from trioserve.http.refused import CHAT_NEUTRAL
from trioserve.http.reply import Reply
from trioserve.http.sampling_fields import Rules
from trioserve.http.schema import read_chat_kwargs, read_chat_template

MAX_TOKENS = 1_000_000  # to detokenize at once
TEXTS_AT_ONCE = 4096  # tokens looked up between two turns of the loop
CHAT_PROMPT_NEUTRAL = ("tools", "functions", "mm_processor_kwargs", "media_io_kwargs")
"""Fields of a chat that would change its prompt; refused unless they ask for nothing."""


@attrs.frozen(kw_only=True)
class TokenRequest:
    """What both bodies have in common: neither is a stream or has deadlines of its own."""

    stream: ClassVar[bool] = False
    timeout_s: ClassVar[float] = math.inf
    queue_timeout_s: ClassVar[float] = math.inf

    model: str
    ignored: tuple[str, ...]


@attrs.frozen(kw_only=True)
class TokenizeRequest(TokenRequest):
    """Body of ``/tokenize``: a prompt, or a chat where ``messages`` is not None."""

    prompt: str
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool
    return_token_strs: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]


@attrs.frozen(kw_only=True)
class DetokenizeRequest(TokenRequest):
    """Body of ``/detokenize``."""

    tokens: list[int]


def parse_tokenize(raw: bytes, rules: Rules | None = None) -> TokenizeRequest:
    """Decode and check a body of ``/tokenize``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    is_chat, is_text = (fields.value(name) is not None for name in ("messages", "prompt"))
    if is_chat and is_text:
        fields.fault("prompt", "and messages are both given; give one of them")
    elif not is_chat and not is_text:
        fields.fault("prompt", "is missing; give a string, or messages in its place")
    request: dict[str, Any] = {
        "model": fields.string("model"),
        "prompt": fields.string("prompt"),
        "add_special_tokens": fields.boolean("add_special_tokens", not is_chat),
        "return_token_strs": fields.boolean("return_token_strs"),
        **(_read_chat(fields, rules or Rules()) if is_chat else _NO_CHAT),
    }
    fields.raise_faults()
    return TokenizeRequest(ignored=fields.unknown(), **request)


_NO_CHAT: dict[str, Any] = {
    "messages": None,
    "add_generation_prompt": False,
    "continue_final_message": False,
    "chat_template": None,
    "template_kwargs": {},
}


def _read_chat(fields: Fields, rules: Rules) -> dict[str, Any]:
    """What makes the prompt of a chat, as ``/v1/chat/completions`` takes it."""
    continues = fields.boolean("continue_final_message")
    opens = fields.boolean("add_generation_prompt", not continues)
    if continues and opens:
        fields.fault("continue_final_message", "contradicts add_generation_prompt; give one")
    for name in CHAT_PROMPT_NEUTRAL:
        fields.neutral(name, CHAT_NEUTRAL[name])
    return {
        "messages": read_messages(fields),
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "chat_template": read_chat_template(fields, rules),
        "template_kwargs": read_chat_kwargs(fields),
    }


def parse_detokenize(raw: bytes) -> DetokenizeRequest:
    """Decode and check a body of ``/detokenize``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    if fields.value("tokens") is None:
        fields.fault("tokens", "is missing; give an array of token ids")
    tokens = list(fields.integers("tokens", max_items=MAX_TOKENS))
    model = fields.string("model")
    fields.raise_faults()
    return DetokenizeRequest(model=model, tokens=tokens, ignored=fields.unknown())


def register(app: App) -> None:
    """Add the routes."""
    routes = TokenRoutes(GenerationService(app.context))
    app.add_prompt_route("/tokenize", "tokenize", routes.tokenize)
    app.add_prompt_route("/detokenize", "detokenize", routes.detokenize)


class TokenRoutes:
    """Handlers of one app."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._engine = service.context.engine

    async def tokenize(self) -> Reply:
        """The token ids of a text, or of a chat as the model gets it."""
        call = self._service.open()
        http = self._service.context.config.http
        rules = Rules.of(http, self._engine.generation_defaults)
        body = await call.read(functools.partial(parse_tokenize, rules=rules))
        tokens = await call.run(functools.partial(self._encode, body))
        texts = None
        if body.return_token_strs:
            texts = await call.run(functools.partial(self._texts, tokens))
        answer = {
            "count": len(tokens),
            "max_model_len": self._engine.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
        return call.respond(orjson.dumps(answer))

    async def detokenize(self) -> Reply:
        """The text of token ids."""
        call = self._service.open()
        body = await call.read(parse_detokenize)
        prompt = await call.run(functools.partial(self._engine.decode, body.tokens))
        return call.respond(orjson.dumps({"prompt": prompt}))

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            return await self._engine.encode_prompt(
                body.prompt, add_special_tokens=body.add_special_tokens
            )
        return await self._engine.render_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            chat_template=body.chat_template,
            template_kwargs=body.template_kwargs,
        )

    async def _texts(self, tokens: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them. Cancellation leaves nothing behind."""
        texts: list[str] = []
        for start in range(0, len(tokens), TEXTS_AT_ONCE):
            texts += map(self._engine.token_text, tokens[start : start + TEXTS_AT_ONCE])
            await trio.lowlevel.checkpoint()
        return texts
