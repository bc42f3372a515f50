"""What becomes of each field; names carry ids of field failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trioserve.engine.api import TextDelta, TokenLogprob

from .bodies import BOTH, CHAT, COMPLETION
from .client import serving
from .fake_engine import FakeEngine, FakeStream

# -------------------------------------------------------------------------------- API-15


async def test_api_15_unknown_fields_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as served:
        for stream in (False, True):
            caplog.clear()
            body = COMPLETION | {"invented": 1, "höhö\r\nx": 2, "user": "me", "stream": stream}
            answer = await served.call("POST", "/v1/completions", body)
            assert answer.status == 200
            named = answer.headers["x-trioserve-ignored-fields"]
            assert named == "invented, h\\xf6h\\xf6\\r\\nx"
            assert len([r for r in caplog.records if "ignored" in r.getMessage()]) == 1


# ------------------------------------------------------------------------- what is honoured


async def test_every_honoured_field_arrives() -> None:
    engine = FakeEngine()
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 2**63 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "n": 2,
        "priority": -3,
        "cache_salt": "s",
    }
    async with serving(engine) as served:
        for path, body in BOTH:
            engine.streams.clear()
            assert (await served.call("POST", path, body | fields)).status == 200
            first, second = engine.streams
            got = first.sampling
            assert (got.max_tokens, got.min_tokens, got.temperature) == (9, 2, 0.0)
            assert (got.top_p, got.top_k, got.min_p) == (0.5, 4, 0.1)
            assert (got.stop, got.stop_token_ids) == (("a", "b"), (5,))
            assert got.ignore_eos
            assert got.include_stop_str_in_output
            assert got.seed == 2**63 - 1
            assert second.sampling.seed == -(2**63)  # the next, around the end
            assert first.extra == {"priority": -3, "cache_salt": "s"}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_all_kinds(prompt: Any, tokens: list[list[int]], stream: bool) -> None:
    def script(stream: FakeStream) -> None:
        stream.say(f"<{stream.id}>", finish="stop")

    engine = FakeEngine(script=script)
    async with serving(engine) as served:
        answer = await served.call(
            "POST", "/v1/completions", {"prompt": prompt, "n": 2, "stream": stream}
        )
        assert answer.status == 200
        want = [ids for ids in tokens for _ in range(2)]
        assert [stream.prompt_token_ids for stream in engine.streams] == want
        texts = [""] * len(want)
        for part in answer.events[:-1] if stream else [answer.json]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [f"<{index}>" for index in range(len(want))]
        if not stream:
            assert answer.json["usage"]["prompt_tokens"] == sum(map(len, tokens))


async def test_echo() -> None:
    async with serving() as served:
        body = {"prompt": ["ab", "c"], "echo": True}
        whole = await served.call("POST", "/v1/completions", body)
        texts = [choice["text"] for choice in whole.json["choices"]]
        assert texts == ["abHello world", "cHello world"]
        streamed = await served.call("POST", "/v1/completions", body | {"stream": True})
        parts = ["", ""]
        for event in streamed.events[:-1]:
            for choice in event["choices"]:
                parts[choice["index"]] += choice["text"]
        assert parts == texts


async def test_chat_shapes() -> None:
    async with serving() as served:
        whole = (await served.call("POST", "/v1/chat/completions", CHAT)).json
        assert whole["object"] == "chat.completion"
        assert whole["model"] == "fake"
        [choice] = whole["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello world",
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
        }
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None
        streamed = await served.call("POST", "/v1/chat/completions", CHAT | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"
        assert "server" not in streamed.headers
        deltas = [event["choices"][0]["delta"] for event in streamed.events[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1:] == [{"content": "Hello"}, {"content": " world"}]
        assert len({event["id"] for event in streamed.events[:-1]}) == 1


async def test_template_kwargs_reach_the_template() -> None:
    async with serving() as served:
        kwargs = {"enable_thinking": False}
        await served.call("POST", "/v1/chat/completions", CHAT | {"chat_template_kwargs": kwargs})
        assert served.engine.template_kwargs == kwargs


SMILE = "😀".encode()
LOGPROBS = [
    TokenLogprob("a", 97, b"a", -0.5, [TokenLogprob("b", 98, b"b", -0.1, [])]),
    TokenLogprob("�", 1, SMILE[:2], float("-inf"), []),
    TokenLogprob("�", 2, SMILE[2:], -1.0, []),
    TokenLogprob("c", 99, b"c", -0.25, []),
]


def script_logprobs(stream: FakeStream) -> None:
    stream.push(
        TextDelta("a", [97], LOGPROBS[:1]),
        TextDelta("😀c", [1, 2, 99], LOGPROBS[1:], finish_reason="length"),
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(stream: bool) -> None:
    async with serving(FakeEngine(script=script_logprobs)) as served:
        body = COMPLETION | {"logprobs": 1, "stream": stream}
        answer = await served.call("POST", "/v1/completions", body)
        parts = answer.events[:-1] if stream else [answer.json]
        joined: dict[str, list[Any]] = {}
        for part in parts:
            for name, values in part["choices"][0]["logprobs"].items():
                joined.setdefault(name, []).extend(values)
        assert joined["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "c"]
        assert joined["token_logprobs"] == [-0.5, -9999.0, -1.0, -0.25]
        assert joined["top_logprobs"][0] == {"a": -0.5, "b": -0.1}
        assert joined["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(stream: bool) -> None:
    async with serving(FakeEngine(script=script_logprobs)) as served:
        body = CHAT | {"logprobs": True, "top_logprobs": 1, "stream": stream}
        answer = await served.call("POST", "/v1/chat/completions", body)
        assert served.engine.streams[0].sampling.logprobs == 1
        parts = answer.events[1:-1] if stream else [answer.json]
        content = [e for part in parts for e in part["choices"][0]["logprobs"]["content"]]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "a😀c".encode()
        assert content[0]["top_logprobs"] == [{"token": "b", "logprob": -0.1, "bytes": [98]}]
        assert content[1]["logprob"] == -9999.0
