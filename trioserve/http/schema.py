"""Request bodies of the generation routes: what is honoured, refused and ignored.

Pure functions from bytes to frozen requests; nothing here waits, logs or knows the model. The table
of fields in docs/http.md is held to this module by a test.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import attrs
import msgspec

from trioserve.http.fields import Fields, decode_object
from trioserve.http.prompt_fields import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    ROLES,
    last_text,
    read_documents,
    read_messages,
    read_prompts,
)
from trioserve.http.refused import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    SHARED_NEUTRAL,
    WITHOUT_EFFECT,
    read_refused,
)
from trioserve.http.sampling_fields import (
    MAX_CHOICES,
    MAX_INT,
    MAX_STOP_TOKEN_IDS,
    Rules,
    read_sampling,
)
from trioserve.sampling_params import MAX_SEED, SamplingParams

__all__ = [
    "CHAT_NEUTRAL",
    "COMPLETION_NEUTRAL",
    "MAX_CHOICES",
    "MAX_INT",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "MAX_STOP_TOKEN_IDS",
    "ROLES",
    "SHARED_NEUTRAL",
    "WITHOUT_EFFECT",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "Rules",
    "parse_chat",
    "parse_completion",
    "read_messages",
]

DEFAULT_COMPLETION_TOKENS = 16
MAX_STREAMS = 1024  # prompts times n of one request
MAX_TEMPLATE_CHARS = 128 * 1024
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 1e9
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LIMITS = ("max_completion_tokens", "max_tokens")
SIDES = ("left", "right")


@attrs.frozen(kw_only=True)
class Shape:
    """What of an answer is shown, beside its text.

    Attributes:
        usage: a chunk with the usage ends a stream.
        running_usage: every chunk has the usage so far.
        logprobs: how many alternatives are shown with each token; None for no log probabilities.
        prompt_logprobs: likewise for each token of the prompt.
        token_ids: the ids of prompt and answer are shown.
        tokens_as_ids: tokens beside log probabilities are named by their ids.
        timings: what took how long is shown.
    """

    usage: bool = False
    running_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    timings: bool = False


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """What both routes have in common.

    Attributes:
        prompt_field: the field that holds the prompt, for messages.
        max_tokens_field: likewise; empty where ``max_tokens`` is a default.
        model: as asked, empty for the served one.
        request_id: empty where it was not given.
        sampling: for the first choice, see ``samplings``. ``max_tokens`` is None where neither the
            request nor the model nor the route has one.
        num_choices: n.
        best_of: how many answers are made, of which the best n are shown.
        truncate_prompt_tokens: the most tokens of a prompt that are used; -1: what leaves room for
            ``max_tokens``; None: all.
        truncation_side: where what is too much is cut off.
        timeout_s, queue_timeout_s: infinite where they were not given.
        ignored: names of unknown fields.
    """

    prompt_field: ClassVar[str] = "prompt"

    model: str
    request_id: str
    sampling: SamplingParams
    num_choices: int
    best_of: int
    stream: bool
    shape: Shape
    truncate_prompt_tokens: int | None
    truncation_side: str
    priority: int
    cache_salt: str
    timeout_s: float
    queue_timeout_s: float
    max_tokens_field: str
    ignored: tuple[str, ...]

    def samplings(self) -> list[SamplingParams]:
        """One for each answer to a prompt. Answer i is seeded with ``seed`` + i; the prompt's log
        probabilities are the same for all, so only the first asks for them."""
        first = self.sampling
        if self.best_of > self.num_choices and first.logprobs is None:
            first = msgspec.structs.replace(first, logprobs=0)  # to be ranked by
        if self.best_of == 1:
            return [first]
        other = msgspec.structs.replace(first, prompt_logprobs=None)
        return [
            first,
            *(
                other if first.seed is None else _reseeded(other, first.seed + index)
                for index in range(1, self.best_of)
            ),
        ]


def _reseeded(sampling: SamplingParams, seed: int) -> SamplingParams:
    around = (seed + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1
    return msgspec.structs.replace(sampling, seed=around)


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``.

    Attributes:
        prompts: texts or token ids, at least one.
        echo: the prompt is shown before the answer.
        scores: nothing but the prompt is wanted; one token is made and not shown.
    """

    prompts: tuple[str | list[int], ...]
    echo: bool
    scores: bool
    add_special_tokens: bool


@attrs.frozen(kw_only=True)
class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``.

    Attributes:
        messages: as given, their shape checked.
        echo: text shown before the answer, empty for none.
        prompt_text: the rendered prompt is shown.
    """

    prompt_field: ClassVar[str] = "messages"

    messages: list[dict[str, Any]]
    echo: str
    prompt_text: bool
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]


def parse_completion(raw: bytes, rules: Rules | None = None) -> CompletionRequest:
    """Decode and check a body of ``/v1/completions``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    rules = rules or Rules()
    fields = Fields(decode_object(raw))
    prompts = read_prompts(fields)
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", low=0, high=rules.max_logprobs)
    max_tokens = fields.integer(
        "max_tokens", DEFAULT_COMPLETION_TOKENS, low=0 if echo else 1, high=MAX_INT
    )
    best_of = fields.integer("best_of", low=1, high=rules.max_n)
    echoed = logprobs if echo else None
    if echo and logprobs is None and fields.value("logprob_token_ids"):
        echoed = 0  # the answer shows log probabilities, so the prompt before it does
    common = _read_common(fields, rules, max(max_tokens, 1), logprobs, best_of, echoed)
    if len(prompts) * common["best_of"] > MAX_STREAMS:
        name = "n" if best_of is None else "best_of"
        fields.fault(name, f"prompts times {name} must be at most {MAX_STREAMS}")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    read_refused(fields, COMPLETION_NEUTRAL)
    fields.raise_faults()
    return CompletionRequest(
        prompts=prompts,
        echo=echo,
        scores=max_tokens == 0,
        add_special_tokens=add_special_tokens,
        ignored=fields.unknown(),
        **common,
    )


def parse_chat(raw: bytes, rules: Rules | None = None) -> ChatRequest:
    """Decode and check a body of ``/v1/chat/completions``.

    Raises:
        InvalidBody: listing all faults with their paths.
    """
    rules = rules or Rules()
    fields = Fields(decode_object(raw))
    messages = read_messages(fields)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", low=0, high=rules.max_logprobs)
    if top_logprobs and not wants_logprobs:
        fields.fault("top_logprobs", "needs logprobs to be true")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    max_tokens = _chat_max_tokens(fields, rules)
    common = _read_common(fields, rules, max_tokens, logprobs, None, None)
    continues = fields.boolean("continue_final_message")
    opens = fields.boolean("add_generation_prompt", not continues)
    if continues and opens:
        fields.fault("continue_final_message", "contradicts add_generation_prompt; give one")
    echo = fields.boolean("echo")
    values: dict[str, Any] = {
        "prompt_text": fields.boolean("return_prompt_text"),
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "add_special_tokens": fields.boolean("add_special_tokens"),
        "chat_template": read_chat_template(fields, rules),
        "template_kwargs": read_chat_kwargs(fields),
    }
    read_refused(fields, CHAT_NEUTRAL)
    fields.raise_faults()
    return ChatRequest(
        messages=messages,
        echo=last_text(messages) if echo else "",
        ignored=fields.unknown(),
        **values,
        **common,
    )


# ------------------------------------------------------------------------------- the parts


def _read_common(
    fields: Fields,
    rules: Rules,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None,
    echoed_logprobs: int | None,
) -> dict[str, Any]:
    """The fields both routes share, as arguments of GenerationRequest."""
    stream = fields.boolean("stream")
    shown = fields.integer("prompt_logprobs", low=0, high=rules.max_logprobs)
    if stream and shown is not None:
        fields.fault("prompt_logprobs", "is not supported together with stream")
    asked = [k for k in (shown, echoed_logprobs) if k is not None]
    sampling = read_sampling(
        fields,
        rules,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=max(asked, default=None),
    )
    num_choices = fields.integer("n", 1, low=1, high=rules.max_n)
    return {
        "model": fields.string("model"),
        "request_id": _request_id(fields),
        "sampling": sampling,
        "num_choices": num_choices,
        "best_of": _best_of(fields, best_of, num_choices, stream),
        "stream": stream,
        "shape": _read_shape(fields, rules, stream, sampling.logprobs, shown),
        **_read_truncation(fields),
        "priority": fields.integer("priority", 0, low=-MAX_INT - 1, high=MAX_INT),
        "cache_salt": fields.string("cache_salt", max_chars=128),
        "max_tokens_field": _limit_field(fields),
        "timeout_s": _timeout(fields, "timeout_s"),
        "queue_timeout_s": _timeout(fields, "queue_timeout_s"),
    }


def _read_shape(
    fields: Fields,
    rules: Rules,
    stream: bool,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Shape:
    options = fields.object("stream_options")
    if options is not None and not stream:
        fields.fault("stream_options", "needs stream to be true")
    return Shape(
        usage=options is not None and options.boolean("include_usage"),
        running_usage=options is not None and options.boolean("continuous_usage_stats"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        timings=fields.boolean("include_timings", rules.timings),
    )


def _limit_field(fields: Fields) -> str:
    """The field by which this route was asked for so many tokens."""
    unread = fields.unread()
    given = [name for name, value in fields.body.items() if value and name not in unread]
    return next((name for name in LIMITS if name in given), "")


def _timeout(fields: Fields, name: str) -> float:
    return fields.number(name, math.inf, low=MIN_TIMEOUT_S, high=MAX_TIMEOUT_S)


def _request_id(fields: Fields) -> str:
    value = fields.string("request_id")
    if value and not REQUEST_ID.fullmatch(value):
        fields.fault("request_id", "must be 1 to 128 letters, digits, dots, colons, _ and -")
    return value


def _best_of(fields: Fields, best_of: int | None, num_choices: int, stream: bool) -> int:
    if best_of is None:
        return num_choices
    if best_of < num_choices:
        fields.fault("best_of", f"({best_of}) is less than n ({num_choices})")
    elif best_of > num_choices and stream:
        fields.fault("best_of", "must equal n in a stream: the best is known only at the end")
    return best_of


def _read_truncation(fields: Fields) -> dict[str, Any]:
    most = fields.integer("truncate_prompt_tokens", low=-1, high=MAX_INT)
    if most == 0:
        fields.fault("truncate_prompt_tokens", "must be at least 1, or -1 for what there is room")
    side = fields.choice("truncation_side", SIDES)
    if side is not None and most is None:
        fields.fault("truncation_side", "needs truncate_prompt_tokens")
    return {"truncate_prompt_tokens": most, "truncation_side": side or "left"}


def _chat_max_tokens(fields: Fields, rules: Rules) -> int | None:
    old = fields.integer("max_tokens", low=1, high=MAX_INT)
    new = fields.integer("max_completion_tokens", low=1, high=MAX_INT)
    if old is not None and new is not None and old != new:
        fields.fault(
            "max_completion_tokens", f"({new}) contradicts max_tokens ({old}); give one of them"
        )
    for chosen in (new, old, rules.defaults.max_tokens):
        if chosen is not None:
            return int(chosen)
    return None


def read_chat_template(fields: Fields, rules: Rules) -> str | None:
    """A template that came with the request, if the operator trusts such."""
    template = fields.string("chat_template", max_chars=MAX_TEMPLATE_CHARS)
    if template and not rules.trust_chat_template:
        fields.fault(
            "chat_template",
            "is a program, and this server runs none that come with requests; the operator can"
            " allow it with http.trust_request_chat_template",
        )
    return template or None


def read_chat_kwargs(fields: Fields) -> dict[str, Any]:
    """Variables of the template: those that have fields of their own, and any others."""
    given = fields.value("chat_template_kwargs")
    own: dict[str, Any] = {}
    if documents := read_documents(fields):
        own["documents"] = documents
    effort = fields.choice("reasoning_effort", REASONING_EFFORTS)
    if effort is not None:
        own["reasoning_effort"] = effort
    if effort == "none":
        own["enable_thinking"] = False  # as those templates call it that can do without
    if given is None:
        return own
    if not isinstance(given, dict):
        fields.object("chat_template_kwargs")  # notes the fault
        return own
    return own | given
