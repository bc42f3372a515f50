"""From a conversation's items to token ids, with or without its oldest items."""

from __future__ import annotations

from trioserve.engine.api import EngineApi
from trioserve.errors import ContextLengthExceeded, InvalidRequest
from trioserve.http.responses.items import Item, chat_messages
from trioserve.http.responses.schema import ResponsesRequest

ANSWER_SHARE = 8  # of the context, one part is left to an answer whose length was not given


async def fit_prompt(engine: EngineApi, body: ResponsesRequest, items: list[Item]) -> list[int]:
    """Token ids of a conversation.

    If it leaves no room for an answer and ``body.truncate`` is set, as few of its oldest items as
    possible are left out; the last and the instructions never are. A search by halves takes a
    logarithm of renderings. Cancellation abandons the work.

    Raises:
        ContextLengthExceeded: it is too long, and nothing may be left out or the last item alone
            is too long.
        InvalidRequest: the template refuses it.
        NotReady: the model is not loaded.
    """
    limit = engine.max_model_len
    if not body.truncate:
        return await _render(engine, body, items)
    whole = await _render_up_to(engine, body, items, limit - 1)
    if whole is not None:
        return whole
    most = limit - max(1, min(body.max_output_tokens or limit // ANSWER_SHARE, limit - 1))
    # Leaving out [0, low) is too little; leaving out [0, high) is enough, or all that can be.
    low, high = 0, len(items) - 1
    best: list[int] | None = None
    while high - low > 1:
        middle = (low + high) // 2
        fitting = await _render_up_to(engine, body, items[middle:], most)
        if fitting is not None:
            high, best = middle, fitting
        else:
            low = middle
    return best if best is not None else await _render(engine, body, items[-1:])


async def _render_up_to(
    engine: EngineApi, body: ResponsesRequest, items: list[Item], most: int
) -> list[int] | None:
    """The token ids, or None if they are more than ``most``."""
    try:
        prompt = await _render(engine, body, items)
    except ContextLengthExceeded:
        return None
    return prompt if len(prompt) <= most else None


async def _render(engine: EngineApi, body: ResponsesRequest, items: list[Item]) -> list[int]:
    messages = chat_messages(body.instructions, items)
    try:
        return await engine.render_chat(messages, template_kwargs=body.template_kwargs)
    except InvalidRequest as error:
        if error.param in ("messages", "prompt"):
            error.param = "input"
        raise
