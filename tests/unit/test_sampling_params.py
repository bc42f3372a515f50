"""Every field of SamplingParams has its range, and what is outside is refused by name."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.errors import InvalidRequest
from trioserve.sampling_params import (
    MAX_BAD_WORDS,
    MAX_ID_LIST,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
    check_token_ids,
    show_number,
)

VOCAB = 5000
HUGE = 10**5000  # too long for Python to spell

ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-300, 100],
    "top_k": [-1, 0, 1, VOCAB + 1, 2**63 - 1],
    "top_p": [0, 1e-9, 1],
    "min_p": [0, 1],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "max_tokens": [None, 1, 2**63 - 1],
    "min_tokens": [0, 2**63 - 1],
    "stop": [(), ("\n",), ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS],
    "stop_token_ids": [(), (0, VOCAB - 1), (1, 1)],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "repetition_penalty": [0.01, 1, 100],
    "logit_bias": [{}, {0: -100, VOCAB - 1: 100.0}, dict.fromkeys(range(MAX_ID_LIST), 1)],
    "allowed_token_ids": [None, (0,), (5, 5), tuple(range(MAX_ID_LIST))],
    "bad_words": [(), (" ",), ("y" * MAX_STOP_CHARS,) * MAX_BAD_WORDS],
    "logprob_token_ids": [(), (0, VOCAB - 1), (3,) * MAX_LOGPROB_TOKEN_IDS],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
}

NOT_NUMBERS = [math.nan, math.inf, -math.inf, HUGE, -HUGE, "1", True, [1]]
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, 1e300, None, *NOT_NUMBERS],
    "top_k": [-2, 2**63, 1.5, None, *NOT_NUMBERS],
    "top_p": [-1e-9, 1.0001, None, *NOT_NUMBERS],
    "min_p": [-1e-9, 1.0001, None, *NOT_NUMBERS],
    "seed": [2**63, -(2**63) - 1, *NOT_NUMBERS],
    "max_tokens": [0, -1, 2**63, *NOT_NUMBERS],
    "min_tokens": [-1, 2**63, None, *NOT_NUMBERS],
    "stop": [
        ("",),
        ("a",) * (MAX_STOP_STRINGS + 1),
        ("x" * (MAX_STOP_CHARS + 1),),
        ("\ud800",),
        (b"a",),
        "a",
        None,
    ],
    "stop_token_ids": [(-1,), (VOCAB,), (HUGE,), (1.0,), ("1",), None],
    "logprobs": [-1, MAX_LOGPROBS + 1, *NOT_NUMBERS],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, *NOT_NUMBERS],
    "presence_penalty": [-2.01, 2.01, None, *NOT_NUMBERS],
    "frequency_penalty": [-2.01, 2.01, None, *NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, 0.0099, 1e-300, 100.1, None, *NOT_NUMBERS],
    "logit_bias": [
        {-1: 1.0},
        {VOCAB: 1.0},
        {HUGE: 1.0},
        {"1": 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {1: 100.5},
        {1: -100.5},
        {1: math.nan},
        {1: math.inf},
        {1: HUGE},
        {1: "1"},
        {1: None},
        dict.fromkeys(range(MAX_ID_LIST + 1), 1.0),
        None,
        [1],
    ],
    "allowed_token_ids": [(), (-1,), (VOCAB,), (HUGE,), (0.5,), (0,) * (MAX_ID_LIST + 1), 5],
    "bad_words": [
        ("",),
        ("a", ""),
        ("a",) * (MAX_BAD_WORDS + 1),
        ("x" * (MAX_STOP_CHARS + 1),),
        ("a\udfff",),
        (1,),
        "a",
        None,
    ],
    "logprob_token_ids": [(-1,), (VOCAB,), (HUGE,), (0,) * (MAX_LOGPROB_TOKEN_IDS + 1), None],
    "ignore_eos": [None, 1, "yes"],
    "include_stop_str_in_output": [None, 1, "yes"],
    "skip_special_tokens": [None, 1, "yes"],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{index}")
        for name, values in table.items()
        for index, value in enumerate(values)
    ]


def test_the_tables_know_all_fields() -> None:
    assert sorted(ACCEPTED) == sorted(REFUSED) == sorted(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_values_in_range_pass_and_reach_the_worker(name: str, value: Any) -> None:
    sampling = SamplingParams(**{name: value})
    sampling.validate(VOCAB)
    data = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == sampling


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{name: value}).validate(VOCAB)
    assert refusal.value.param == name
    message = refusal.value.message
    assert name in message or name.replace("_", " ") in message
    assert "\n" not in message
    assert len(message) < 200
    message.encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens (5) is over max_tokens (4)"),
        ({"presence_penalty": 3}, "presence_penalty must lie between -2 and 2, not 3"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie between 0.01 and 100, not 0"),
        ({"logit_bias": {7: -101.0}}, "logit_bias[7] must lie between -100 and 100, not -101.0"),
        (
            {"logit_bias": {5000: 1.0}},
            "logit_bias has the key 5000; token ids lie between 0 and 4999",
        ),
        (
            {"allowed_token_ids": (1, 2, -3)},
            "allowed_token_ids[2] is -3; token ids lie between 0 and 4999",
        ),
        (
            {"allowed_token_ids": ()},
            "allowed_token_ids is empty, which allows nothing; leave it out to allow all",
        ),
        ({"bad_words": ("a", "b\ud800")}, "bad_words[1] holds half a surrogate pair"),
        ({"seed": HUGE}, "seed must fit in 64 bits with sign, not a number beyond 64 bits"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 and fit in 64 bits"),
        ({"logprob_token_ids": (1,) * 129}, "logprob_token_ids has 129 entries; 128 are the most"),
    ],
)
def test_messages_say_what_is_wrong_and_what_may_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**fields).validate(VOCAB)
    assert message in refusal.value.message


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=300, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING, max_size=4))
def test_whatever_comes_is_refused_or_reaches_the_worker(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**fields)
    try:
        sampling.validate(VOCAB)
    except InvalidRequest as refusal:
        culprit = refusal.param
    else:
        culprit = None
    if culprit is not None:
        assert culprit in fields
        return
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    decoded.validate(VOCAB)


def test_numbers_in_messages_are_short() -> None:
    assert show_number(5) == "5"
    assert show_number(-2.5) == "-2.5"
    assert show_number(math.nan) == "nan"
    assert show_number(1e300) == "1e+300"
    assert show_number(-HUGE) == "a number beyond 64 bits"
    with pytest.raises(InvalidRequest, match=r"prompt\[1\] is a number beyond 64 bits"):
        check_token_ids("prompt", [1, HUGE], VOCAB)


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert not SamplingParams(prompt_logprobs=3).wants_logprobs
    assert SamplingParams(logprobs=0).wants_logprobs
    assert SamplingParams(logprob_token_ids=(1,)).wants_logprobs


def test_the_largest_request_is_checked_in_a_moment() -> None:
    largest = SamplingParams(
        logit_bias=dict.fromkeys(range(MAX_ID_LIST), 1.0),
        allowed_token_ids=tuple(range(MAX_ID_LIST)),
        bad_words=("z" * MAX_STOP_CHARS,) * MAX_BAD_WORDS,
    )
    started = time.thread_time()
    largest.validate(VOCAB)
    assert time.thread_time() - started < 0.1


LIMITS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "stop": (MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "repetition_penalty": (1 / MAX_REPETITION, MAX_REPETITION),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "logit_bias": (MAX_ID_LIST, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
    "allowed_token_ids": (MAX_ID_LIST,),
    "bad_words": (MAX_BAD_WORDS, MAX_STOP_CHARS),
    "logprobs": (0, MAX_LOGPROBS),
    "logprob_token_ids": (MAX_LOGPROB_TOKEN_IDS,),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def test_the_page_has_all_fields_defaults_and_limits() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/sampling.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    shown = {name.strip("`"): (default, about) for name, default, *about in rows}
    plain = SamplingParams()
    assert sorted(shown) == sorted(SamplingParams.__struct_fields__)
    for name, (default, _) in shown.items():
        value = getattr(plain, name)
        if value is None or value == () or value == {}:
            assert default == "none"
        else:
            assert default == str(value).lower()
    for name, limits in LIMITS.items():
        _, (reach, _) = shown[name]
        assert all(f"{limit:,g}" in reach for limit in limits), name
