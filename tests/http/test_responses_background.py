"""Background responses: they outlive their client, and end with the server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import trio
from openai.types.responses import Response
from trio.testing import MockClock

from trioserve.config.schema import LogConfig
from trioserve.errors import QueueFull, RequestFailed
from trioserve.http.responses.store import ResponseStore

from .client import serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory
from .protocols import MESSAGES, named_events, next_event
from .test_openai import with_client

PATH = "/v1/responses"
ASKED = {"input": "hi", "background": True}


async def ended(served: Any, id: str) -> dict[str, Any]:
    """Poll until a response has ended."""
    with trio.fail_after(2):
        while True:
            response: dict[str, Any] = (await served.call("GET", f"{PATH}/{id}")).json
            Response.model_validate(response, strict=True)
            if response["status"] not in ("queued", "in_progress"):
                return response


async def test_it_is_queued_then_made_then_kept() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        queued = (await served.call("POST", PATH, ASKED)).json
        assert queued["status"] == "queued"
        assert queued["background"] is True
        [work] = engine.streams
        work.say("a")
        path = f"{PATH}/{queued['id']}"
        assert (await served.call("GET", path)).json["status"] == "in_progress"
        assert not work.aborted
        work.say("b", finish="stop")
        response = await ended(served, queued["id"])
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"] == "ab"
        assert response["usage"]["output_tokens"] == 2
        engine.script = lambda work: work.say("x", finish="stop")
        asked = {"input": "go on", "previous_response_id": queued["id"]}
        assert (await served.call("POST", PATH, asked)).status == 200
        assert [message["content"] for message in engine.rendered[-1]] == ["hi", "ab", "go on"]


async def test_nothing_goes_on_from_one_that_has_not_ended() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        id = (await served.call("POST", PATH, ASKED)).json["id"]
        answer = await served.call("POST", PATH, {"input": "x", "previous_response_id": id})
        assert answer.status == 400
        assert "not ended" in answer.json["error"]["message"]
        items = (await served.call("GET", f"{PATH}/{id}/input_items")).json["data"]
        assert [item["content"][0]["text"] for item in items] == ["hi"]


async def test_what_is_wrong_is_told_before_it_is_queued() -> None:
    engine = FakeEngine(max_model_len=16)
    async with serving(engine) as served:
        too_long = await served.call("POST", PATH, ASKED | {"input": "x" * 16})
        assert too_long.json["error"]["code"] == "context_length_exceeded"
        unstored = await served.call("POST", PATH, ASKED | {"store": False})
        assert unstored.json["error"]["param"] == "background"
        engine.refuse = QueueFull("full")
        full = await served.call("POST", PATH, ASKED)
        assert full.status == 429
        assert full.headers["retry-after"] == "1"
        engine.refuse = None
        engine.script = lambda work: work.say("x", finish="stop")
        assert (await served.call("POST", PATH, ASKED)).status == 200


async def test_failure_becomes_its_status() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        for error in (RequestFailed("the worker died"), ValueError("secret")):
            id = (await served.call("POST", PATH, ASKED)).json["id"]
            engine.streams[-1].say("part")
            engine.streams[-1].fail(error)
            response = await ended(served, id)
            assert response["status"] == "failed"
            assert response["error"]["code"] == "server_error"
            assert "secret" not in str(response)
        assert (await served.call("GET", "/health")).status == 200


async def test_cancelling_ends_the_work() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        id = (await served.call("POST", PATH, ASKED)).json["id"]
        for _ in range(2):
            answer = await served.call("POST", f"{PATH}/{id}/cancel")
            assert answer.status == 200
            assert answer.json["status"] == "cancelled"
            assert engine.streams[0].aborted
        assert (await ended(served, id))["status"] == "cancelled"
        plain = await served.connect()
        await plain.send("POST", PATH, {"input": "hi"})
        (await engine.submitted(2))[-1].say("x", finish="stop")
        refused = await served.call("POST", f"{PATH}/{(await plain.answer()).json['id']}/cancel")
        assert refused.status == 400


async def test_deleting_ends_the_work_too() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        id = (await served.call("POST", PATH, ASKED)).json["id"]
        answer = await served.call("DELETE", f"{PATH}/{id}")
        assert answer.json == {"id": id, "object": "response", "deleted": True}
        assert engine.streams[0].aborted
        assert (await served.call("GET", f"{PATH}/{id}")).status == 404


async def test_its_stream_outlives_its_client_and_can_be_followed_again() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", PATH, ASKED | {"stream": True, "sloth": 1})
        [work] = await engine.submitted()
        assert (await client.head()).headers["x-trioserve-ignored-fields"] == "sloth"
        created = await next_event(client, "response.created")
        assert created["response"]["status"] == "queued"
        work.say("a")
        await next_event(client, "response.output_text.delta")
        client.reset()
        follower = await served.connect()
        path = f"{PATH}/{created['response']['id']}?stream=true"
        await follower.send("GET", path + "&starting_after=2")
        await follower.head()
        first = named_events(await follower.chunk())[0]
        assert first["sequence_number"] == 3
        assert not work.aborted
        work.say("b", finish="stop")
        rest = [first, *named_events(await follower.rest_of_chunks())]
        everything = named_events((await served.call("GET", path)).body)
        assert everything[-1]["type"] == "response.completed"
        assert rest[-1] == everything[-1]
        assert [event["sequence_number"] for event in everything] == list(range(len(everything)))
        assert [event["type"].removeprefix("response.") for event in everything][:4] == [
            *("created", "queued", "in_progress", "output_item.added")
        ]
        deltas = [e["delta"] for e in everything if e["type"] == "response.output_text.delta"]
        assert deltas == ["a", "b"]
        beyond = await served.call("GET", path + "&starting_after=1000")
        assert (beyond.status, beyond.body) == (200, b"")


async def test_api_01_a_half_closed_follower_goes_on() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", PATH, ASKED | {"stream": True})
        await client.head()
        id = (await next_event(client, "response.created"))["response"]["id"]
        follower = await served.connect()
        await follower.send("GET", f"{PATH}/{id}?stream=true")
        await follower.stream.send_eof()
        await follower.head()
        await next_event(follower, "response.queued")
        engine.streams[0].say("a", finish="stop")
        assert named_events(await follower.rest_of_chunks())[-1]["type"] == "response.completed"


async def test_events_that_were_not_asked_for_are_not_kept() -> None:
    async with serving() as served:
        for fields in ({}, {"stream": True}, {"background": True}):
            answer = await served.call("POST", PATH, {"input": "hi"} | fields)
            if "stream" in fields:
                id = named_events(answer.body)[0]["response"]["id"]
            else:
                id = answer.json["id"]
            await ended(served, id)
            refused = await served.call("GET", f"{PATH}/{id}?stream=true")
            assert refused.status == 400
            assert refused.json["error"]["param"] == "stream"
            assert (await served.call("GET", f"{PATH}/{id}?stream=perhaps")).status == 400
            assert (await served.call("GET", f"{PATH}/{id}?stream=false")).status == 200


async def test_cancelled_in_mid_stream_is_no_success() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", PATH, ASKED | {"stream": True})
        await client.head()
        id = (await next_event(client, "response.created"))["response"]["id"]
        engine.streams[0].say("a")
        await next_event(client, "response.output_text.delta")
        await served.call("POST", f"{PATH}/{id}/cancel")
        last = named_events(await client.rest_of_chunks())[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
        assert last["response"]["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
async def test_its_deadline_ends_it(autojump_clock: MockClock, stream: bool) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine) as served:
        client = served.connect()
        await client.send("POST", PATH, ASKED | {"timeout_s": 5, "stream": stream})
        [work] = await engine.submitted()
        await trio.sleep(4)
        assert not work.aborted
        await trio.sleep(2)
        assert work.aborted


@pytest.mark.parametrize("stream", [False, True])
async def test_sd_05_a_drain_waits_for_it_and_cuts_it(stream: bool) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, drain_s=0.3) as served:
        client = await served.connect()
        await client.send("POST", PATH, ASKED | {"stream": stream})
        if stream:
            await client.head()
            await next_event(client, "response.created")
        else:
            await client.answer()
            await client.stream.aclose()
        served.stopping.set()
        with trio.fail_after(2.5):
            await served.done.wait()
        assert engine.streams[0].aborted
        assert served.reports[0].num_cut >= 1
        if stream:
            last = named_events(await client.rest_of_chunks())[-1]
            assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
            assert "shutting down" in last["response"]["error"]["message"]


async def test_sd_05_a_drain_ends_when_it_has_ended() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, drain_s=60) as served:
        id = (await served.call("POST", PATH, ASKED)).json["id"]
        served.stopping.set()
        assert (await served.call("GET", f"{PATH}/{id}")).json["status"] == "queued"
        engine.streams[0].say("a", finish="stop")
        with trio.fail_after(2.5):
            await served.done.wait()
        assert served.reports[0].num_cut == 0


async def test_its_silent_follower_has_heartbeats(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, heartbeat_s=7) as served:
        client = served.connect()
        await client.send("POST", PATH, ASKED | {"stream": True})
        await client.head()
        chunks = [await client.chunk() for _ in range(4)]
        assert chunks[0].startswith(b"event: response.created")
        assert any(chunk.startswith(b": ") for chunk in chunks[1:])
        # Comments are the reader's own: they are not among the events that are kept.
        engine.streams[0].say("a", finish="stop")
        rest = await client.rest_of_chunks()
        assert [event["sequence_number"] for event in named_events(b"".join(chunks) + rest)] == [
            *range(10)
        ]
        id = named_events(chunks[0])[0]["response"]["id"]
        await client.send("GET", f"{PATH}/{id}?stream=true&starting_after=8")
        [last] = named_events((await client.answer()).body)
        assert last["sequence_number"] == 9


async def test_it_is_no_rejected_request_for_the_metrics() -> None:
    async with serving() as served:
        await served.call("POST", PATH, ASKED)
        await served.call("POST", f"{MESSAGES[0]}/count_tokens", MESSAGES[1])
        text = (await served.call("GET", "/metrics")).body.decode()
        lines = [line for line in text.splitlines() if line.startswith("trioserve_requests_rej")]
        assert lines
        assert all(line.endswith(" 0.0") for line in lines)


async def test_official_client_polls_and_cancels() -> None:
    engine = FakeEngine(script=None)

    def use(client: openai.OpenAI) -> Any:
        first = client.responses.create(model="fake", input="hi", background=True)
        assert client.responses.retrieve(first.id).status == "queued"
        return client.responses.cancel(first.id)

    def stream(client: openai.OpenAI) -> list[Any]:
        engine.script = lambda work: work.say("a", "b", finish="stop")
        events = list(
            client.responses.create(model="fake", input="hi", background=True, stream=True)
        )
        again = client.responses.retrieve(
            events[0].response.id, stream=True, starting_after=events[3].sequence_number
        )
        assert list(again) == events[4:]
        return events

    async with serving(engine) as served:
        assert (await with_client(served, use)).status == "cancelled"
        events = await with_client(served, stream)
        assert events[-1].response.output_text == "ab"


async def test_its_answer_is_in_the_log_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(log=LogConfig(requests=True, outputs=True)) as served:
        id = (await served.call("POST", PATH, ASKED, X_Request_Id="r1")).json["id"]
        await ended(served, id)
        lines = [record.message for record in caplog.records if "r1" in record.message]
        assert len(lines) == 2  # the call, and the work
        [line] = [line for line in lines if "background" in line]
        assert "Hello world" in line
        assert "2 in, 2 out, stop" in line


async def test_what_cannot_be_kept_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        id = (await served.call("POST", PATH, ASKED)).json["id"]
        monkeypatch.setattr(ResponseStore, "put", lambda self, kept: 1 / 0)
        engine.streams[0].say("a", finish="stop")
        with trio.fail_after(2):
            while (await served.call("GET", f"{PATH}/{id}")).status != 404:
                pass
        assert "is not kept" in caplog.text
        assert (await served.call("GET", "/health")).status == 200
