"""Description of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from trioserve.http.openapi.requests import CHAT_NEUTRAL, MODEL, TOKEN_ID, chat_prompt
from trioserve.http.openapi.shapes import (
    GENERATION_ERRORS,
    Schema,
    array,
    body,
    boolean,
    integer,
    json_answer,
    nullable,
    obj,
    one_of,
    operation,
    ref,
    string,
)
from trioserve.http.prompt_fields import MAX_MESSAGES
from trioserve.http.routes.tokenization import CHAT_PROMPT_NEUTRAL, MAX_TOKENS
from trioserve.http.sampling_fields import Rules

ERRORS = tuple(status for status in GENERATION_ERRORS if status != 429)
_TEXTS = boolean("Answer with the tokens as the vocabulary writes them as well.", default=False)

_SCHEMAS: dict[str, Schema] = {
    "Tokens": obj(
        {
            "count": integer(low=0),
            "max_model_len": integer("Longest sequence, in tokens.", 1),
            "tokens": array(integer(low=0)),
            "token_strs": nullable(array(string(), "If they were asked for.")),
        }
    ),
    "DetokenizeRequest": body({"tokens": array(TOKEN_ID, maxItems=MAX_TOKENS)}, {"model": MODEL}),
}


def schemas(rules: Rules) -> dict[str, Schema]:
    """The shapes, with what the operator allows."""
    request = one_of(
        body(
            {"prompt": string("The text.")},
            {
                "model": MODEL,
                "add_special_tokens": boolean("As the model's tokenizer does.", default=True),
                "return_token_strs": _TEXTS,
                "messages": {"type": "null"},
            },
            "A text.",
        ),
        body(
            {"messages": array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES)},
            {
                "model": MODEL,
                "return_token_strs": _TEXTS,
                **chat_prompt(rules),
                **{name: CHAT_NEUTRAL[name] for name in CHAT_PROMPT_NEUTRAL},
                "prompt": {"type": "null"},
            },
            "A chat, as the model gets it.",
        ),
    )
    return {"TokenizeRequest": request, **_SCHEMAS}


PATHS: dict[str, dict[str, Any]] = {
    "/tokenize": {
        "post": operation(
            "tokenize",
            "Tokens",
            "The token ids of a text or a chat",
            {200: json_answer("The tokens.", ref("Tokens"))},
            body=ref("TokenizeRequest"),
            errors=ERRORS,
        )
    },
    "/detokenize": {
        "post": operation(
            "detokenize",
            "Tokens",
            "The text of token ids",
            {200: json_answer("The text.", obj({"prompt": string()}))},
            body=ref("DetokenizeRequest"),
            errors=ERRORS,
        )
    },
}
