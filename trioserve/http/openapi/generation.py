"""Description of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi import requests
from trioserve.http.openapi.shapes import (
    ERROR,
    GENERATION_ERRORS,
    Schema,
    array,
    const,
    enum,
    integer,
    json_or_events,
    mapping,
    nullable,
    number,
    obj,
    one_of,
    operation,
    ref,
    string,
)
from trioserve.http.sampling_fields import Rules
from trioserve.http.timings import NAMES

FINISH_REASON = enum(["stop", "length"], "Why the answer ended; null while it has not.")
STOP_REASON = nullable(
    one_of(string(), integer(), description="The stop string or stop token id that matched.")
)
NULL: Schema = {"type": "null"}
IDS = array(integer(low=0))
_TOKEN = {
    "token": string("Its text or, if asked for, its id as `token_id:ID`."),
    "logprob": number("At least -9999, which stands for minus infinity."),
    "bytes": array(integer(low=0, high=255), "The raw bytes; tokens may end inside a character."),
}
TOKEN_LOGPROB = obj(_TOKEN | {"top_logprobs": array(obj(_TOKEN))})
_HEAD = {
    "id": string("From the request's id."),
    "created": integer("In seconds since 1970."),
    "model": string("The first served name."),
    "system_fingerprint": string("Equal where the same request has the same answer."),
}
_WHOLE = {
    "usage": ref("Usage"),
    "service_tier": NULL,
    "kv_transfer_params": NULL,
    "metrics": nullable(ref("Timings")),
}
_MORE_OF_CHUNK = {
    "usage": nullable(one_of(ref("Usage"), ref("RunningUsage"))),
    "metrics": ref("Timings"),
}
_COUNTS = {
    "prompt_tokens": integer("Each prompt counted once.", 0),
    "completion_tokens": integer("What was delivered, of all choices.", 0),
    "total_tokens": integer(low=0),
}
_CHUNK = "An event of a stream; the last is the text `[DONE]`, unless it failed."
_PROMPT_LOGPROBS = nullable(ref("PromptLogprobs"))

ANSWERS: dict[str, Schema] = {
    "Usage": obj(
        {
            **_COUNTS,
            "prompt_tokens_details": obj(
                {"cached_tokens": integer("Found in the prefix cache.", 0)}
            ),
        }
    ),
    "RunningUsage": obj(_COUNTS, description="Of a stream, so far."),
    "Timings": obj(
        {name: nullable(number(low=0)) for name in NAMES},
        description="What took how long; null for what has not happened.",
    ),
    "PromptLogprobs": array(
        nullable(
            mapping(
                obj(
                    {
                        "logprob": number(),
                        "rank": nullable(integer("1 is the likeliest.", 1)),
                        "decoded_token": string(),
                    }
                ),
                "By token id.",
            )
        ),
        "One per token of the prompt; null for the first.",
    ),
    "CompletionLogprobs": obj(
        {
            "tokens": array(string()),
            "token_logprobs": array(nullable(number())),
            "top_logprobs": array(nullable(mapping(number()))),
            "text_offset": array(integer("In characters.", 0)),
        },
        description="Of an echoed prompt the first token has none.",
    ),
    "Completion": obj(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": array(ref("CompletionChoice")),
            **_WHOLE,
        }
    ),
    "CompletionChoice": obj(
        {
            "index": integer("Choices are numbered prompt by prompt.", 0),
            "text": string(),
            "logprobs": nullable(ref("CompletionLogprobs")),
            "finish_reason": FINISH_REASON,
            "stop_reason": STOP_REASON,
            "token_ids": nullable(IDS),
            "prompt_token_ids": nullable(IDS),
            "prompt_logprobs": _PROMPT_LOGPROBS,
        }
    ),
    "CompletionChunk": obj(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": array(
                obj(
                    {
                        "index": integer(low=0),
                        "text": string(),
                        "logprobs": nullable(ref("CompletionLogprobs")),
                        "finish_reason": nullable(FINISH_REASON),
                        "stop_reason": STOP_REASON,
                    },
                    {"token_ids": IDS, "prompt_token_ids": IDS},
                )
            ),
        },
        _MORE_OF_CHUNK,
        _CHUNK,
    ),
    "ChatLogprobs": obj({"content": array(TOKEN_LOGPROB), "refusal": NULL}),
    "Chat": obj(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": array(ref("ChatChoice")),
            **_WHOLE,
            "prompt_logprobs": _PROMPT_LOGPROBS,
            "prompt_token_ids": nullable(IDS),
            "prompt_text": nullable(string()),
        }
    ),
    "ChatChoice": obj(
        {
            "index": integer(low=0),
            "message": obj(
                {
                    "role": const("assistant"),
                    "content": string(),
                    "refusal": NULL,
                    "annotations": NULL,
                    "audio": NULL,
                    "function_call": NULL,
                    "reasoning": NULL,
                }
            ),
            "logprobs": nullable(ref("ChatLogprobs")),
            "finish_reason": FINISH_REASON,
            "stop_reason": STOP_REASON,
            "token_ids": nullable(IDS),
        }
    ),
    "ChatChunk": obj(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": array(
                obj(
                    {
                        "index": integer(low=0),
                        "delta": obj({}, {"role": const("assistant"), "content": string()}),
                        "logprobs": nullable(ref("ChatLogprobs")),
                        "finish_reason": nullable(FINISH_REASON),
                    },
                    {"stop_reason": STOP_REASON, "token_ids": IDS},
                )
            ),
        },
        {**_MORE_OF_CHUNK, "prompt_token_ids": IDS, "prompt_text": string()},
        _CHUNK,
    ),
}


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes, with the limits that the operator set."""
    return requests.schemas(rules) | ANSWERS


PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "post": operation(
            "createCompletion",
            "Generation",
            "Continue texts",
            {
                200: json_or_events(
                    "The answer.", ref("Completion"), one_of(ref("CompletionChunk"), ref(ERROR))
                )
            },
            body=ref("CompletionRequest"),
            errors=GENERATION_ERRORS,
        )
    },
    "/v1/chat/completions": {
        "post": operation(
            "createChatCompletion",
            "Generation",
            "Answer a chat",
            {200: json_or_events("The answer.", ref("Chat"), one_of(ref("ChatChunk"), ref(ERROR)))},
            body=ref("ChatRequest"),
            errors=GENERATION_ERRORS,
        )
    },
}
