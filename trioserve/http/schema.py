"""Request bodies of the generation routes: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests; nothing here waits, logs or knows the model. The table
of fields in docs/http.md is held to this module by a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import msgspec

from trioserve.http.fields import Fields, decode_object, kind_of, shown
from trioserve.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STREAMS = 1024  # prompts times n of one request
MAX_MESSAGES = 16384
MAX_STOP_TOKEN_IDS = 1024
MAX_INT = 2**63 - 1
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 1e9
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """What both routes have in common.

    Attributes:
        prompt_field: the field that holds the prompt.
        model: as asked, empty for the served one.
        sampling: for the first choice; choice i is seeded with seed + i. ``max_tokens`` is None
            where it was not given and the route has no default.
        num_choices: n.
        timeout_s, queue_timeout_s: infinite where they were not given.
        ignored: names of unknown fields.
    """

    prompt_field: ClassVar[str] = "prompt"

    model: str
    sampling: SamplingParams
    num_choices: int
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str
    timeout_s: float
    queue_timeout_s: float
    ignored: tuple[str, ...]

    def sampling_of(self, choice: int) -> SamplingParams:
        """Sampling parameters of one choice: seeds differ, all else is shared."""
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self.sampling
        shifted = (seed + choice + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1
        return msgspec.structs.replace(self.sampling, seed=shifted)


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``; ``prompts`` are texts or token ids, at least one."""

    prompts: tuple[str | list[int], ...]
    echo: bool
    add_special_tokens: bool


@attrs.frozen(kw_only=True)
class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``; ``messages`` as given, their shape checked."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    template_kwargs: dict[str, Any] | None


def parse_completion(raw: bytes) -> CompletionRequest:
    """Decode and check a body of ``/v1/completions``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    prompts = _read_prompts(fields)
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", low=0, high=MAX_LOGPROBS)
    if echo and any(not isinstance(prompt, str) for prompt in prompts):
        fields.fault("echo", "is supported for prompts given as text")
    if echo and logprobs is not None:
        fields.fault("echo", "is not supported together with logprobs")
    max_tokens = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, low=1, high=MAX_INT)
    common = _read_common(fields, max_tokens, logprobs)
    if len(prompts) * common["num_choices"] > MAX_STREAMS:
        fields.fault("n", f"prompts times n must be at most {MAX_STREAMS}")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    fields.neutral("best_of", lambda value: value == common["num_choices"])
    _read_rest(fields, COMPLETION_NEUTRAL)
    fields.raise_faults()
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        add_special_tokens=add_special_tokens,
        ignored=tuple(fields.unread()),
        **common,
    )


def parse_chat(raw: bytes) -> ChatRequest:
    """Decode and check a body of ``/v1/chat/completions``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    messages = read_messages(fields)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        fields.fault("top_logprobs", "needs logprobs to be true")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    common = _read_common(fields, _chat_max_tokens(fields), logprobs)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    kwargs = fields.object("chat_template_kwargs")
    _read_rest(fields, CHAT_NEUTRAL)
    fields.raise_faults()
    return ChatRequest(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=kwargs.body if kwargs is not None else None,
        ignored=tuple(fields.unread()),
        **common,
    )


# ------------------------------------------------------------------------------- the parts


def _read_common(fields: Fields, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """The fields both routes share, as arguments of GenerationRequest."""
    stream = fields.boolean("stream")
    min_tokens = fields.integer("min_tokens", 0, low=0, high=MAX_INT)
    if max_tokens is not None and min_tokens > max_tokens:
        fields.fault("min_tokens", f"({min_tokens}) is over max_tokens ({max_tokens})")
    top_k = fields.integer("top_k", 0, low=-1, high=MAX_INT)
    sampling = SamplingParams(
        temperature=fields.number("temperature", 1.0, low=0.0, high=100.0),
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        seed=fields.integer("seed", low=-MAX_SEED - 1, high=MAX_SEED),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=fields.strings("stop", max_items=MAX_STOP_STRINGS),
        stop_token_ids=fields.integers("stop_token_ids", max_items=MAX_STOP_TOKEN_IDS),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )
    return {
        "model": fields.string("model"),
        "sampling": sampling,
        "num_choices": fields.integer("n", 1, low=1, high=MAX_CHOICES),
        "stream": stream,
        "include_usage": _read_stream_options(fields, stream),
        "priority": fields.integer("priority", 0, low=-MAX_INT - 1, high=MAX_INT),
        "cache_salt": fields.string("cache_salt", max_chars=128),
        "timeout_s": _timeout(fields, "timeout_s"),
        "queue_timeout_s": _timeout(fields, "queue_timeout_s"),
    }


def _timeout(fields: Fields, name: str) -> float:
    return fields.number(name, math.inf, low=MIN_TIMEOUT_S, high=MAX_TIMEOUT_S)


def _read_stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        fields.fault("stream_options", "needs stream to be true")
    options.neutral("continuous_usage_stats", _is(False))
    return options.boolean("include_usage")


def _read_rest(fields: Fields, neutral: dict[str, Callable[[Any], bool]]) -> None:
    for name in fields.unread():
        is_neutral = SHARED_NEUTRAL.get(name) or neutral.get(name)
        if is_neutral is not None:
            fields.neutral(name, is_neutral)
        elif name in WITHOUT_EFFECT:
            fields.value(name)


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", low=1, high=MAX_INT)
    new = fields.integer("max_completion_tokens", low=1, high=MAX_INT)
    if old is not None and new is not None and old != new:
        fields.fault(
            "max_completion_tokens", f"({new}) contradicts max_tokens ({old}); give one of them"
        )
    chosen = old if new is None else new
    return int(chosen) if chosen is not None else None


def _read_prompts(fields: Fields) -> tuple[str | list[int], ...]:
    value = fields.value("prompt")
    wanted = "a string, an array of strings, of token ids, or of arrays of token ids"
    if value is None:
        fields.fault("prompt", f"is missing; give {wanted}")
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fields.fault("prompt", f"must be {wanted}, not {kind_of(value)}")
        return ()
    if not value:
        fields.fault("prompt", "must not be an empty array")
        return ()
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return (value,) if _are_token_ids(fields, "prompt", value) else ()
    if len(value) > MAX_PROMPTS:
        fields.fault("prompt", f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
        return ()
    return tuple(_read_prompt_list(fields, value, wanted))


def _read_prompt_list(fields: Fields, values: list[Any], wanted: str) -> list[str | list[int]]:
    prompts: list[str | list[int]] = []
    for index, item in enumerate(values):
        path = f"prompt[{index}]"
        if type(item) is not type(values[0]) or not isinstance(item, str | list):
            fields.fault(path, f"is {kind_of(item)}; prompt must be {wanted}")
        elif isinstance(item, list) and not item:
            fields.fault(path, "must not be an empty array")
        elif isinstance(item, str) or _are_token_ids(fields, path, item):
            prompts.append(item)
    return prompts


def _are_token_ids(fields: Fields, path: str, items: list[Any]) -> bool:
    for index, item in enumerate(items):
        if type(item) is not int or item < 0:
            fields.fault(f"{path}[{index}]", f"must be a token id, not {kind_of(item)}")
            return False
    return True


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat, each of a legal shape; faults are noted in ``fields``."""
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
        for index, message in enumerate(value):
            _check_message(fields, f"messages[{index}]", message)
        return value
    return []


def _check_message(fields: Fields, path: str, message: Any) -> None:
    if not isinstance(message, dict):
        fields.fault(path, f"must be an object, not {kind_of(message)}")
        return
    inner = Fields(message, fields.path(path), fields.faults)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        inner.fault("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    inner.string("name")
    inner.string("tool_call_id")
    _check_content(inner, message.get("content"))
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        inner.fault("tool_calls", "must be an array of objects")


def _check_content(message: Fields, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        message.fault("content", f"must be a string or an array of parts, not {kind_of(content)}")
        return
    for index, part in enumerate(content):
        path = f"content[{index}]"
        if not isinstance(part, dict):
            message.fault(path, f"must be an object, not {kind_of(part)}")
        elif part.get("type") != "text":
            message.fault(
                f"{path}.type", f"{shown(part.get('type'))} is not supported; only text is"
            )
        elif not isinstance(part.get("text"), str):
            message.fault(f"{path}.text", f"must be a string, not {kind_of(part.get('text'))}")


# ------------------------------------------------------------- known, but not supported


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


SHARED_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": _is(0),
    "presence_penalty": _is(0),
    "repetition_penalty": _is(1),
    "length_penalty": _is(1),
    "logit_bias": _is({}),
    "response_format": _is_text_format,
    "structured_outputs": _is({}),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_choice": _is(),
    "guided_grammar": _is(),
    "use_beam_search": _is(False),
    "early_stopping": _is(False),
    "prompt_logprobs": _is(),
    "logprob_token_ids": _is([]),
    "allowed_token_ids": _is(),
    "bad_words": _is([]),
    "skip_special_tokens": _is(True),
    "spaces_between_special_tokens": _is(True),
    "truncate_prompt_tokens": _is(),
    "return_token_ids": _is(False),
    "return_tokens_as_token_ids": _is(False),
    "service_tier": _is("auto", "default"),
    "kv_transfer_params": _is({}),
}
"""Fields of both routes that are refused unless their value asks for nothing."""

COMPLETION_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "suffix": _is(""),
    "prompt_embeds": _is(),
}

CHAT_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
    "reasoning_effort": _is("none"),
    "verbosity": _is("medium"),
    "web_search_options": _is(),
    "store": _is(False),
    "echo": _is(False),
    "best_of": _is(1),
    "continue_final_message": _is(False),
    "add_special_tokens": _is(False),
    "documents": _is([]),
    "chat_template": _is(),
    "thinking_token_budget": _is(),
}

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "include_reasoning",
    "request_id",
)
"""Known fields that change no answer here: passed over without a word."""
