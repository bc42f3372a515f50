"""Bodies of ``/v1/responses``: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests. The tables of fields in docs/http.md are held to this
module by a test.
"""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.http.call_fields import ELSEWHERE, is_one_of, read_call, read_template_kwargs
from trioserve.http.fields import Fields, decode_object, kind_of, shown
from trioserve.http.refused import Neutral, read_refused
from trioserve.http.responses.items import Item, read_input
from trioserve.http.sampling_fields import MAX_INT, Rules, read_sampling
from trioserve.http.schema import REASONING_EFFORTS
from trioserve.sampling_params import SamplingParams

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
"""What ``include`` may name. All but the first belong to items that never occur here."""


@attrs.frozen(kw_only=True)
class ResponsesRequest:
    """Body of ``/v1/responses``.

    Attributes:
        model: as asked, empty for the served one.
        items: the input as message items without ids.
        effort: of reasoning, for the chat template; None if it was not given.
        store: None if it was not given.
        truncate: whether the oldest items may be left out where the context is too short.
        timeout_s, queue_timeout_s: infinite where they were not given.
        ignored: names of unknown fields.
    """

    model: str
    items: list[Item]
    instructions: str | None
    previous_response_id: str | None
    stream: bool
    background: bool
    store: bool | None
    truncate: bool
    sampling: SamplingParams
    max_output_tokens: int | None
    max_tool_calls: int | None
    effort: str | None
    template_kwargs: dict[str, Any] | None
    tool_choice: str
    parallel_tool_calls: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    priority: int
    cache_salt: str
    timeout_s: float
    queue_timeout_s: float
    ignored: tuple[str, ...]


def parse_responses(raw: bytes, rules: Rules | None = None) -> ResponsesRequest:
    """Decode and check a body of ``/v1/responses``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    rules = rules or Rules()
    fields = Fields(decode_object(raw))
    items = read_input(fields)
    max_output_tokens = fields.integer("max_output_tokens", low=1, high=MAX_INT)
    sampling = read_sampling(
        fields,
        rules,
        max_tokens=max_output_tokens or rules.defaults.max_tokens,
        logprobs=_read_logprobs(fields, rules),
        prompt_logprobs=None,
    )
    _read_stream_options(fields)
    _read_text_format(fields)
    background, store = _read_storing(fields)
    effort = _read_reasoning(fields)
    values: dict[str, Any] = {
        "instructions": _optional_string(fields, "instructions"),
        "previous_response_id": _optional_string(fields, "previous_response_id"),
        "truncate": fields.choice("truncation", ("auto", "disabled")) == "auto",
        "max_tool_calls": fields.integer("max_tool_calls", low=1, high=MAX_INT),
        "template_kwargs": read_template_kwargs(fields, effort),
        "tool_choice": fields.choice("tool_choice", ("auto", "none")) or "auto",
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "metadata": _read_metadata(fields),
        "user": _optional_string(fields, "user"),
        "safety_identifier": _optional_string(fields, "safety_identifier"),
        "prompt_cache_key": _optional_string(fields, "prompt_cache_key"),
        **read_call(fields),
    }
    for name in WITHOUT_EFFECT:
        fields.value(name)
    read_refused(fields, NEUTRAL)
    fields.raise_faults()
    return ResponsesRequest(
        items=items,
        max_output_tokens=max_output_tokens,
        sampling=sampling,
        background=background,
        store=store,
        effort=effort,
        ignored=fields.unknown(),
        **values,
    )


def _read_storing(fields: Fields) -> tuple[bool, bool | None]:
    background = fields.boolean("background")
    store = fields.boolean("store") if fields.value("store") is not None else None
    if background and store is False:
        fields.fault("background", "needs the response to be stored; leave store out")
    return background, store


def _read_stream_options(fields: Fields) -> None:
    options = fields.object("stream_options")
    if options is not None:
        if fields.value("stream") is not True:
            fields.fault("stream_options", "needs stream to be true")
        options.neutral("include_obfuscation", lambda value: value is False)


def _read_reasoning(fields: Fields) -> str | None:
    reasoning = fields.object("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.choice("effort", REASONING_EFFORTS)
    # Nothing is told apart as reasoning, so there is nothing to sum up or to render again.
    for name in ("summary", "generate_summary", "context", "mode"):
        reasoning.neutral(name, lambda value: value in ("auto", "standard"))
    return effort


def _read_text_format(fields: Fields) -> None:
    text = fields.object("text")
    if text is None:
        return
    form = text.object("format")
    if form is not None and form.value("type") != "text":
        kind = shown(form.value("type"))
        form.fault("type", f"{kind} is not supported; only text is")
    text.neutral("verbosity", lambda value: value == "medium")


def _read_metadata(fields: Fields) -> dict[str, str]:
    inner = fields.object("metadata")
    if inner is None:
        return {}
    if len(inner.body) > MAX_METADATA:
        num = len(inner.body)
        fields.fault("metadata", f"must have at most {MAX_METADATA} entries, not {num}")
        return {}
    for key in inner.unread():
        value = inner.value(key)
        if len(key) > MAX_METADATA_KEY:
            fields.fault("metadata", f"{shown(key)} is a key of over {MAX_METADATA_KEY} characters")
        elif not isinstance(value, str):
            inner.fault(key, f"must be a string, not {kind_of(value)}")
        elif len(value) > MAX_METADATA_VALUE:
            inner.fault(key, f"must have at most {MAX_METADATA_VALUE} characters")
    return dict(inner.body)


def _read_logprobs(fields: Fields, rules: Rules) -> int | None:
    """How many alternatives are wanted for each token; None if nothing of the kind is."""
    included = fields.strings("include", max_items=len(INCLUDABLE))
    for name in included:
        if name not in INCLUDABLE:
            fields.fault("include", f"{shown(name)} is not known; known: {', '.join(INCLUDABLE)}")
    top = fields.integer("top_logprobs", 0, low=0, high=rules.max_logprobs)
    return int(top) if top or LOGPROBS in included else None


def _optional_string(fields: Fields, name: str, max_chars: int | None = None) -> str | None:
    return fields.string(name, max_chars=max_chars) if fields.value(name) is not None else None


NEUTRAL: Neutral = ELSEWHERE | {
    "max_tokens": is_one_of(),
    "tools": is_one_of([]),
    "conversation": is_one_of(),
    "prompt": is_one_of(),
    "context_management": is_one_of([]),
    "background_options": is_one_of({}),
    "moderation": is_one_of(),
    "image": is_one_of({}),
    "access_programs": is_one_of({}),
}
"""Fields that are refused unless their value asks for nothing, beside those of all routes."""

WITHOUT_EFFECT = ("prompt_cache_options", "prompt_cache_retention")
"""Known fields that change no answer here, beside those of all routes."""
