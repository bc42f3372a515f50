"""Fields that ``/v1/responses`` and ``/v1/messages`` have beside those of their APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioserve.http.fields import Fields
from trioserve.http.refused import Neutral
from trioserve.http.sampling_fields import MAX_INT
from trioserve.http.schema import MAX_TIMEOUT_S, MIN_TIMEOUT_S

MAX_SALT = 128  # characters


def is_one_of(*neutral: Any) -> Callable[[Any], bool]:
    """Equal to one of the values, in type as well."""
    return lambda value: any(type(value) is type(one) and value == one for one in neutral)


ELSEWHERE: Neutral = {
    "add_generation_prompt": is_one_of(True),
    "add_special_tokens": is_one_of(False),
    "best_of": is_one_of(1),
    "chat_template": is_one_of(),
    "continue_final_message": is_one_of(False),
    "documents": is_one_of([]),
    "echo": is_one_of(False),
    "include_timings": is_one_of(False),
    "logprobs": is_one_of(False),
    "n": is_one_of(1),
    "prompt_logprobs": is_one_of(),
    "reasoning_effort": is_one_of(),
    "request_id": is_one_of(),
    "return_prompt_text": is_one_of(False),
    "return_token_ids": is_one_of(False),
    "return_tokens_as_token_ids": is_one_of(False),
    "truncate_prompt_tokens": is_one_of(),
}
"""Fields honoured by other routes: refused here unless their value asks for nothing."""


def read_call(fields: Fields) -> dict[str, Any]:
    """What the engine and the server are told about a request, as arguments of its class."""
    return {
        "model": fields.string("model"),
        "stream": fields.boolean("stream"),
        "priority": fields.integer("priority", 0, low=-MAX_INT - 1, high=MAX_INT),
        "cache_salt": fields.string("cache_salt", max_chars=MAX_SALT),
        "timeout_s": _timeout(fields, "timeout_s"),
        "queue_timeout_s": _timeout(fields, "queue_timeout_s"),
    }


def read_template_kwargs(fields: Fields, effort: str | None) -> dict[str, Any] | None:
    """Variables of the chat template; those of ``chat_template_kwargs`` stand above others."""
    kwargs: dict[str, Any] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    if effort == "none":
        kwargs["enable_thinking"] = False  # as those templates call it that can do without
    given = fields.value("chat_template_kwargs")
    if isinstance(given, dict):
        kwargs |= given
    elif given is not None:
        fields.object("chat_template_kwargs")  # notes the fault
    return kwargs or None


def _timeout(fields: Fields, name: str) -> float:
    return fields.number(name, float("inf"), low=MIN_TIMEOUT_S, high=MAX_TIMEOUT_S)
