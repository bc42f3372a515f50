"""Shapes of chat messages: legal ones made alike, illegal ones refused by path."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from trioserve.errors import InvalidRequest
from trioserve.text.messages import normalize_messages


def one(**message: Any) -> dict[str, Any]:
    [result] = normalize_messages([message])
    return result


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("extra", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_api_12_no_content_is_empty_text(extra: dict[str, Any]) -> None:
    result = one(role="assistant", tool_calls=[call("{}")], **extra)
    assert result["content"] == ""
    assert result["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_api_12_text_parts_are_joined_with_a_newline() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "c"]
    assert one(role="user", content=parts)["content"] == "a\n\nc"


def test_api_12_a_refusal_is_text() -> None:
    part = {"type": "refusal", "refusal": "no"}
    assert one(role="assistant", content=[part])["content"] == "no"


def test_api_12_developer_is_system() -> None:
    assert one(role="developer", content="x") == {"role": "system", "content": "x"}


def test_api_12_legal_keys_are_passed_on_and_null_ones_are_not() -> None:
    message = {
        "role": "tool",
        "content": "42",
        "name": "f",
        "tool_call_id": "c1",
        "tool_calls": None,
        "refusal": None,
        "audio": None,
        "reasoning_content": "hm",
    }
    assert one(**message) == {
        "role": "tool",
        "content": "42",
        "name": "f",
        "tool_call_id": "c1",
        "reasoning_content": "hm",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("null", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("not JSON", "not JSON"),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("3", "3"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_api_12_arguments(given: Any, expected: Any) -> None:
    result = one(role="assistant", tool_calls=[call(given)])
    assert result["tool_calls"][0]["function"]["arguments"] == expected


def test_an_empty_list_of_tool_calls_is_none_at_all() -> None:
    assert one(role="assistant", content="x", tool_calls=[]) == {
        "role": "assistant",
        "content": "x",
    }


def test_the_input_is_left_alone() -> None:
    messages = [
        {"role": "developer", "content": None, "name": None},
        {"role": "assistant", "tool_calls": [call('{"a": 1}')]},
    ]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one"),
        (None, "messages", "list"),
        ("hello", "messages", "list"),
        ({"role": "user"}, "messages", "list"),
        ([USER, "x"], "messages[1]", "object"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([USER, {"role": "robot"}], "messages[1].role", "'robot'"),
        ([{"role": ["user"]}], "messages[0].role", "user"),
        ([{"role": "user", "content": 3}], "messages[0].content", "text or a list"),
        ([{"role": "user", "content": {}}], "messages[0].content", "text or a list"),
        (
            [USER, USER, {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}],
            "messages[2].content[1].type",
            "'image_url'",
        ),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type", "None"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]", "object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "messages[0].content[0].text",
            "text",
        ),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls", "list"),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
            "object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}],
            "messages[0].tool_calls[0].function.name",
            "text",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(3)]}],
            "messages[0].tool_calls[0].function.arguments",
            "text",
        ),
    ],
)
def test_api_12_illegal_shapes_are_refused_by_path(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages(messages)
    assert caught.value.param == param
    assert words in caught.value.message
    assert len(caught.value.message) < 200


def test_a_huge_wrong_value_is_not_echoed_whole() -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalize_messages([{"role": "x" * 10_000}])
    assert len(caught.value.message) < 200
