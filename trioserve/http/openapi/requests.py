"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``, and what other bodies share."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi.shapes import (
    Schema,
    anything,
    array,
    body,
    boolean,
    enum,
    free,
    integer,
    mapping,
    nothing_but,
    number,
    obj,
    one_of,
    ref,
    string,
)
from trioserve.http.prompt_fields import MAX_DOCUMENTS, MAX_MESSAGES, MAX_PROMPTS, ROLES
from trioserve.http.refused import WITHOUT_EFFECT
from trioserve.http.sampling_fields import (
    MAX_INT,
    MAX_STOP_TOKEN_IDS,
    Rules,
)
from trioserve.http.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_TEMPLATE_CHARS,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    REASONING_EFFORTS,
    REQUEST_ID,
    SIDES,
)
from trioserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_ID_LIST,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
)

NOT_SUPPORTED = "Not supported; only what asks for nothing is taken."
MODEL = string("A served name; empty or absent: the one served.")
TOKEN_ID = integer(low=0, high=MAX_INT)
KWARGS = free("Variables for the chat template.")
EMPTY_ARRAY = array({}, NOT_SUPPORTED, maxItems=0)
EMPTY_OBJECT = mapping({}, NOT_SUPPORTED, maxProperties=0)
NOTHING = nothing_but(NOT_SUPPORTED)


def only(*values: Any) -> Schema:
    """A field that is not supported, taken only with these values."""
    return nothing_but(NOT_SUPPORTED, *values)


def of_type(*types: str) -> Schema:
    """An object that is not supported, taken only with these values of ``type``."""
    return obj({"type": enum(types)}, description=NOT_SUPPORTED)


def stop(rules: Rules) -> Schema:
    """Stop strings."""
    return one_of(
        string(minLength=1),
        array(string(minLength=1), maxItems=rules.max_stop_strings),
        description="Texts that end the answer.",
    )


def sampling(rules: Rules) -> dict[str, Schema]:
    """What all routes take that make text."""
    penalty = (-MAX_PENALTY, MAX_PENALTY)
    return {
        "temperature": number("0 is greedy; by default the model's own, or 1.", 0, 100),
        "top_p": number("Keep the smallest set of tokens with this mass.", 0, 1),
        "top_k": integer("Keep the k most likely tokens; 0 or -1: all.", -1, MAX_INT),
        "min_p": number("Keep tokens at least this likely, relative to the likeliest.", 0, 1),
        "seed": integer("The same seed gives the same answer.", -MAX_SEED - 1, MAX_SEED),
        "stop": stop(rules),
        "min_tokens": integer("Neither stop strings nor stop tokens end it before.", 0, MAX_INT),
        "stop_token_ids": array(
            TOKEN_ID, "Tokens that end the answer.", maxItems=MAX_STOP_TOKEN_IDS
        ),
        "include_stop_str_in_output": boolean("Show the stop string that matched.", default=False),
        "ignore_eos": boolean("Go on after the model's own end.", default=False),
        "presence_penalty": number("For tokens in the answer so far.", *penalty, default=0),
        "frequency_penalty": number("The same, times how often.", *penalty, default=0),
        "repetition_penalty": number(
            "For tokens in prompt and answer; by default the model's own, or 1.",
            low=1 / MAX_REPETITION,
            high=MAX_REPETITION,
        ),
        "logit_bias": mapping(
            number(low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS),
            "Added to the logits of tokens; keys are token ids.",
            propertyNames={"pattern": "^[0-9]{1,18}$"},
            maxProperties=MAX_ID_LIST,
        ),
        "allowed_token_ids": array(
            TOKEN_ID, "No other tokens are made.", minItems=1, maxItems=MAX_ID_LIST
        ),
        "bad_words": one_of(
            string(minLength=1),
            array(string(minLength=1), maxItems=MAX_BAD_WORDS),
            description="Texts that are never completed.",
        ),
        "logprob_token_ids": array(
            TOKEN_ID, "Tokens told at each place.", maxItems=MAX_LOGPROB_TOKEN_IDS
        ),
        "skip_special_tokens": boolean("Leave special tokens out of the text.", default=True),
    }


def scheduling() -> dict[str, Schema]:
    """When a request is worked on, and for how long."""
    return {
        "priority": integer(
            'Lower first, under `scheduler.policy = "priority"`; else only 0.',
            -MAX_INT - 1,
            MAX_INT,
            default=0,
        ),
        "cache_salt": string("Prefixes are shared only under equal salts.", maxLength=128),
        "timeout_s": number("Until the last token; 504 beyond it.", MIN_TIMEOUT_S, MAX_TIMEOUT_S),
        "queue_timeout_s": number(
            "Until the first step that works on it; 504 beyond it.", MIN_TIMEOUT_S, MAX_TIMEOUT_S
        ),
    }


def _common(rules: Rules) -> dict[str, Schema]:
    return {
        "model": MODEL,
        **sampling(rules),
        "n": integer("Answers per prompt; answer i is seeded with `seed` + i.", 1, rules.max_n),
        "stream": boolean("Answer as server-sent events.", default=False),
        "stream_options": ref("StreamOptions"),
        "prompt_logprobs": integer(
            "Tell the prompt's log probabilities, with that many best tokens; not in a stream.",
            0,
            rules.max_logprobs,
        ),
        "truncate_prompt_tokens": {
            **integer("Use so many tokens of a prompt; -1: what there is room for.", -1, MAX_INT),
            "not": {"const": 0},
        },
        "truncation_side": enum(SIDES, "Where to cut; needs `truncate_prompt_tokens`."),
        "return_token_ids": boolean("Show the ids of prompt and answer.", default=False),
        "return_tokens_as_token_ids": boolean(
            "Name tokens beside log probabilities by their ids.", default=False
        ),
        "include_timings": boolean("Show what took how long.", default=rules.timings),
        "request_id": string(
            "In place of the header `X-Request-Id`.", pattern=f"^({REQUEST_ID.pattern})?$"
        ),
        **scheduling(),
    }


NEUTRAL: dict[str, Schema] = {
    "length_penalty": only(1),
    "response_format": of_type("text"),
    "structured_outputs": EMPTY_OBJECT,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "use_beam_search": only(False),
    "early_stopping": only(False),
    "spaces_between_special_tokens": only(True),
    "repetition_detection": NOTHING,
    "stream_interval": only(1),
    "return_token_offsets": only(False),
    "service_tier": only("auto", "default"),
    "kv_transfer_params": EMPTY_OBJECT,
    "ec_transfer_params": EMPTY_OBJECT,
    "vllm_xargs": EMPTY_OBJECT,
    "watermarking": only({}, False),
    "routed_experts_prompt_start": NOTHING,
}
COMPLETION_NEUTRAL: dict[str, Schema] = {"suffix": only(""), "prompt_embeds": NOTHING}
CHAT_NEUTRAL: dict[str, Schema] = {
    "tools": EMPTY_ARRAY,
    "tool_choice": only("none", "auto"),
    "functions": EMPTY_ARRAY,
    "function_call": only("none", "auto"),
    "modalities": only(["text"]),
    "audio": NOTHING,
    "prediction": NOTHING,
    "verbosity": only("medium"),
    "web_search_options": NOTHING,
    "store": only(False),
    "best_of": only(1),
    "thinking_token_budget": NOTHING,
    "media_io_kwargs": EMPTY_OBJECT,
    "mm_processor_kwargs": EMPTY_OBJECT,
    "mm_payload": EMPTY_OBJECT,
    "moderation": NOTHING,
}
ELSEWHERE: dict[str, Schema] = {
    "add_generation_prompt": only(True),
    "add_special_tokens": only(False),
    "best_of": only(1),
    "chat_template": NOTHING,
    "continue_final_message": only(False),
    "documents": EMPTY_ARRAY,
    "echo": only(False),
    "include_timings": only(False),
    "logprobs": only(False),
    "n": only(1),
    "prompt_logprobs": NOTHING,
    "reasoning_effort": NOTHING,
    "request_id": NOTHING,
    "return_prompt_text": only(False),
    "return_token_ids": only(False),
    "return_tokens_as_token_ids": only(False),
    "truncate_prompt_tokens": NOTHING,
}
"""Fields of the routes described here, as others take them."""

IGNORED: dict[str, Schema] = {name: anything("Changes no answer here.") for name in WITHOUT_EFFECT}

_MESSAGE = body(
    {"role": enum(ROLES)},
    {
        "content": one_of(string(), array(ref("Part"))),
        "name": string(),
        "tool_call_id": string(),
        "tool_calls": array(
            obj({"function": body({"name": string()}, {"arguments": one_of(string(), free())})})
        ),
    },
)
_PROMPT = one_of(
    string(),
    array(string(), minItems=1, maxItems=MAX_PROMPTS),
    array(TOKEN_ID, minItems=1),
    array(array(TOKEN_ID, minItems=1), minItems=1, maxItems=MAX_PROMPTS),
    description="A text, token ids, or a list of either.",
)


def schemas(rules: Rules) -> dict[str, Schema]:
    """The bodies, with the limits that the operator set."""
    return {
        "StreamOptions": body(
            {},
            {
                "include_usage": boolean("End with a chunk that has the usage.", default=False),
                "continuous_usage_stats": boolean("Every chunk has the usage.", default=False),
            },
            "Needs `stream`.",
        ),
        "Message": _MESSAGE,
        "Part": one_of(
            obj({"type": {"const": "text"}, "text": string()}),
            obj({"type": {"const": "refusal"}, "refusal": string()}),
        ),
        "CompletionRequest": body({"prompt": _PROMPT}, _completion(rules)),
        "ChatRequest": body(
            {"messages": array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES)}, _chat(rules)
        ),
    }


def _completion(rules: Rules) -> dict[str, Schema]:
    return {
        **_common(rules),
        "max_tokens": integer(
            "Longest answer; 0, with `echo`, only tells about the prompt.",
            0,
            MAX_INT,
            default=DEFAULT_COMPLETION_TOKENS,
        ),
        "logprobs": integer("That many best tokens at each place.", 0, rules.max_logprobs),
        "echo": boolean("Begin the answer with the prompt.", default=False),
        "add_special_tokens": boolean("As the tokenizer does.", default=True),
        "best_of": integer(
            "Make so many and show the likeliest `n`; not in a stream.", 1, rules.max_n
        ),
        **NEUTRAL,
        **COMPLETION_NEUTRAL,
        **IGNORED,
    }


def chat_prompt(rules: Rules) -> dict[str, Schema]:
    """What makes the prompt of a chat, beside its messages."""
    return {
        "add_generation_prompt": boolean("Begin the answer's message.", default=True),
        "continue_final_message": boolean(
            "Go on with the last message; excludes `add_generation_prompt`.", default=False
        ),
        "add_special_tokens": boolean("Besides those of the template.", default=False),
        "chat_template": string("In place of the model's own.", maxLength=MAX_TEMPLATE_CHARS)
        if rules.trust_chat_template
        else only(""),
        "chat_template_kwargs": KWARGS,
        "documents": array(free(), "For templates that show them.", maxItems=MAX_DOCUMENTS),
        "reasoning_effort": enum(REASONING_EFFORTS, "For templates that know it."),
    }


def _chat(rules: Rules) -> dict[str, Schema]:
    return {
        **_common(rules),
        "max_tokens": integer("Longest answer; by default what is left.", 1, MAX_INT),
        "max_completion_tokens": integer("The same as `max_tokens`.", 1, MAX_INT),
        "logprobs": boolean("Tell log probabilities.", default=False),
        "top_logprobs": integer(
            "That many best tokens at each place; needs `logprobs`.", 0, rules.max_logprobs
        ),
        "echo": boolean("Begin with the message that is gone on with.", default=False),
        "return_prompt_text": boolean("Show the rendered prompt.", default=False),
        **chat_prompt(rules),
        **NEUTRAL,
        **CHAT_NEUTRAL,
        **IGNORED,
    }
