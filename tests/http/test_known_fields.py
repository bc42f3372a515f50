"""API-15: every parameter that clients have a name for is honoured, refused or known to be idle."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from trioserve.http.refused import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    SHARED_NEUTRAL,
    WITHOUT_EFFECT,
)

from . import honoured
from .bodies import BOTH, CHAT, COMPLETION
from .client import serving

VLLM_BOTH = (
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens"),
    *("truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words"),
    *("echo", "add_special_tokens", "structured_outputs", "priority", "request_id"),
    *("session_id", "return_tokens_as_token_ids", "return_token_ids", "cache_salt"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection"),
    *("stream_interval", "watermarking", "routed_experts_prompt_start", "return_token_offsets"),
)
VLLM_CHAT = (
    *("thinking_token_budget", "include_reasoning", "add_generation_prompt"),
    *("continue_final_message", "documents", "chat_template", "chat_template_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs", "return_prompt_text", "mm_payload"),
)
NOT_NEUTRAL: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "service_tier": "flex",
    "verbosity": "low",
}
"""Values for refused fields whose other values are not simply of another type."""


def names_of(kind: Any) -> set[str]:
    return set(kind.__annotations__)


CHAT_NAMES = names_of(chat_create_params.CompletionCreateParamsBase) | {"stream"}
COMPLETION_NAMES = names_of(completion_create_params.CompletionCreateParamsBase) | {"stream"}


def test_api_15_every_parameter_is_known() -> None:
    chat = {*honoured.CHAT, *CHAT_NEUTRAL, *SHARED_NEUTRAL, *WITHOUT_EFFECT}
    completion = {*honoured.COMPLETION, *COMPLETION_NEUTRAL, *SHARED_NEUTRAL, *WITHOUT_EFFECT}
    assert CHAT_NAMES | {*VLLM_BOTH, *VLLM_CHAT} <= chat
    assert COMPLETION_NAMES | {*VLLM_BOTH} <= completion


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_15_refused_fields_are_refused_by_name(path: str, body: dict[str, Any]) -> None:
    own = CHAT_NEUTRAL if "chat" in path else COMPLETION_NEUTRAL
    async with serving() as served:
        for name in {**SHARED_NEUTRAL, **own}:
            asked = body | {name: NOT_NEUTRAL.get(name, {"some": "value"})}
            answer = await served.call("POST", path, asked)
            assert answer.status == 400, name
            assert answer.json["error"]["param"] == name
            assert name in answer.json["error"]["message"]
        assert not served.engine.streams


async def test_api_15_neutral_values_pass() -> None:
    shared: dict[str, Any] = {
        **{"length_penalty": 1.0, "response_format": {"type": "text"}, "structured_outputs": {}},
        **{"use_beam_search": False, "early_stopping": False, "service_tier": "auto"},
        **{"spaces_between_special_tokens": True, "stream_interval": 1, "vllm_xargs": {}},
        **{"return_token_offsets": False, "kv_transfer_params": {}, "watermarking": False},
        **{"user": "me", "metadata": {"a": "b"}, "session_id": "s", "logit_bias": {}},
        **{"best_of": 1, "n": 1, "bad_words": [], "logprob_token_ids": [], "guided_json": None},
    }
    chat = {
        **{"tools": [], "tool_choice": "none", "functions": [], "function_call": "auto"},
        **{"modalities": ["text"], "verbosity": "medium", "store": False, "documents": []},
        **{"audio": None, "prediction": None, "thinking_token_budget": None},
    }
    async with serving(strict_fields=True) as served:
        for path, body in (
            ("/v1/chat/completions", CHAT | shared | chat),
            ("/v1/completions", COMPLETION | shared | {"suffix": "", "prompt_embeds": None}),
        ):
            answer = await served.call("POST", path, body)
            assert answer.status == 200, answer.body
