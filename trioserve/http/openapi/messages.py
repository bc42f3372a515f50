"""Description of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

from trioserve.http.messages.errors import TYPES
from trioserve.http.messages.schema import ROLES, WITHOUT_EFFECT
from trioserve.http.openapi import requests
from trioserve.http.openapi.requests import (
    EMPTY_ARRAY,
    EMPTY_OBJECT,
    KWARGS,
    NOTHING,
    of_type,
    only,
)
from trioserve.http.openapi.shapes import (
    GENERATION_ERRORS,
    Schema,
    anything,
    array,
    body,
    boolean,
    const,
    enum,
    integer,
    json_answer,
    json_or_events,
    nullable,
    obj,
    one_of,
    operation,
    ref,
    string,
)
from trioserve.http.prompt_fields import MAX_MESSAGES
from trioserve.http.sampling_fields import MAX_INT, Rules

ERROR = "AnthropicError"

_TEXT = one_of(string(), array(obj({"type": const("text"), "text": string()})))
_PROMPT_REQUIRED: dict[str, Schema] = {
    "model": string("A served name, or empty for the one served."),
    "messages": array(
        obj({"role": enum(ROLES), "content": _TEXT}),
        "Those of one role in a row are one turn; a last one of the assistant's is gone on with.",
        minItems=1,
        maxItems=MAX_MESSAGES,
    ),
}
_PROMPT_OPTIONAL: dict[str, Schema] = {
    "system": _TEXT,
    "chat_template_kwargs": KWARGS,
}
_IGNORED = requests.IGNORED | {name: anything("Changes no answer here.") for name in WITHOUT_EFFECT}
_COUNT_NEUTRAL: dict[str, Schema] = {
    **requests.NEUTRAL,
    **requests.ELSEWHERE,
    "thinking": of_type("disabled"),
    "tools": EMPTY_ARRAY,
    "tool_choice": of_type("auto", "none"),
    "output_config": EMPTY_OBJECT,
    "mcp_servers": EMPTY_ARRAY,
    "context_management": EMPTY_OBJECT,
    "speed": only("standard"),
}
_NEUTRAL: dict[str, Schema] = {
    **_COUNT_NEUTRAL,
    "container": NOTHING,
    "inference_geo": NOTHING,
    "diagnostics": EMPTY_OBJECT,
}

_STOP = {
    "stop_reason": nullable(enum(["end_turn", "max_tokens", "stop_sequence"])),
    "stop_sequence": nullable(string("The one that matched.")),
}
_USAGE = obj(
    {
        "input_tokens": integer("Those read from the cache are not among them.", 0),
        "cache_creation_input_tokens": const(0),
        "cache_read_input_tokens": integer(low=0),
        "output_tokens": integer(low=0),
    }
)
_BLOCK = obj({"type": const("text"), "text": string()})


def _event(name: str, **fields: Schema) -> Schema:
    return obj({"type": const(name), **fields})


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes, with the limits that the operator set."""
    stop = string(minLength=1)
    return {
        "MessagesRequest": body(
            {**_PROMPT_REQUIRED, "max_tokens": integer("Longest answer.", 1, MAX_INT)},
            {
                **_PROMPT_OPTIONAL,
                **requests.sampling(rules),
                **requests.scheduling(),
                "stream": boolean("Answer as server-sent events.", default=False),
                "stop": NOTHING,
                "logprob_token_ids": EMPTY_ARRAY,
                "stop_sequences": one_of(
                    stop,
                    array(stop, maxItems=rules.max_stop_strings),
                    description="Texts that end the answer.",
                ),
                **_NEUTRAL,
                **_IGNORED,
            },
        ),
        "CountRequest": body(_PROMPT_REQUIRED, {**_PROMPT_OPTIONAL, **_COUNT_NEUTRAL, **_IGNORED}),
        **ANSWERS,
    }


ANSWERS: dict[str, Schema] = {
    "AnthropicMessage": obj(
        {
            "id": string(),
            "type": const("message"),
            "role": const("assistant"),
            "model": string("The first served name."),
            "content": array(_BLOCK),
            **_STOP,
            "usage": _USAGE,
        }
    ),
    "AnthropicEvent": one_of(
        _event("message_start", message=ref("AnthropicMessage")),
        _event("content_block_start", index=const(0), content_block=_BLOCK),
        _event("ping"),
        _event(
            "content_block_delta",
            index=const(0),
            delta=obj({"type": const("text_delta"), "text": string()}),
        ),
        _event("content_block_stop", index=const(0)),
        _event("message_delta", delta=obj(_STOP), usage=_USAGE),
        _event("message_stop"),
        ref(ERROR),
        description="An event; its name is its `type`.",
    ),
    ERROR: obj(
        {
            "type": const("error"),
            "error": obj(
                {
                    "type": enum(sorted({*TYPES.values(), "api_error"})),
                    "message": string(minLength=1),
                }
            ),
            "request_id": string(),
        },
        description="An error of these routes, in Anthropic's shape.",
    ),
}

PATHS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "post": operation(
            "createMessage",
            "Generation",
            "Answer a chat, in Anthropic's shapes",
            {200: json_or_events("The answer.", ref("AnthropicMessage"), ref("AnthropicEvent"))},
            body=ref("MessagesRequest"),
            errors=GENERATION_ERRORS,
            error=ERROR,
        )
    },
    "/v1/messages/count_tokens": {
        "post": operation(
            "countMessageTokens",
            "Tokens",
            "How many tokens the prompt of a message has",
            {200: json_answer("The number.", obj({"input_tokens": integer(low=0)}))},
            body=ref("CountRequest"),
            errors=[status for status in GENERATION_ERRORS if status != 429],
            error=ERROR,
        )
    },
}
