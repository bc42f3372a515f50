"""Usage, context, limits; names carry ids of field failures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trioserve.engine.api import GenerationDefaults

from .bodies import BOTH, CHAT, USER
from .client import serving
from .fake_engine import FakeEngine

# -------------------------------------------------------------------------------- API-05


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("n", [1, 3])
async def test_api_05_usage_in_streams(path: str, body: dict[str, Any], n: int) -> None:
    async with serving() as served:
        asked = body | {"stream": True, "n": n, "stream_options": {"include_usage": True}}
        answer = await served.call("POST", path, asked)
        *chunks, last, done = answer.events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 2 * n,
            "total_tokens": 2 + 2 * n,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        for options in ({}, {"stream_options": None}, {"stream_options": {}}):
            answer = await served.call("POST", path, body | {"stream": True, "n": n} | options)
            assert all("usage" not in e and e["choices"] for e in answer.events[:-1])


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_05_stream_options_without_stream(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        options = {"stream_options": {"include_usage": True}}
        answer = await served.call("POST", path, body | options)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "stream_options"


# -------------------------------------------------------------------------------- API-08


@pytest.mark.parametrize("stream", [False, True])
async def test_api_08_prompt_that_fills_the_context(stream: bool) -> None:
    async with serving(FakeEngine(max_model_len=64)) as served:
        for length in (64, 65, 6000, 7000):
            for path, body in (
                ("/v1/completions", {"prompt": "x" * length}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * length}]}),
            ):
                answer = await served.call("POST", path, body | {"stream": stream})
                assert answer.status == 400
                error = answer.json["error"]
                assert error["type"] == "invalid_request_error"
                assert error["code"] == "context_length_exceeded"
                assert "64" in error["message"]
                assert str(length) in error["message"]
        assert served.engine.streams == []


async def test_api_08_max_tokens_is_clamped_to_the_context() -> None:
    engine = FakeEngine(max_model_len=64)
    async with serving(engine) as served:
        for prompt, asked, got in [
            ("x" * 8, {"max_tokens": 57}, 56),
            ("x" * 8, {"max_tokens": 10**9}, 56),
            ("x" * 8, {"max_tokens": 90, "min_tokens": 80}, 56),
            ("x" * 63, {}, 1),
            ("x" * 8, {}, 16),
            ("x" * 8, {"max_tokens": None}, 16),
        ]:
            answer = await served.call("POST", "/v1/completions", {"prompt": prompt} | asked)
            assert answer.status == 200
            assert engine.streams[-1].sampling.max_tokens == got
        for asked, want in [
            ({}, None),
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 6, "max_tokens": None}, 6),
            ({"max_completion_tokens": 6, "max_tokens": 6}, 6),
        ]:
            assert (await served.call("POST", "/v1/chat/completions", CHAT | asked)).status == 200
            assert engine.streams[-1].sampling.max_tokens == want


async def test_api_08_max_tokens_beyond_the_context_is_refused_by_setting() -> None:
    async with serving(FakeEngine(max_model_len=2048), max_tokens_policy="refuse") as served:
        for path, body, name in (
            ("/v1/completions", {"prompt": "x" * 8}, "max_tokens"),
            ("/v1/chat/completions", {"messages": [{**USER[0], "content": "x" * 8}]}, "max_tokens"),
            (
                "/v1/chat/completions",
                {"messages": [{**USER[0], "content": "x" * 8}]},
                "max_completion_tokens",
            ),
        ):
            for stream in (False, True):
                answer = await served.call("POST", path, body | {name: 2045, "stream": stream})
                assert answer.status == 400
                error = answer.json["error"]
                assert error["type"] == "invalid_request_error"
                assert error["code"] == "context_length_exceeded"
                assert "this model's maximum context length is 2048 tokens" in error["message"]
                assert error["param"] == name
                assert re.findall(r"\d+", error["message"]) == ["2048", "8", "2045", "2053", "2040"]
            assert (await served.call("POST", path, body | {name: 2040})).status == 200
        assert all(stream.sampling.max_tokens == 2040 for stream in served.engine.streams)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("policy", ["clamp", "refuse"])
async def test_api_08_no_limit_asked_for_is_what_is_left(
    path: str, body: dict[str, Any], policy: str
) -> None:
    """A default of the route or the model never is an error of the request."""
    engine = FakeEngine(max_model_len=8)
    engine.defaults = GenerationDefaults(max_tokens=500)
    async with serving(engine, max_tokens_policy=policy) as served:
        answer = await served.call("POST", path, body)
        assert answer.status == 200, answer.body
        assert engine.streams[-1].sampling.max_tokens == 6


async def test_api_08_errors_of_a_chat_name_its_own_field() -> None:
    async with serving(FakeEngine(max_model_len=8)) as served:
        for content in ("x" * 8, "x" * 9000, ""):
            body = {"messages": [{"role": "user", "content": content}]}
            answer = await served.call("POST", "/v1/chat/completions", body)
            assert answer.status == 400
            assert answer.json["error"]["param"] == "messages"
