"""What holds for /v1/responses and /v1/messages alike: clients that leave, deadlines, drains,
full queues, failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trioserve.engine.api import Phase
from trioserve.errors import QueueFull, RequestFailed

from .client import serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory
from .protocols import BOTH, MESSAGES, RESPONSES, named_events, next_event, told

BEGUN = {
    "/v1/responses": "response.output_text.delta",
    "/v1/messages": "content_block_delta",
}
FAILED = {"/v1/responses": "response.failed", "/v1/messages": "error"}
SUCCESS = {"response.completed", "response.incomplete", "message_stop", "message_delta"}


def failure(event: dict[str, Any]) -> str:
    """The message of the last event of a stream that failed."""
    error = event["response"]["error"] if "response" in event else event["error"]
    assert isinstance(error["message"], str)
    return str(error["message"])


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("num_deltas", [0, 2])
async def test_api_01_client_gone_work_gone(
    path: str,
    body: dict[str, Any],
    stream: bool,
    how: str,
    num_deltas: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", path, body | {"stream": stream})
        [work] = await engine.submitted()
        work.say(*["x"] * num_deltas)
        if num_deltas and stream:
            await client.head()
            await next_event(client, BEGUN[path])
        if how == "close":
            await client.stream.aclose()
        else:
            client.reset()
        with trio.fail_after(1):
            await work.closed.wait()
        assert work.aborted
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_01_half_closed_stream_goes_on(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", path, body | {"stream": True})
        [work] = await engine.submitted()
        await client.stream.send_eof()
        await client.head()
        work.say("a", "b", finish="stop")
        events = named_events(await client.rest_of_chunks())
        assert events[-1]["type"] in SUCCESS


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_before_the_first_token_is_a_504(
    autojump_clock: MockClock, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, queue_timeout_s=5.0) as served:
        client = served.connect()
        await client.send("POST", path, body | {"stream": stream})
        answer = await client.answer()
        assert answer.status == 504
        assert told(answer.json) == (
            "timeout_error",
            "the request was not begun within 5 s; the server is busy",
        )
        assert answer.headers["x-should-retry"] == "false"
        assert engine.streams[0].aborted


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_deadline_in_a_stream_is_a_failure(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine) as served:
        client = served.connect()
        await client.send("POST", path, body | {"stream": True, "timeout_s": 9})
        [work] = await engine.submitted()
        work.say("begun")
        answer = await client.answer()
        events = named_events(answer.body)
        assert answer.status == 200
        assert events[-1]["type"] == FAILED[path]
        assert "within 9 s" in failure(events[-1])
        assert not SUCCESS & {event["type"] for event in events}
        assert work.aborted


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_silent_stream_has_heartbeats(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, heartbeat_s=10) as served:
        client = served.connect()
        await client.send("POST", path, body | {"stream": True})
        assert (await client.head()).status == 200
        begun = await client.chunk()  # the opening, then comments
        assert named_events(begun)[0]["type"] in ("response.created", "message_start")
        assert (await client.chunk()).startswith(b":")
        assert (await client.chunk()).startswith(b":")


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_sd_05_drain_finishes_and_cuts(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, drain_s=0.3) as served:
        finishing, cut, plain = [await served.connect() for _ in range(3)]
        for number, client in enumerate((finishing, cut, plain), start=1):
            await client.send("POST", path, body | {"stream": client is not plain})
            work = (await engine.submitted(number))[-1]
            work.say("a")
        for client in (finishing, cut):
            await client.head()
            await next_event(client, BEGUN[path])
        served.stopping.set()
        refused = await served.call("POST", path, body)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        engine.streams[0].say("b", finish="stop")
        assert named_events(await finishing.rest_of_chunks())[-1]["type"] in SUCCESS
        events = named_events(await cut.rest_of_chunks())
        assert events[-1]["type"] == FAILED[path]
        assert "shutting down" in failure(events[-1])
        answer = await plain.answer()
        assert answer.status == 503
        assert "shutting down" in told(answer.json)[1]
        with trio.fail_after(2.5):
            await served.done.wait()
        assert served.reports[0].num_cut == 2


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [(*RESPONSES, "rate_limit_error"), (*MESSAGES, "rate_limit_error")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_a_429(
    path: str, body: dict[str, Any], kind: str, stream: bool
) -> None:
    engine = FakeEngine()
    engine.refuse = QueueFull("full")
    async with serving(engine) as served:
        answer = await served.call("POST", path, body | {"stream": stream})
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert told(answer.json) == (kind, "full")


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [(*RESPONSES, "service_unavailable_error"), (*MESSAGES, "overloaded_error")],
)
async def test_st_10_not_ready_is_a_503(path: str, body: dict[str, Any], kind: str) -> None:
    async with serving(FakeEngine(phase=Phase.LOADING)) as served:
        answer = await served.call("POST", path, body)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert told(answer.json)[0] == kind


@pytest.mark.parametrize(
    ("path", "body", "kind"), [(*RESPONSES, "server_error"), (*MESSAGES, "api_error")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_api_14_failure_before_the_first_token_has_a_status(
    path: str, body: dict[str, Any], kind: str, stream: bool
) -> None:
    engine = FakeEngine(script=lambda work: work.fail(RequestFailed("the worker died")))
    async with serving(engine) as served:
        answer = await served.call("POST", path, body | {"stream": stream})
        assert answer.status == 500
        assert told(answer.json) == (kind, "the worker died")


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("error", [RequestFailed("the worker died"), ValueError("secret")])
async def test_api_14_failure_in_mid_stream_never_looks_like_success(
    path: str, body: dict[str, Any], error: Exception
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", path, body | {"stream": True})
        [work] = await engine.submitted()
        work.say("a", "b")
        await client.head()
        await next_event(client, BEGUN[path])
        work.fail(error)
        events = named_events(await client.rest_of_chunks())
        assert events[-1]["type"] == FAILED[path]
        assert not SUCCESS & {event["type"] for event in events}
        expected = "the worker died" if isinstance(error, RequestFailed) else "internal error"
        assert failure(events[-1]) == expected


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_08_prompt_that_fills_the_context(path: str, body: dict[str, Any]) -> None:
    async with serving(FakeEngine(max_model_len=64)) as served:
        long = "x" * 64
        given = (
            {"input": long}
            if path == "/v1/responses"
            else {"messages": [{"role": "user", "content": long}]}
        )
        for stream in (False, True):
            answer = await served.call("POST", path, body | given | {"stream": stream})
            assert answer.status == 400
            kind, message = told(answer.json)
            assert kind == "invalid_request_error"
            assert message.count("64") == 2
        assert served.engine.streams == []


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_api_15_unknown_fields_are_reported(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        for stream in (False, True):
            asked = body | {"stream": stream, "sloth": 1}
            answer = await served.call("POST", path, asked)
            assert answer.status == 200
            assert answer.headers["x-trioserve-ignored-fields"] == "sloth"
    async with serving(strict_fields=True) as served:
        answer = await served.call("POST", path, body | {"sloth": 1})
        assert answer.status == 400
        assert "sloth" in told(answer.json)[1]


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_model_must_be_served(path: str, body: dict[str, Any]) -> None:
    async with serving() as served:
        answer = await served.call("POST", path, body | {"model": "gpt-5"})
        assert answer.status == 404
        assert "gpt-5" in told(answer.json)[1]
        assert (await served.call("POST", path, body | {"model": "org/fake"})).status == 200
