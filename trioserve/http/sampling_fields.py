"""The fields of request bodies that become SamplingParams."""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.config.schema import HttpConfig
from trioserve.engine.api import GenerationDefaults
from trioserve.http.fields import Fields, kind_of, shown
from trioserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_ID_LIST,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MAX_STOP_STRINGS,
    SamplingParams,
)

MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_INT = 2**63 - 1


@attrs.frozen(kw_only=True)
class Rules:
    """What the operator allows in a body, and what holds where a body says nothing."""

    max_n: int = MAX_CHOICES
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = MAX_STOP_STRINGS
    trust_chat_template: bool = False
    timings: bool = False
    defaults: GenerationDefaults = attrs.field(factory=GenerationDefaults)

    @classmethod
    def of(cls, http: HttpConfig, defaults: GenerationDefaults) -> Rules:
        """Those of a server."""
        return cls(
            max_n=http.max_n,
            max_logprobs=http.max_logprobs,
            max_stop_strings=http.max_stop_strings,
            trust_chat_template=http.trust_request_chat_template,
            timings=http.request_timings,
            defaults=defaults,
        )


def read_sampling(
    fields: Fields,
    rules: Rules,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The sampling parameters, faults noted in ``fields``.

    Args:
        rules: limits and defaults.
        max_tokens, logprobs, prompt_logprobs: read already, as each route has its own names.
    """
    defaults = rules.defaults
    min_tokens = fields.integer("min_tokens", 0, low=0, high=MAX_INT)
    if max_tokens is not None and min_tokens > max_tokens:
        fields.fault("min_tokens", f"({min_tokens}) is over max_tokens ({max_tokens})")
    top_k = fields.integer("top_k", _or(defaults.top_k, 0), low=-1, high=MAX_INT)
    logprob_token_ids = fields.integers("logprob_token_ids", max_items=MAX_LOGPROB_TOKEN_IDS)
    if logprob_token_ids and logprobs is None:
        logprobs = 0
    return SamplingParams(
        temperature=fields.number("temperature", _or(defaults.temperature, 1.0), low=0, high=100),
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", _or(defaults.top_p, 1.0), low=0.0, high=1.0),
        min_p=fields.number("min_p", _or(defaults.min_p, 0.0), low=0.0, high=1.0),
        seed=fields.integer("seed", low=-MAX_SEED - 1, high=MAX_SEED),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=fields.strings("stop", max_items=rules.max_stop_strings),
        stop_token_ids=fields.integers("stop_token_ids", max_items=MAX_STOP_TOKEN_IDS),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        presence_penalty=_penalty(fields, "presence_penalty"),
        frequency_penalty=_penalty(fields, "frequency_penalty"),
        repetition_penalty=_repetition_penalty(fields, _or(defaults.repetition_penalty, 1.0)),
        logit_bias=_logit_bias(fields),
        allowed_token_ids=_allowed_token_ids(fields),
        bad_words=fields.strings("bad_words", max_items=MAX_BAD_WORDS),
        logprob_token_ids=logprob_token_ids,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _penalty(fields: Fields, name: str) -> float:
    return fields.number(name, 0.0, low=-MAX_PENALTY, high=MAX_PENALTY)


def _repetition_penalty(fields: Fields, default: float) -> float:
    return fields.number("repetition_penalty", default, low=1 / MAX_REPETITION, high=MAX_REPETITION)


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = fields.object("logit_bias")
    if bias is None:
        return {}
    if len(bias.body) > MAX_ID_LIST:
        fields.fault("logit_bias", f"must have at most {MAX_ID_LIST} entries, not {len(bias.body)}")
        return {}
    read: dict[int, float] = {}
    for name in bias.unread():
        added = bias.number(name, 0.0, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
        if not (name.isascii() and name.isdigit() and len(name) <= 18):
            bias.fault(shown(name), 'is no token id; keys are ids as text, such as "50256"')
        elif int(name) in read:
            bias.fault(shown(name), "is given twice")
        else:
            read[int(name)] = added
    return read


def _allowed_token_ids(fields: Fields) -> tuple[int, ...] | None:
    value = fields.value("allowed_token_ids")
    if value is None:
        return None
    if value == []:
        fields.fault("allowed_token_ids", "must not be empty: it would allow nothing")
        return None
    if not isinstance(value, list):
        fields.fault("allowed_token_ids", f"must be an array of integers, not {kind_of(value)}")
        return None
    return fields.integers("allowed_token_ids", max_items=MAX_ID_LIST) or None
