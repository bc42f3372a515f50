"""Bodies of ``/v1/messages``: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests. The tables of fields in docs/http.md are held to this
module by a test.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import msgspec

from trioserve.http.call_fields import ELSEWHERE, is_one_of, read_call, read_template_kwargs
from trioserve.http.fields import Fields, decode_object, kind_of, shown
from trioserve.http.prompt_fields import read_message_list
from trioserve.http.refused import Neutral, read_refused
from trioserve.http.sampling_fields import MAX_INT, Rules, read_sampling
from trioserve.sampling_params import SamplingParams

ROLES = ("user", "assistant", "system")
TURN_BREAK = "\n\n"  # between messages of one role that become one turn


@attrs.frozen(kw_only=True)
class PromptRequest:
    """What both routes have in common.

    Attributes:
        messages: for the chat template; the system prompt is the first. Never two of one role in
            a row.
        prefill: whether the last message is the beginning of the answer.
        ignored: names of unknown fields.
    """

    model: str
    messages: list[dict[str, Any]]
    prefill: bool
    template_kwargs: dict[str, Any] | None
    ignored: tuple[str, ...]


@attrs.frozen(kw_only=True)
class MessagesRequest(PromptRequest):
    """Body of ``/v1/messages``."""

    stream: bool
    sampling: SamplingParams
    priority: int
    cache_salt: str
    timeout_s: float
    queue_timeout_s: float


@attrs.frozen(kw_only=True)
class CountRequest(PromptRequest):
    """Body of ``/v1/messages/count_tokens``."""

    stream: ClassVar[bool] = False
    timeout_s: ClassVar[float] = math.inf
    queue_timeout_s: ClassVar[float] = math.inf


def parse_messages(raw: bytes, rules: Rules | None = None) -> MessagesRequest:
    """Decode and check a body of ``/v1/messages``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    rules = rules or Rules()
    fields = Fields(decode_object(raw))
    prompt = _read_prompt(fields)
    max_tokens = fields.integer("max_tokens", low=1, high=MAX_INT)
    if fields.value("max_tokens") is None:
        fields.fault("max_tokens", "is missing; give the most tokens that the answer may have")
    stop = fields.strings("stop_sequences", max_items=rules.max_stop_strings)
    if fields.value("stop") is not None:
        fields.fault("stop", "is called stop_sequences here")
    sampling = read_sampling(
        fields, rules, max_tokens=max_tokens, logprobs=None, prompt_logprobs=None
    )
    if sampling.logprob_token_ids:
        fields.fault("logprob_token_ids", "is not supported; an answer has no log probabilities")
    call = read_call(fields)
    _read_without_effect(fields)
    read_refused(fields, NEUTRAL)
    fields.raise_faults()
    return MessagesRequest(
        sampling=msgspec.structs.replace(sampling, stop=stop),
        ignored=fields.unknown(),
        **(call | prompt),
    )


def parse_count(raw: bytes) -> CountRequest:
    """Decode and check a body of ``/v1/messages/count_tokens``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    prompt = _read_prompt(fields)
    _read_without_effect(fields)
    read_refused(fields, COUNT_NEUTRAL)
    fields.raise_faults()
    return CountRequest(ignored=fields.unknown(), **prompt)


def _read_prompt(fields: Fields) -> dict[str, Any]:
    """The fields both routes share, as arguments of PromptRequest."""
    model = fields.string("model")
    if fields.value("model") is None:
        fields.fault("model", "is missing; give a name that /v1/models lists")
    messages = _merged(_read_messages(fields))
    prefill = bool(messages) and messages[-1]["role"] == "assistant"
    if prefill and not messages[-1]["content"]:
        messages.pop()  # an answer that begins with nothing
        prefill = False
        if not messages:
            fields.fault("messages", "must hold more than the empty beginning of an answer")
    if system := _read_text(fields, "system", fields.value("system")):
        messages.insert(0, {"role": "system", "content": system})
    return {
        "model": model,
        "messages": messages,
        "prefill": prefill,
        "template_kwargs": read_template_kwargs(fields, None),
    }


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    items = read_message_list(fields)
    read = [_read_message(fields, f"messages[{i}]", item) for i, item in enumerate(items)]
    return [message for message in read if message is not None]


def _read_message(fields: Fields, path: str, message: Any) -> dict[str, Any] | None:
    if not isinstance(message, dict):
        fields.fault(path, f"must be an object, not {kind_of(message)}")
        return None
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fields.fault(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
        return None
    content = message.get("content")
    if content is None:
        fields.fault(f"{path}.content", "is missing; give a string or an array of blocks")
        return None
    text = _read_text(fields, f"{path}.content", content)
    return {"role": role, "content": text} if text is not None else None


def _read_text(fields: Fields, path: str, value: Any) -> str | None:
    """A text given as it is or in blocks, which are joined by a newline; None if there is none."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.fault(path, f"must be a string or an array of blocks, not {kind_of(value)}")
        return None
    texts: list[str] = []
    for index, block in enumerate(value):
        if not isinstance(block, dict):
            fields.fault(f"{path}[{index}]", f"must be an object, not {kind_of(block)}")
        elif block.get("type") != "text":
            kind = shown(block.get("type"))
            fields.fault(f"{path}[{index}].type", f"{kind} is not supported; only text is")
        elif not isinstance(block.get("text"), str):
            fields.fault(
                f"{path}[{index}].text", f"must be a string, not {kind_of(block.get('text'))}"
            )
        else:
            texts.append(block["text"])
    return "\n".join(texts)


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of one role in a row made into one turn."""
    turns: list[tuple[str, list[str]]] = []
    for message in messages:
        if not turns or turns[-1][0] != message["role"]:
            turns.append((message["role"], []))
        turns[-1][1].append(message["content"])
    return [{"role": role, "content": TURN_BREAK.join(texts)} for role, texts in turns]


def _read_without_effect(fields: Fields) -> None:
    for name in WITHOUT_EFFECT:
        fields.value(name)


def _is_disabled(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "disabled"


def _is_no_choice(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("auto", "none")


COUNT_NEUTRAL: Neutral = ELSEWHERE | {
    "thinking": _is_disabled,
    "tools": is_one_of([]),
    "tool_choice": _is_no_choice,
    "output_config": is_one_of({}),
    "mcp_servers": is_one_of([]),
    "context_management": is_one_of({}),
    "speed": is_one_of("standard"),
}
"""Fields of both routes that are refused unless their value asks for nothing."""

NEUTRAL: Neutral = COUNT_NEUTRAL | {
    "container": is_one_of(),
    "inference_geo": is_one_of(),
    "diagnostics": is_one_of({}),
}
"""Those of ``/v1/messages``."""

WITHOUT_EFFECT = (
    "metadata",
    "service_tier",
    "cache_control",
    "user_profile_id",
    "workspace_id",
)
"""Known fields that change no answer here: passed over without a word."""
