"""Description of ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi import requests
from trioserve.http.openapi.generation import TOKEN_LOGPROB
from trioserve.http.openapi.requests import (
    EMPTY_ARRAY,
    EMPTY_OBJECT,
    KWARGS,
    MODEL,
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
    mapping,
    nullable,
    number,
    obj,
    one_of,
    operation,
    path_parameter,
    query_parameter,
    ref,
    string,
)
from trioserve.http.prompt_fields import MAX_MESSAGES
from trioserve.http.responses.items import ROLES, TEXT_PARTS
from trioserve.http.responses.schema import (
    INCLUDABLE,
    MAX_METADATA,
    MAX_METADATA_VALUE,
    WITHOUT_EFFECT,
)
from trioserve.http.routes.responses import DEFAULT_LISTED, MAX_LISTED
from trioserve.http.sampling_fields import MAX_INT, Rules
from trioserve.http.schema import REASONING_EFFORTS

_METADATA = mapping(
    string(maxLength=MAX_METADATA_VALUE), "Kept with the response.", maxProperties=MAX_METADATA
)
_NEUTRAL: dict[str, Schema] = {
    **requests.NEUTRAL,
    **requests.ELSEWHERE,
    "max_tokens": NOTHING,
    "tools": EMPTY_ARRAY,
    "conversation": NOTHING,
    "prompt": NOTHING,
    "context_management": EMPTY_ARRAY,
    "background_options": EMPTY_OBJECT,
    "moderation": NOTHING,
    "image": EMPTY_OBJECT,
    "access_programs": EMPTY_OBJECT,
}
_IGNORED = {name: anything("Changes no answer here.") for name in WITHOUT_EFFECT}

_LOGPROBS = array(TOKEN_LOGPROB)
_PART = obj(
    {
        "type": const("output_text"),
        "text": string(),
        "annotations": array({}, maxItems=0),
        "logprobs": _LOGPROBS,
    }
)
_ITEM = {
    "id": string(),
    "type": const("message"),
    "status": enum(["in_progress", "completed", "incomplete"]),
}
_GIVEN_PART = one_of(
    obj({"type": const("input_text"), "text": string()}),
    obj({"type": const("output_text"), "text": string(), "annotations": array({}, maxItems=0)}),
)


def _event(name: str, fields: dict[str, Schema]) -> Schema:
    return obj({"type": const(name), "sequence_number": integer(low=0), **fields})


_WHERE = {"item_id": string(), "output_index": const(0), "content_index": const(0)}
_RESPONSE = {"response": ref("Response")}
_OUTPUT = {"output_index": const(0), "item": ref("ResponseItem")}

_INPUT = one_of(
    string(),
    array(
        body(
            {
                "role": enum(ROLES),
                "content": one_of(
                    string(), array(obj({"type": enum(TEXT_PARTS), "text": string()}))
                ),
            },
            {"type": const("message")},
        ),
        minItems=1,
        maxItems=MAX_MESSAGES,
    ),
)


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes, with the limits that the operator set."""
    return {
        "ResponsesRequest": body({"input": _INPUT}, _fields(rules)),
        "ResponsesStreamOptions": body({}, {"include_obfuscation": only(False)}, "Needs `stream`."),
        "Reasoning": body(
            {},
            {
                "effort": enum(REASONING_EFFORTS, "For the chat template."),
                **{
                    name: only("auto", "standard")
                    for name in ("summary", "generate_summary", "context", "mode")
                },
            },
        ),
        "TextFormat": body({}, {"format": of_type("text"), "verbosity": only("medium")}),
        **ANSWERS,
    }


def _fields(rules: Rules) -> dict[str, Schema]:
    return {
        **requests.IGNORED,
        **_IGNORED,
        **_NEUTRAL,
        "model": MODEL,
        **requests.sampling(rules),
        **requests.scheduling(),
        "stream": boolean("Answer as server-sent events.", default=False),
        "stream_options": ref("ResponsesStreamOptions"),
        "instructions": string("Put before the input, as a message of the system."),
        "previous_response_id": string("A stored response to go on from."),
        "max_output_tokens": integer("Longest answer; by default what is left.", 1, MAX_INT),
        "max_tool_calls": integer("Shown in the answer; there are no tools.", 1, MAX_INT),
        "truncation": enum(
            ["auto", "disabled"], "Whether the oldest items may be left out.", default="disabled"
        ),
        "background": boolean("Answer at once and go on.", default=False),
        "store": boolean("Keep the response, as far as there is room."),
        "include": one_of(enum(INCLUDABLE), array(enum(INCLUDABLE), maxItems=len(INCLUDABLE))),
        "top_logprobs": integer("That many best tokens at each place.", 0, rules.max_logprobs),
        "reasoning": ref("Reasoning"),
        "text": ref("TextFormat"),
        "tool_choice": enum(["auto", "none"]),
        "parallel_tool_calls": boolean("Shown in the answer; there are no tools."),
        "metadata": _METADATA,
        "user": string("Shown in the answer."),
        "safety_identifier": string("Shown in the answer."),
        "prompt_cache_key": string("Shown in the answer."),
        "chat_template_kwargs": KWARGS,
    }


ANSWERS: dict[str, Schema] = {
    "Response": obj(
        {
            "id": string(),
            "object": const("response"),
            "created_at": integer("In seconds since 1970."),
            "status": enum(
                ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
            ),
            "background": boolean(),
            "error": nullable(
                obj(
                    {
                        "code": const("server_error"),
                        "message": string(),
                        "type": string(),
                        "param": {"type": "null"},
                    }
                )
            ),
            "incomplete_details": nullable(obj({"reason": const("max_output_tokens")})),
            "instructions": nullable(string()),
            "max_output_tokens": nullable(integer(low=1)),
            "max_tool_calls": nullable(integer(low=1)),
            "metadata": _METADATA,
            "model": string("The first served name."),
            "output": array(ref("ResponseItem")),
            "parallel_tool_calls": boolean(),
            "previous_response_id": nullable(string()),
            "prompt_cache_key": nullable(string()),
            "reasoning": obj(
                {"effort": nullable(enum(REASONING_EFFORTS)), "summary": {"type": "null"}}
            ),
            "safety_identifier": nullable(string()),
            "service_tier": const("default"),
            "store": boolean(),
            "temperature": number(),
            "text": obj({"format": obj({"type": const("text")}), "verbosity": const("medium")}),
            "tool_choice": enum(["auto", "none"]),
            "tools": array({}, maxItems=0),
            "top_logprobs": integer(low=0),
            "top_p": number(),
            "truncation": enum(["auto", "disabled"]),
            "usage": nullable(ref("ResponseUsage")),
            "user": nullable(string()),
        },
        {"completed_at": integer("In seconds since 1970.")},
    ),
    "ResponseItem": obj({**_ITEM, "role": const("assistant"), "content": array(_PART)}),
    "ResponseUsage": obj(
        {
            "input_tokens": integer(low=0),
            "input_tokens_details": obj(
                {"cached_tokens": integer(low=0), "cache_write_tokens": const(0)}
            ),
            "output_tokens": integer(low=0),
            "output_tokens_details": obj({"reasoning_tokens": const(0)}),
            "total_tokens": integer(low=0),
        }
    ),
    "ResponseEvent": one_of(
        *(
            _event(f"response.{name}", _RESPONSE)
            for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
        ),
        _event("response.output_item.added", _OUTPUT),
        _event("response.output_item.done", _OUTPUT),
        _event("response.content_part.added", {"part": _PART, **_WHERE}),
        _event("response.content_part.done", {"part": _PART, **_WHERE}),
        _event("response.output_text.delta", {"delta": string(), "logprobs": _LOGPROBS, **_WHERE}),
        _event("response.output_text.done", {"text": string(), "logprobs": _LOGPROBS, **_WHERE}),
        description="An event; its name is its `type`.",
    ),
    "ResponseInput": obj(
        {
            "object": const("list"),
            "data": array(obj({**_ITEM, "role": enum(ROLES), "content": array(_GIVEN_PART)})),
            "first_id": nullable(string()),
            "last_id": nullable(string()),
            "has_more": boolean(),
        }
    ),
}

_ID = path_parameter("response_id", "The response's id.")
_STREAM = query_parameter("stream", enum(["true", "false"]), "Answer with its events.")
_STORED_ERRORS = (400, 404)


def _on_one(name: str, summary: str, answer: dict[str, Any], *more: Any) -> dict[str, Any]:
    return operation(
        name,
        "Generation",
        summary,
        {200: answer},
        parameters=[_ID, *more],
        errors=_STORED_ERRORS,
    )


PATHS: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "post": operation(
            "createResponse",
            "Generation",
            "Answer a chat, in the shapes of OpenAI's Responses API",
            {200: json_or_events("The response.", ref("Response"), ref("ResponseEvent"))},
            body=ref("ResponsesRequest"),
            errors=GENERATION_ERRORS,
        )
    },
    "/v1/responses/{response_id}": {
        "get": _on_one(
            "getResponse",
            "A stored response, or one being made in the background",
            json_or_events("The response.", ref("Response"), ref("ResponseEvent")),
            _STREAM,
            query_parameter(
                "starting_after", integer(low=0, high=2**31), "Number of the last event known."
            ),
        ),
        "delete": _on_one(
            "deleteResponse",
            "Forget a response, ending its work",
            json_answer(
                "It is gone.",
                obj({"id": string(), "object": const("response"), "deleted": const(True)}),
            ),
        ),
    },
    "/v1/responses/{response_id}/cancel": {
        "post": _on_one(
            "cancelResponse",
            "End a background response",
            json_answer("The response; one that has ended stays as it is.", ref("Response")),
        )
    },
    "/v1/responses/{response_id}/input_items": {
        "get": _on_one(
            "listResponseInput",
            "What a response was made from",
            json_answer("A page of the items.", ref("ResponseInput")),
            query_parameter(
                "order", enum(["asc", "desc"], default="desc"), "Newest first, or not."
            ),
            query_parameter(
                "limit", integer(low=1, high=MAX_LISTED, default=DEFAULT_LISTED), "Items of a page."
            ),
            query_parameter("after", string(), "The id of an item; those after it are told."),
        )
    },
}
