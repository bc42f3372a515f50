"""Readiness, dead workers, clients that leave; names carry ids of field failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from trioserve.engine.api import Phase, StageStatus
from trioserve.errors import RequestFailed

from .bodies import BOTH, COMPLETION, is_error
from .client import serving
from .fake_engine import FakeEngine

# -------------------------------------------------------------------------------- ST-10


async def test_st_10_nothing_is_ready_before_the_model_is() -> None:
    engine = FakeEngine(phase=Phase.LOADING)
    async with serving(engine) as served:
        for path in ("/health", "/health/ready"):
            answer = await served.call("GET", path)
            assert answer.status == 503
            assert answer.json["stage"] == "weights"
            assert answer.json["fraction"] == 0.25
            assert "retry-after" in answer.headers
        assert (await served.call("GET", "/health/live")).status == 200
        assert (await served.call("GET", "/metrics")).status == 200
        models = await served.call("GET", "/v1/models")
        assert [card["max_model_len"] for card in models.json["data"]] == [None, None]
        startup = await served.call("GET", "/startup")
        assert startup.json["stages"][0]["detail"] == "7 of 28 MB"
        for path, body in BOTH:
            answer = await served.call("POST", path, body)
            assert answer.status == 503
            assert is_error(answer.json)
            assert answer.headers["retry-after"] == "1"
        engine.phase = Phase.READY
        assert (await served.call("GET", "/health")).status == 200
        assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 200


async def test_startup_tells_the_cause_of_a_failure() -> None:
    engine = FakeEngine(phase=Phase.FAILED)
    engine.cause = "weights: file is cut short"
    engine.stages = [StageStatus("inspect", "done", 1.0), StageStatus("weights", "failed")]
    async with serving(engine) as served:
        assert (await served.call("GET", "/startup")).json["cause"] == engine.cause
        ready = await served.call("GET", "/health/ready")
        assert ready.status == 503
        assert ready.json["stage"] == "weights"
        assert ready.json["cause"] == engine.cause


async def test_op_02_probes_tell_nobody_without_a_key_the_cause_of_a_failure() -> None:
    """It may name paths of files and the machine's memory."""
    engine = FakeEngine(phase=Phase.FAILED)
    async with serving(engine, api_keys=("sk-0123456789",)) as served:
        assert (await served.call("GET", "/health")).json["cause"] is None
        engine.cause = "needed 92 MiB, available 22.4 GiB"
        for path in ("/health", "/health/ready", "/ping"):
            answer = await served.call("GET", path)
            assert answer.json["cause"] == "told by /startup, with a key"
        startup = await served.call("GET", "/startup", Authorization="Bearer sk-0123456789")
        assert startup.json["cause"] == engine.cause


# -------------------------------------------------------------------------------- SD-02


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_sd_02_dead_worker_ends_every_request(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        streamed, plain = await served.connect(), await served.connect()
        await streamed.send("POST", path, body | {"stream": True})
        [first] = await engine.submitted()
        first.say("x")
        await streamed.head()
        await streamed.event()
        await plain.send("POST", path, body)
        await engine.submitted(2)
        engine.phase = Phase.FAILED
        for stream in engine.streams:
            stream.fail(RequestFailed("the worker died", code="worker_died"))
        answer = await plain.answer()
        assert answer.status == 500
        assert answer.json["error"]["code"] == "worker_died"
        with pytest.raises(EOFError):
            while "error" not in (event := await streamed.event()):
                pass
            await streamed.event()
        assert event["error"]["type"] == "server_error"
        assert (await served.call("GET", "/health")).status == 503
        assert (await served.call("POST", path, body)).status == 503


# -------------------------------------------------------------------------------- API-01


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"n": 4}, {"n": 4, "stream": True}])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("num_deltas", [0, 3])
async def test_api_01_client_gone_work_gone(
    path: str,
    body: dict[str, Any],
    extra: dict[str, Any],
    how: str,
    num_deltas: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", path, body | extra)
        num = extra.get("n", 1)
        streams = await engine.submitted(num)
        for _ in range(num_deltas):
            for stream in streams:
                stream.say("x")
        if num_deltas and extra.get("stream"):
            await client.head()
            await client.event()
        if how == "close":
            await client.stream.aclose()
        else:
            client.reset()
        with trio.fail_after(1):
            for stream in streams:
                await stream.closed.wait()
        assert all(stream.aborted for stream in streams)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_api_01_gone_is_counted_and_normal_ends_are_not() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        [stream] = await engine.submitted()
        client.reset()
        await stream.closed.wait()
        engine.script = lambda stream: stream.say("x", finish="length")
        await served.call("POST", "/v1/completions", COMPLETION)
        text = (await served.call("GET", "/metrics")).body.decode()
        assert 'choices_finished_total{reason="gone"} 1.0' in text
        assert 'choices_finished_total{reason="length"} 1.0' in text


@pytest.mark.parametrize("when", ["with the request", "once it runs"])
async def test_api_01_half_closed_plain_request_counts_as_gone(when: str) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        if when == "once it runs":
            await engine.submitted()
        await client.stream.send_eof()
        assert await client.rest() == b""
        for stream in engine.streams:  # none, if it was gone before it got that far
            with trio.fail_after(1):
                await stream.closed.wait()


async def test_half_closed_probe_is_answered() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send("GET", "/health")
        await client.stream.send_eof()
        assert (await client.answer()).status == 200
