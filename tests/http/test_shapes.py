"""What answers look like: fields, nulls, chunks; names carry ids of field failures."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from attrs import evolve

import trioserve
from trioserve.engine.api import EngineStatus, TextDelta, Timings
from trioserve.http.fingerprint import system_fingerprint
from trioserve.http.timings import NAMES

from .bodies import BOTH, CHAT, COMPLETION
from .client import serving
from .fake_engine import FakeEngine, FakeStream
from .joining import join

STREAM = {"stream": True}
USAGE = {"stream_options": {"include_usage": True}}


async def test_chat_in_one_piece() -> None:
    async with serving() as served:
        whole = (await served.call("POST", "/v1/chat/completions", CHAT, X_Request_Id="i")).json
        assert abs(whole.pop("created") - time.time()) < 60
        assert re.fullmatch(
            rf"trioserve-{trioserve.__version__}-[0-9a-f]{{8}}", whole.pop("system_fingerprint")
        )
        assert whole == {
            "id": "chatcmpl-i",
            "object": "chat.completion",
            "model": "fake",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "Hello world",
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "reasoning": None,
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 2,
                "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "service_tier": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "metrics": None,
        }


async def test_completion_in_one_piece() -> None:
    async with serving() as served:
        whole = (await served.call("POST", "/v1/completions", COMPLETION, X_Request_Id="i")).json
        assert abs(whole.pop("created") - time.time()) < 60
        assert whole.pop("system_fingerprint").startswith("trioserve-")
        assert whole.pop("usage")["total_tokens"] == 4
        assert whole == {
            "id": "cmpl-i",
            "object": "text_completion",
            "model": "fake",
            "choices": [
                {
                    "index": 0,
                    "text": "Hello world",
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": None,
                    "prompt_token_ids": None,
                    "prompt_logprobs": None,
                }
            ],
            "service_tier": None,
            "kv_transfer_params": None,
            "metrics": None,
        }


async def test_chat_in_chunks() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/v1/chat/completions", CHAT | STREAM)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "server" not in answer.headers
        repeated = {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert all(set(chunk) == repeated for chunk in answer.events[:-1])
        assert [chunk["choices"] for chunk in answer.events[:-1]] == [
            [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}]
            for delta, reason, more in [
                ({"role": "assistant", "content": ""}, None, {}),
                ({"content": "Hello"}, None, {}),
                ({"content": " world"}, "stop", {"stop_reason": None}),
            ]
        ]


async def test_completion_in_chunks() -> None:
    async with serving() as served:
        answer = await served.call("POST", "/v1/completions", COMPLETION | STREAM)
        assert [chunk["choices"] for chunk in answer.events[:-1]] == [
            [
                {
                    "index": 0,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": reason,
                    "stop_reason": None,
                }
            ]
            for text, reason in [("Hello", None), (" world", "stop")]
        ]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_what_stopped_it(path: str, body: dict[str, Any]) -> None:
    for stop in ("\n", 7):

        def script(stream: FakeStream, stop: str | int = stop) -> None:
            stream.push(TextDelta("x", [7], finish_reason="stop", stop_reason=stop))

        async with serving(FakeEngine(script=script)) as served:
            whole = await served.call("POST", path, body)
            assert whole.json["choices"][0]["stop_reason"] == stop
            streamed = await served.call("POST", path, body | STREAM)
            assert join(streamed.events)["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_05_continuous_usage(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        options = {"continuous_usage_stats": True}
        for last in (False, True):
            asked = {"stream_options": options | {"include_usage": last}, "n": 2}
            events = (await served.call("POST", path, body | STREAM | asked)).events[:-1]
            assert bool(events[-1]["choices"]) is not last
            usages = [event["usage"] for event in events]
            assert all(usage["prompt_tokens"] == 2 for usage in usages)
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == 4
            assert all(u["total_tokens"] == 2 + u["completion_tokens"] for u in usages)


# ------------------------------------------------------------------------------ token ids


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids(path: str, body: dict[str, Any], stream: bool) -> None:
    async with serving() as served:
        asked = body | {"return_token_ids": True, "stream": stream, "n": 2}
        answer = await served.call("POST", path, asked)
        whole = join(answer.events) if stream else answer.json
        for choice in whole["choices"]:
            assert choice["token_ids"] == [7, 7]
        holders = [whole] if "chat" in path else whole["choices"]
        assert [holder["prompt_token_ids"] for holder in holders] == [[104, 105]] * len(holders)


async def test_tokens_without_text_are_told_to_those_who_ask_for_ids() -> None:
    def script(stream: FakeStream) -> None:
        stream.push(TextDelta("", [1]), TextDelta("x", [2], finish_reason="stop"))

    async with serving(FakeEngine(script=script)) as served:
        for path, body in BOTH:
            asked = body | STREAM | {"return_token_ids": True}
            joined = join((await served.call("POST", path, asked)).events)
            assert joined["choices"][0]["token_ids"] == [1, 2]


async def test_the_rendered_prompt() -> None:
    async with serving() as served:
        asked = CHAT | {"return_prompt_text": True}
        answer = await served.call("POST", "/v1/chat/completions", asked)
        assert answer.json["prompt_text"] == "hi"
        streamed = await served.call("POST", "/v1/chat/completions", asked | STREAM)
        assert streamed.events[0]["prompt_text"] == "hi"
        assert served.engine.decoded == [([104, 105], False)] * 2


# ---------------------------------------------------------------------------- fingerprint


def test_fingerprint_changes_with_what_changes_results() -> None:
    engine = FakeEngine()
    status = engine.status
    assert status.info is not None
    assert system_fingerprint(status) == system_fingerprint(engine.status)
    others: list[EngineStatus] = [evolve(status, model_name="other")]
    for name in ("weights", "dtype", "device", "attention", "architecture"):
        info = msgspec.structs.replace(status.info, **{name: "other"})
        others.append(evolve(status, info=info))
    prints = {system_fingerprint(other) for other in (status, *others)}
    assert len(prints) == 1 + len(others)
    same = msgspec.structs.replace(status.info, threads=99, rss_bytes=1, num_blocks=5)
    assert system_fingerprint(evolve(status, info=same)) == system_fingerprint(status)


async def test_fingerprint_is_the_same_in_every_answer_and_chunk() -> None:
    async with serving() as served:
        prints = set()
        for path, body in BOTH:
            prints.add((await served.call("POST", path, body)).json["system_fingerprint"])
            events = (await served.call("POST", path, body | STREAM)).events[:-1]
            prints.update(event["system_fingerprint"] for event in events)
        assert len(prints) == 1


# -------------------------------------------------------------------------------- timings


def script_times(stream: FakeStream) -> None:
    stream.fixed_timings = Timings(10.0 + stream.id, 10.25, 10.5 + stream.id, 12.5 + stream.id)
    stream.say("a", "b", "c", finish="stop")


WANT_TIMINGS = {
    "queue_time_ms": 250.0,
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "mean_itl_ms": 1000.0,
    "tokens_per_second": 1.0,
}


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("more", [{}, STREAM, STREAM | USAGE])
async def test_timings(path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    assert set(WANT_TIMINGS) == set(NAMES)
    for settings, fields in (({"request_timings": True}, {}), ({}, {"include_timings": True})):
        async with serving(FakeEngine(script=script_times), **settings) as served:
            answer = await served.call("POST", path, body | more | fields)
            if not more:
                assert answer.json["metrics"] == WANT_TIMINGS
                continue
            *others, last, _ = answer.events
            assert last["metrics"] == WANT_TIMINGS
            assert all("metrics" not in event for event in others)
    async with serving(FakeEngine(script=script_times), request_timings=True) as served:
        quiet = await served.call("POST", path, body | more | {"include_timings": False})
        assert b"time_to_first_token_ms" not in quiet.body


async def test_timings_of_several_answers() -> None:
    async with serving(FakeEngine(script=script_times)) as served:
        asked = COMPLETION | {"include_timings": True, "n": 2}
        metrics = (await served.call("POST", "/v1/completions", asked)).json["metrics"]
        assert (
            metrics["generation_time_ms"] == 3000.0
        )  # from the first's first to the second's last
        assert metrics["mean_itl_ms"] == 1000.0
        assert metrics["tokens_per_second"] == round(4 / 3, 3)


async def test_timings_in_a_stream_of_several_answers_come_once() -> None:
    async with serving(FakeEngine(script=script_times)) as served:
        asked = COMPLETION | STREAM | {"include_timings": True, "n": 2}
        events = (await served.call("POST", "/v1/completions", asked)).events[:-1]
        assert ["metrics" in event for event in events] == [False] * (len(events) - 1) + [True]


async def test_timings_of_one_token_have_no_rates() -> None:
    def script(stream: FakeStream) -> None:
        stream.fixed_timings = Timings(1.0, 1.0, 2.0, 2.0)
        stream.say("a", finish="stop")

    async with serving(FakeEngine(script=script)) as served:
        asked = COMPLETION | {"include_timings": True}
        metrics = (await served.call("POST", "/v1/completions", asked)).json["metrics"]
        assert metrics["generation_time_ms"] == 0.0
        assert metrics["mean_itl_ms"] is metrics["tokens_per_second"] is None
