"""Known fields that are not supported: refused unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioserve.http.fields import Fields

Neutral = dict[str, Callable[[Any], bool]]


def _is(*neutral: Any) -> Callable[[Any], bool]:
    """Equal to one of the values, in type as well, except that 0 and 0.0 are the same."""

    def check(value: Any) -> bool:
        return any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in neutral
        )

    return check


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


SHARED_NEUTRAL: Neutral = {
    "length_penalty": _is(1),
    "response_format": _is_text_format,
    "structured_outputs": _is({}),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_choice": _is(),
    "guided_grammar": _is(),
    "use_beam_search": _is(False),
    "early_stopping": _is(False),
    "spaces_between_special_tokens": _is(True),
    "repetition_detection": _is(),
    "stream_interval": _is(1),
    "return_token_offsets": _is(False),
    "service_tier": _is("auto", "default"),
    "kv_transfer_params": _is({}),
    "ec_transfer_params": _is({}),
    "vllm_xargs": _is({}),
    "watermarking": _is({}, False),
    "routed_experts_prompt_start": _is(),
}
"""Fields of both routes, with what their values may be beside null."""

COMPLETION_NEUTRAL: Neutral = {
    "suffix": _is(""),
    "prompt_embeds": _is(),
}

CHAT_NEUTRAL: Neutral = {
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
    "verbosity": _is("medium"),
    "web_search_options": _is(),
    "moderation": _is(),
    "store": _is(False),
    "best_of": _is(1),
    "thinking_token_budget": _is(),
    "media_io_kwargs": _is({}),
    "mm_processor_kwargs": _is({}),
    "mm_payload": _is({}),
}

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "parallel_tool_calls",
    "include_reasoning",
    "session_id",
)
"""Known fields that change no answer here: passed over without a word."""


def read_refused(fields: Fields, neutral: Neutral) -> None:
    """Note a fault for each of the fields that asks for something.

    Args:
        fields: of a whole body, all honoured ones read.
        neutral: the table of the route.
    """
    for name in fields.unread():
        is_neutral = SHARED_NEUTRAL.get(name) or neutral.get(name)
        if is_neutral is not None:
            fields.neutral(name, is_neutral)
        elif name in WITHOUT_EFFECT:
            fields.value(name)
