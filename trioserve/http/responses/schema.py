"""Bodies of ``/v1/responses``: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests. The tables of fields in docs/http.md are held to this
module by a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trioserve.http.fields import Fields, decode_object, kind_of, shown
from trioserve.http.responses.items import Item, read_input
from trioserve.http.schema import MAX_INT, _read_common
from trioserve.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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


def parse_responses(raw: bytes) -> ResponsesRequest:
    """Decode and check a body of ``/v1/responses``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    fields = Fields(decode_object(raw))
    items = read_input(fields)
    max_output_tokens = fields.integer("max_output_tokens", low=1, high=MAX_INT)
    fields.neutral("n", lambda value: value == 1)
    common = _read_common(fields, max_output_tokens, _read_logprobs(fields))
    del common["num_choices"], common["include_usage"]
    _read_stream_options(fields)
    request = {
        "instructions": _optional_string(fields, "instructions"),
        "previous_response_id": _optional_string(fields, "previous_response_id"),
        "truncate": fields.choice("truncation", ("auto", "disabled")) == "auto",
        "max_tool_calls": fields.integer("max_tool_calls", low=1, high=MAX_INT),
        "effort": _read_reasoning(fields),
        "tool_choice": fields.choice("tool_choice", ("auto", "none")) or "auto",
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "metadata": _read_metadata(fields),
        "user": _optional_string(fields, "user"),
        "safety_identifier": _optional_string(fields, "safety_identifier"),
        "prompt_cache_key": _optional_string(fields, "prompt_cache_key"),
    }
    kwargs = fields.object("chat_template_kwargs")
    _read_text_format(fields)
    background, store = _read_storing(fields)
    for name, is_neutral in NEUTRAL.items():
        fields.neutral(name, is_neutral)
    fields.raise_faults()
    return ResponsesRequest(
        items=items,
        max_output_tokens=max_output_tokens,
        background=background,
        store=store,
        template_kwargs=kwargs.body if kwargs is not None else None,
        ignored=fields.unknown(),
        **request,
        **common,
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
    effort = reasoning.choice("effort", EFFORTS)
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
    for key, value in inner.body.items():
        if len(key) > MAX_METADATA_KEY:
            fields.fault("metadata", f"{shown(key)} is a key of over {MAX_METADATA_KEY} characters")
        elif not isinstance(value, str):
            inner.fault(key, f"must be a string, not {kind_of(value)}")
        elif len(value) > MAX_METADATA_VALUE:
            inner.fault(key, f"must have at most {MAX_METADATA_VALUE} characters")
    return dict(inner.body)


def _read_logprobs(fields: Fields) -> int | None:
    """How many alternatives are wanted for each token; None if nothing of the kind is."""
    included = fields.strings("include", max_items=len(INCLUDABLE))
    for name in included:
        if name not in INCLUDABLE:
            fields.fault("include", f"{shown(name)} is not known; known: {', '.join(INCLUDABLE)}")
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    return int(top) if top or LOGPROBS in included else None


def _optional_string(fields: Fields, name: str, max_chars: int | None = None) -> str | None:
    return fields.string(name, max_chars=max_chars) if fields.value(name) is not None else None


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == other and type(value) is type(other) for other in neutral)


NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "tools": _is([]),
    "service_tier": _is("auto", "default"),
    "prompt_cache_retention": _is("in_memory"),
    "prompt_cache_options": _is({}),
    "conversation": _is(),
    "prompt": _is(),
    "context_management": _is([]),
    "background_options": _is({}),
    "moderation": _is(),
    "image": _is({}),
    "access_programs": _is({}),
}
"""Fields that are refused unless their value asks for nothing."""
