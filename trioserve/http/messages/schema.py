"""Bodies of ``/v1/messages``: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests. The tables of fields in docs/http.md are held to this
module by a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import msgspec

from trioserve.http.fields import Fields, decode_object, kind_of, shown
from trioserve.http.schema import MAX_INT, MAX_MESSAGES, _read_common
from trioserve.sampling_params import MAX_STOP_STRINGS, SamplingParams

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


def parse_messages(raw: bytes) -> MessagesRequest:
    """Decode and check a body of ``/v1/messages``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    prompt = _read_prompt(fields)
    max_tokens = fields.integer("max_tokens", low=1, high=MAX_INT)
    if fields.value("max_tokens") is None:
        fields.fault("max_tokens", "is missing; give the most tokens that the answer may have")
    common = _read_common(fields, max_tokens, None)
    del common["model"], common["num_choices"], common["include_usage"]
    stop = fields.strings("stop_sequences", max_items=MAX_STOP_STRINGS)
    common["sampling"] = msgspec.structs.replace(common["sampling"], stop=stop)
    for name, is_neutral in NEUTRAL.items():
        fields.neutral(name, is_neutral)
    fields.raise_faults()
    return MessagesRequest(ignored=fields.unknown(), **prompt, **common)


def parse_count(raw: bytes) -> CountRequest:
    """Decode and check a body of ``/v1/messages/count_tokens``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    prompt = _read_prompt(fields)
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
    if system := _read_text(fields, "system", fields.value("system")):
        messages.insert(0, {"role": "system", "content": system})
    kwargs = fields.object("chat_template_kwargs")
    return {
        "model": model,
        "messages": messages,
        "prefill": prefill,
        "template_kwargs": kwargs.body if kwargs is not None else None,
    }


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    value = fields.value("messages")
    if value is None:
        fields.fault("messages", "is missing; give an array of messages")
    elif not isinstance(value, list):
        fields.fault("messages", f"must be an array of messages, not {kind_of(value)}")
    elif not value:
        fields.fault("messages", "must not be empty")
    elif len(value) > MAX_MESSAGES:
        fields.fault("messages", f"must have at most {MAX_MESSAGES} items, not {len(value)}")
    else:
        read = [_read_message(fields, f"messages[{i}]", item) for i, item in enumerate(value)]
        return [message for message in read if message is not None]
    return []


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


def _is_disabled(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "disabled"


def _is_no_choice(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("auto", "none")


NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "thinking": _is_disabled,
    "tools": lambda value: value == [],
    "tool_choice": _is_no_choice,
    "output_config": lambda value: value == {},
    "container": lambda value: False,
    "mcp_servers": lambda value: value == [],
    "context_management": lambda value: value == {},
    "inference_geo": lambda value: False,
    "diagnostics": lambda value: value == {},
    "speed": lambda value: value == "standard",
}
"""Fields that are refused unless their value asks for nothing."""

WITHOUT_EFFECT = (
    "metadata",
    "service_tier",
    "cache_control",
    "user_profile_id",
    "workspace_id",
)
"""Known fields that change no answer here: passed over without a word."""
