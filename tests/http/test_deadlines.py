"""Requests that may not take for ever: time in the queue, and time in all."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from .client import Answer, request_bytes
from .fake_engine import FakeEngine
from .memory import serving_in_memory

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def assert_504(answer: Answer, text: str) -> None:
    assert answer.status == 504
    error = answer.json["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "timeout_error",
        "deadline_exceeded",
        None,
    )
    assert text in error["message"]
    assert answer.headers["x-should-retry"] == "false"  # the official client would ask again


@pytest.mark.parametrize("by", ["server", "field", "both"])
@pytest.mark.parametrize("body", [COMPLETION, STREAM, STREAM | {"n": 3}, COMPLETION | {"n": 2}])
async def test_waiting_too_long_is_a_504_and_ends_the_work(
    autojump_clock: MockClock, body: dict[str, Any], by: str
) -> None:
    engine = FakeEngine(script=None)
    http = {"queue_timeout_s": 60.0 if by == "both" else 5.0} if by != "field" else {}
    async with serving_in_memory(engine, **http) as served:
        client = served.connect()
        before = trio.current_time()
        asked = body if by == "server" else body | {"queue_timeout_s": 5}
        await client.send("POST", "/v1/completions", asked)
        assert_504(await client.answer(), "begun within 5 s")
        assert trio.current_time() - before == pytest.approx(5, abs=0.1)
        assert all(stream.aborted for stream in engine.streams)
        await client.send("GET", "/metrics")  # the connection goes on
        metrics = (await client.answer()).body.decode()
        num_choices = float(body.get("n", 1))
        assert f'choices_finished_total{{reason="timeout"}} {num_choices}' in metrics


async def test_a_request_cannot_lift_the_servers_limit(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, request_timeout_s=5.0, queue_timeout_s=3.0) as served:
        client = served.connect()
        longer = COMPLETION | {"timeout_s": 50, "queue_timeout_s": 50}
        await client.send("POST", "/v1/completions", longer)
        assert_504(await client.answer(), "begun within 3 s")
        await client.send("POST", "/v1/completions", longer)
        (await engine.submitted(2))[1].started = True
        assert_504(await client.answer(), "done within 5 s")


@pytest.mark.parametrize("body", [COMPLETION, STREAM, COMPLETION | {"n": 2}])
async def test_a_request_that_has_begun_waits_no_more(
    autojump_clock: MockClock, body: dict[str, Any]
) -> None:
    """A long prompt's prefill may take longer than the queue's limit."""
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, queue_timeout_s=5.0) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", body)
        streams = await engine.submitted(body.get("n", 1))
        streams[0].started = True  # no token yet
        await trio.sleep(100)
        for stream in streams:
            stream.say("late", finish="stop")
        answer = await client.answer()
        assert answer.status == 200
        assert b"late" in answer.body
        assert not any(stream.aborted for stream in streams)


async def test_time_in_all_counts_from_the_head(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, request_timeout_s=20.0) as served:
        client = served.connect()
        before = trio.current_time()
        raw = request_bytes("POST", "/v1/completions", COMPLETION)
        await client.stream.send_all(raw[:-5])
        await trio.sleep(12)
        await client.stream.send_all(raw[-5:])
        [stream] = await engine.submitted()
        stream.say("a", "b")
        assert_504(await client.answer(), "done within 20 s")
        assert trio.current_time() - before == pytest.approx(20, abs=0.1)
        assert stream.aborted


async def test_a_body_may_not_take_longer_than_the_request(autojump_clock: MockClock) -> None:
    async with serving_in_memory(request_timeout_s=4.0) as served:
        client = served.connect()
        before = trio.current_time()
        await client.stream.send_all(request_bytes("POST", "/v1/completions", COMPLETION)[:-3])
        assert (await client.answer()).status == 408
        assert trio.current_time() - before == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_stream_that_has_begun_gets_an_error_event(
    autojump_clock: MockClock, num_choices: int
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine) as served:
        client = served.connect()
        await client.send(
            "POST",
            "/v1/chat/completions",
            CHAT | {"n": num_choices, "stream": True, "timeout_s": 9},
        )
        streams = await engine.submitted(num_choices)
        streams[-1].say("begun")
        answer = await client.answer()
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
        assert answer.events[-1]["error"]["type"] == "timeout_error"
        assert "[DONE]" not in answer.events
        finishes = [c["finish_reason"] for e in answer.events[:-1] for c in e["choices"]]
        assert set(finishes) == {None}
        assert all(stream.aborted for stream in streams)


async def test_heartbeats_do_not_hide_the_deadline(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, heartbeat_s=2.0, queue_timeout_s=5.0) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        answer = await client.answer()  # begun by a heartbeat, so its status is settled
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "deadline_exceeded"


async def test_the_work_of_a_client_that_does_not_read_ends_on_time(
    autojump_clock: MockClock,
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, send_timeout_s=1000.0, request_timeout_s=10.0) as served:
        client = served.connect(num_sends=1)
        before = trio.current_time()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("a", "b", "c")
        await stream.closed.wait()
        assert trio.current_time() - before == pytest.approx(10, abs=0.1)


async def test_an_answer_in_time_is_whole(autojump_clock: MockClock) -> None:
    async with serving_in_memory(request_timeout_s=10.0, queue_timeout_s=5.0) as served:
        client = served.connect()
        for body in (COMPLETION, STREAM):
            await client.send("POST", "/v1/completions", body)
            answer = await client.answer()
            assert answer.status == 200
            assert b"world" in answer.body
            assert b"error" not in answer.body


@pytest.mark.parametrize("body", [COMPLETION, STREAM])
async def test_the_deadline_while_the_prompt_is_encoded(
    autojump_clock: MockClock, body: dict[str, Any]
) -> None:
    engine = FakeEngine(script=None)
    engine.encoding = trio.Event()
    async with serving_in_memory(engine, queue_timeout_s=5.0) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", body)
        assert_504(await client.answer(), "begun within 5 s")
        assert engine.streams == []


async def test_an_answer_and_the_deadline_in_one_instant_are_one_outcome(
    autojump_clock: MockClock,
) -> None:
    """Whichever is first, what the client gets is a whole answer or an error, never a part."""
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, request_timeout_s=5.0) as served:
        for body in (COMPLETION, STREAM):
            client = served.connect()
            await client.send("POST", "/v1/completions", body)
            stream = (await engine.submitted(len(engine.streams) + 1))[-1]
            await trio.sleep_until(trio.current_time() + 5.0)
            stream.say("part")
            answer = await client.answer()
            assert b"deadline_exceeded" in answer.body
            assert b"[DONE]" not in answer.body
            assert stream.aborted


@pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, "5", True, 1e12, 1e-9])
async def test_limits_that_are_none_are_refused(
    autojump_clock: MockClock, name: str, value: Any
) -> None:
    async with serving_in_memory() as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", COMPLETION | {name: value})
        answer = await client.answer()
        assert answer.status == 400
        assert answer.json["error"]["param"] == name
        await client.send("POST", "/v1/completions", COMPLETION | {name: None})
        assert (await client.answer()).status == 200
