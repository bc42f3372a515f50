"""Description of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi.shapes import (
    GENERATION_ERRORS,
    Schema,
    array,
    body,
    boolean,
    const,
    enum,
    free,
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
from trioserve.http.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    MAX_INT,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    ROLES,
)
from trioserve.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS

MODEL = string("A served name; empty or absent: the one served.")
TOKEN_ID = integer(low=0)

FINISH_REASON = enum(["stop", "length"], "Why the answer ended; null while it has not.")
STOP_REASON = nullable(
    one_of(string(), integer(), description="The stop string or stop token id that matched.")
)

COMMON: dict[str, Schema] = {
    "model": MODEL,
    "n": integer("Answers per prompt; answer i is seeded with `seed` + i.", 1, MAX_CHOICES),
    "stream": boolean("Answer as server-sent events.", default=False),
    "stream_options": ref("StreamOptions"),
    "min_tokens": integer("Neither stop strings nor stop tokens end it before.", 0, MAX_INT),
    "temperature": number("0 is greedy.", 0, 100),
    "top_p": number("Keep the smallest set of tokens with this mass.", 0, 1),
    "top_k": integer("Keep the k most likely tokens; 0 or -1: all.", -1, MAX_INT),
    "min_p": number("Keep tokens at least this likely, relative to the likeliest.", 0, 1),
    "seed": integer("The same seed gives the same answer.", -MAX_SEED - 1, MAX_SEED),
    "stop": one_of(
        string(minLength=1),
        array(string(minLength=1), maxItems=MAX_STOP_STRINGS),
        description="Texts that end the answer.",
    ),
    "stop_token_ids": array(TOKEN_ID, "Tokens that end the answer.", maxItems=MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": boolean("Show the stop string that matched.", default=False),
    "ignore_eos": boolean("Go on after the model's own end.", default=False),
    "priority": integer(
        'Lower first, under `scheduler.policy = "priority"`.', -MAX_INT - 1, MAX_INT
    ),
    "cache_salt": string("Prefixes are shared only between requests of equal salt.", maxLength=128),
    "timeout_s": number("Until the last token; 504 beyond it.", MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    "queue_timeout_s": number(
        "Until the first step that works on it; 504 beyond it.", MIN_TIMEOUT_S, MAX_TIMEOUT_S
    ),
}

_NOT_SUPPORTED = "Not supported; only what asks for nothing is taken."


def _only(*values: Any) -> Schema:
    return {"enum": list(values), "description": _NOT_SUPPORTED}


_NOTHING: Schema = {"type": "null", "description": _NOT_SUPPORTED}
_EMPTY_OBJECT = mapping({}, _NOT_SUPPORTED, maxProperties=0)
_EMPTY_ARRAY = array({}, _NOT_SUPPORTED, maxItems=0)

NEUTRAL: dict[str, Schema] = {
    "frequency_penalty": _only(0),
    "presence_penalty": _only(0),
    "repetition_penalty": _only(1),
    "length_penalty": _only(1),
    "logit_bias": _EMPTY_OBJECT,
    "response_format": obj({"type": const("text")}, description=_NOT_SUPPORTED),
    "structured_outputs": _EMPTY_OBJECT,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "use_beam_search": _only(False),
    "early_stopping": _only(False),
    "prompt_logprobs": _NOTHING,
    "logprob_token_ids": _EMPTY_ARRAY,
    "allowed_token_ids": _NOTHING,
    "bad_words": _EMPTY_ARRAY,
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "truncate_prompt_tokens": _NOTHING,
    "return_token_ids": _only(False),
    "return_tokens_as_token_ids": _only(False),
    "service_tier": _only("auto", "default"),
    "kv_transfer_params": _EMPTY_OBJECT,
}
COMPLETION_NEUTRAL: dict[str, Schema] = {"suffix": _only(""), "prompt_embeds": _NOTHING}
CHAT_NEUTRAL: dict[str, Schema] = {
    "tools": _EMPTY_ARRAY,
    "tool_choice": _only("none", "auto"),
    "functions": _EMPTY_ARRAY,
    "function_call": _only("none", "auto"),
    "modalities": array(const("text"), _NOT_SUPPORTED, minItems=1, maxItems=1),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "web_search_options": _NOTHING,
    "store": _only(False),
    "echo": _only(False),
    "best_of": _only(1),
    "continue_final_message": _only(False),
    "add_special_tokens": _only(False),
    "documents": _EMPTY_ARRAY,
    "chat_template": _NOTHING,
    "thinking_token_budget": _NOTHING,
}
WITHOUT_EFFECT: dict[str, Schema] = {
    name: {"description": "Changes no answer here."}
    for name in (
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "include_reasoning",
        "request_id",
    )
}

# -------------------------------------------------------------------------------- requests

REQUESTS: dict[str, Schema] = {
    "StreamOptions": body(
        {},
        {
            "include_usage": boolean("End with a chunk that has the usage.", default=False),
            "continuous_usage_stats": _only(False),
        },
        "Needs `stream`.",
    ),
    "Message": body(
        {"role": enum(ROLES)},
        {
            "content": one_of(string(), array(ref("TextPart"))),
            "name": string(),
            "tool_call_id": string(),
            "tool_calls": array(free()),
        },
    ),
    "TextPart": obj({"type": const("text"), "text": string()}),
    "CompletionRequest": body(
        {
            "prompt": one_of(
                string(),
                array(string(), minItems=1, maxItems=MAX_PROMPTS),
                array(TOKEN_ID, minItems=1),
                array(array(TOKEN_ID, minItems=1), minItems=1, maxItems=MAX_PROMPTS),
                description="A text, token ids, or a list of either.",
            )
        },
        {
            **COMMON,
            "max_tokens": integer("Longest answer.", 1, MAX_INT, default=DEFAULT_COMPLETION_TOKENS),
            "logprobs": integer("That many best tokens at each place.", 0, MAX_LOGPROBS),
            "echo": boolean("Begin the answer with the prompt.", default=False),
            "add_special_tokens": boolean("As the tokenizer does.", default=True),
            "best_of": integer("Only if equal to `n`.", 1, MAX_CHOICES),
            **NEUTRAL,
            **COMPLETION_NEUTRAL,
            **WITHOUT_EFFECT,
        },
    ),
    "ChatRequest": body(
        {"messages": array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES)},
        {
            **COMMON,
            "max_tokens": integer("Longest answer; what is left by default.", 1, MAX_INT),
            "max_completion_tokens": integer("The same as `max_tokens`.", 1, MAX_INT),
            "logprobs": boolean("Tell log probabilities.", default=False),
            "top_logprobs": integer(
                "That many best tokens at each place; needs `logprobs`.", 0, MAX_LOGPROBS
            ),
            "add_generation_prompt": boolean("Begin the answer's message.", default=True),
            "chat_template_kwargs": free("Variables for the chat template."),
            **NEUTRAL,
            **CHAT_NEUTRAL,
            **WITHOUT_EFFECT,
        },
    ),
}

# --------------------------------------------------------------------------------- answers

_TOKEN = {
    "token": string(),
    "logprob": number("At least -9999, which stands for minus infinity."),
    "bytes": array(integer(low=0, high=255), "The raw bytes; tokens may end inside a character."),
}
_NUMBERS = array(number())
_HEAD = {
    "id": string("From the request's id."),
    "created": integer("In seconds since 1970."),
    "model": string("The first served name."),
    "system_fingerprint": nullable(string()),
}

ANSWERS: dict[str, Schema] = {
    "Usage": obj(
        {
            "prompt_tokens": integer("Each prompt counted once.", 0),
            "completion_tokens": integer("What was delivered, of all choices.", 0),
            "total_tokens": integer(low=0),
            "prompt_tokens_details": obj(
                {"cached_tokens": integer("Found in the prefix cache.", 0)}
            ),
        }
    ),
    "ChatLogprobs": obj(
        {
            "content": array(obj(_TOKEN | {"top_logprobs": array(obj(_TOKEN))})),
            "refusal": {"type": "null"},
        }
    ),
    "CompletionLogprobs": obj(
        {
            "tokens": array(string()),
            "token_logprobs": _NUMBERS,
            "top_logprobs": array(mapping(number())),
            "text_offset": array(integer("In characters.", 0)),
        }
    ),
    "Completion": obj(
        _HEAD
        | {
            "object": const("text_completion"),
            "choices": array(ref("CompletionChoice")),
            "usage": ref("Usage"),
        }
    ),
    "CompletionChunk": obj(
        _HEAD | {"object": const("text_completion"), "choices": array(ref("CompletionChoice"))},
        {"usage": nullable(ref("Usage"))},
        "An event of a stream; the last is the text `[DONE]`.",
    ),
    "CompletionChoice": obj(
        {
            "index": integer("Choices are numbered prompt by prompt.", 0),
            "text": string(),
            "logprobs": nullable(ref("CompletionLogprobs")),
            "finish_reason": nullable(FINISH_REASON),
            "stop_reason": STOP_REASON,
        }
    ),
    "Chat": obj(
        _HEAD
        | {
            "object": const("chat.completion"),
            "choices": array(
                obj(
                    {
                        "index": integer(low=0),
                        "message": obj(
                            {
                                "role": const("assistant"),
                                "content": string(),
                                "refusal": {"type": "null"},
                            }
                        ),
                        "logprobs": nullable(ref("ChatLogprobs")),
                        "finish_reason": FINISH_REASON,
                        "stop_reason": STOP_REASON,
                    }
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "ChatChunk": obj(
        _HEAD
        | {
            "object": const("chat.completion.chunk"),
            "choices": array(
                obj(
                    {
                        "index": integer(low=0),
                        "delta": obj({}, {"role": const("assistant"), "content": string()}),
                        "logprobs": nullable(ref("ChatLogprobs")),
                        "finish_reason": nullable(FINISH_REASON),
                    },
                    {"stop_reason": STOP_REASON},
                )
            ),
        },
        {"usage": nullable(ref("Usage"))},
        "An event of a stream; the last is the text `[DONE]`.",
    ),
}

SCHEMAS: dict[str, Schema] = REQUESTS | ANSWERS
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "post": operation(
            "createCompletion",
            "Generation",
            "Continue texts",
            {
                200: json_or_events(
                    "The answer.", ref("Completion"), one_of(ref("CompletionChunk"), ref("Error"))
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
            {
                200: json_or_events(
                    "The answer.", ref("Chat"), one_of(ref("ChatChunk"), ref("Error"))
                )
            },
            body=ref("ChatRequest"),
            errors=GENERATION_ERRORS,
        )
    },
}
