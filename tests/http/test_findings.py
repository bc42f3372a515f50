"""One regression test or more for each fault found in the HTTP libraries (docs/http.md)."""

from __future__ import annotations

import importlib.metadata
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import trio
from packaging.requirements import Requirement
from trio.testing import MockClock

from trioserve.engine.api import TextDelta
from trioserve.http import connection

from .client import Served, parse_events, request_bytes, serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}


async def still_serves(served: Served) -> None:
    answer = await served.call("POST", "/v1/completions", COMPLETION)
    assert answer.json["choices"][0]["text"] == "Hello world"


# ------------------------------------------------------------- 1: one bad request kills all

UPGRADE = (
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("trailing", [b"", b"x"])
async def test_f01_websocket_upgrade_is_an_ordinary_request(trailing: bytes) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(UPGRADE + trailing)
        answer = await client.answer()
        assert answer.status == 200
        assert answer.json["object"] == "list"
        await still_serves(served)


async def test_f01_h2c_upgrade_is_an_ordinary_request() -> None:
    async with serving() as served:
        answer = await served.call(
            "GET",
            "/v1/models",
            Connection="Upgrade, HTTP2-Settings",
            Upgrade="h2c",
            HTTP2_Settings="AAMAAABkAAQAAP__",
        )
        assert answer.status == 200
        await still_serves(served)


async def test_f01_http2_preface_gets_505() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        answer = await client.answer()
        assert answer.status == 505
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert await client.rest() == b""
        await still_serves(served)


async def test_f01_connection_that_fails_ends_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault in HTTP/2")

    monkeypatch.setattr(connection, "mend", fail)
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True) as served:
        running = await served.connect()
        await running.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        bad = await served.connect()
        await bad.stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        await bad.rest()
        stream.say("fine", finish="stop")
        answer = await running.answer()
        assert answer.events[-1] == "[DONE]"
        assert [r for r in caplog.records if r.getMessage() == "a connection failed"]
        assert "PRI *" not in caplog.text  # nor what follows it, which may hold a key
        metrics = await served.call("GET", "/metrics")
        assert b"trioserve_http_connection_failures_total 1.0" in metrics.body


@pytest.mark.parametrize("draining", [False, True])
async def test_f01_http2_when_switched_on(draining: bool) -> None:
    import h2.connection
    import h2.events

    engine = FakeEngine(script=None)
    async with serving(engine, http2=True) as served:
        client, other = await served.connect(), await served.connect()
        if draining:
            await other.send("POST", "/v1/completions", STREAM)
            await engine.submitted()
            served.stopping.set()
        connection = h2.connection.H2Connection()
        connection.initiate_connection()
        connection.send_headers(
            1,
            [(":method", "GET"), (":path", "/version"), (":scheme", "http"), (":authority", "x")],
            end_stream=True,
        )
        await client.stream.send_all(connection.data_to_send())
        body = b""
        ended = False
        while not ended:
            for event in connection.receive_data(bytes(await client.stream.receive_some())):
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                ended = ended or isinstance(event, h2.events.StreamEnded)
        assert b"version" in body


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[bad/x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%00/%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%F0%9F%98%80%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_f01_malformed_requests_get_4xx(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(raw)
        answer = await client.answer()
        assert 400 <= answer.status < 500 or answer.status == 501
        assert answer.json["error"]["message"]
        await still_serves(served)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_f01_absolute_target() -> None:
    async with serving() as served:
        answer = await served.call("GET", "http://somewhere:80/version?x")
        assert answer.status == 200


# --------------------------------------------------- 2: a client that stops reading


async def test_f02_client_that_takes_nothing_is_cut(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, send_timeout_s=30) as served:
        client = served.connect(num_sends=2)
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        before = trio.current_time()
        stream.say("a", "b", "c", "d")
        await stream.closed.wait()
        assert stream.aborted
        assert 29 < trio.current_time() - before < 32


async def test_f02_stalled_client_does_not_delay_the_end(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, send_timeout_s=1000, drain_s=5) as served:
        client = served.connect(num_sends=1)
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("a", "b", "c", "d")
        await trio.sleep(1)
        before = trio.current_time()
        served.stopping.set()
        await served.done.wait()
        assert trio.current_time() - before < 5 + 2.5
        assert served.reports[0].num_cut == 1
        assert stream.aborted


async def test_f02_real_socket_that_stops_reading() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, send_timeout_s=0.3) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        for _ in range(600):
            stream.say("x" * 65536)
        with trio.fail_after(10):
            await stream.closed.wait()
        assert stream.aborted


async def test_f02_slow_but_steady_reader_is_served(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=lambda stream: stream.say("x" * 300_000, finish="stop"))
    async with serving_in_memory(engine, send_timeout_s=10) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", COMPLETION)
        answer = await client.answer()
        assert len(answer.json["choices"][0]["text"]) == 300_000


# ------------------------------------------------------------- 3: idle connections


async def test_f03_idle_connections_are_closed(autojump_clock: MockClock) -> None:
    async with serving_in_memory(keep_alive_timeout_s=90) as served:
        clients = [served.connect() for _ in range(20)]
        for client in clients:
            await client.send("POST", "/v1/completions", COMPLETION)
            assert (await client.answer()).status == 200
        before = trio.current_time()
        for client in clients:
            assert await client.stream.receive_some() == b""
        assert 89 < trio.current_time() - before < 92


async def test_f03_idle_connections_do_not_delay_a_drain(autojump_clock: MockClock) -> None:
    async with serving_in_memory() as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        assert (await client.answer()).status == 200
        before = trio.current_time()
        served.stopping.set()
        await served.done.wait()
        assert trio.current_time() - before < 0.1


async def test_f03_connection_its_client_closed_goes_at_once(autojump_clock: MockClock) -> None:
    async with serving_in_memory() as served:
        client = served.connect()
        await client.send("GET", "/version")
        await client.answer()
        await client.stream.aclose()
        probe = served.connect()
        await trio.sleep(1)
        await probe.send("GET", "/metrics")
        assert b"trioserve_http_connections 1.0" in (await probe.answer()).body


async def test_f03_slow_headers_are_cut(autojump_clock: MockClock) -> None:
    async with serving_in_memory(keep_alive_timeout_s=90) as served:
        client = served.connect()
        await client.stream.send_all(b"GET / HTTP/1.1\r\nHost")
        before = trio.current_time()
        assert await client.stream.receive_some() == b""
        assert 89 < trio.current_time() - before < 92


# --------------------------------------------- 4, 5: timeouts that cut long streams


async def test_f04_f05_stream_outlasts_every_timeout(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("tick")
        await client.head()
        for _ in range(20):
            assert (await client.event())["choices"][0]["text"] == "tick"
            await trio.sleep(60)
            stream.say("tick")
        stream.say("end", finish="stop")
        events = []
        while chunk := await client.chunk():
            events += parse_events(chunk)
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1] == "[DONE]"


async def test_f04_slow_body_gets_408(autojump_clock: MockClock) -> None:
    async with serving_in_memory(body_timeout_s=30) as served:
        client = served.connect()
        await client.stream.send_all(request_bytes("POST", "/v1/completions", COMPLETION)[:-3])
        answer = await client.answer()
        assert answer.status == 408
        assert answer.json["error"]["message"]


# ------------------------------------- 6: a body that never starts never cleans up


async def test_f06_client_gone_before_the_response_begins() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        for body in (STREAM, COMPLETION):
            client = await served.connect()
            await client.send("POST", "/v1/completions", body)
            stream = (await engine.submitted(len(engine.streams) + 1))[-1]
            # First delta and departure in the same instant.
            stream.say("a")
            client.reset()
            with trio.fail_after(2):
                await stream.closed.wait()
            assert stream.aborted


async def test_f06_every_request_is_closed_at_its_end() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        for body in (STREAM, COMPLETION):
            await served.call("POST", "/v1/completions", body)
            with trio.fail_after(2):
                await engine.streams[-1].closed.wait()


# ---------------------------------------------------- 7: disconnects that are not seen


@pytest.mark.parametrize("body", [STREAM, COMPLETION])
@pytest.mark.parametrize("extra", [b"", b"\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_f07_disconnect_is_seen_whatever_follows_the_request(
    body: dict[str, Any], extra: bytes
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.stream.send_all(request_bytes("POST", "/v1/completions", body) + extra)
        [stream] = await engine.submitted()
        await client.stream.aclose()
        with trio.fail_after(1):
            await stream.closed.wait()
        assert stream.aborted


async def test_f07_half_close_goes_on() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        await client.stream.send_eof()
        [stream] = await engine.submitted()
        head = await client.head()
        assert head.status == 200
        assert (await client.chunk()).startswith(b":")
        stream.say("one")
        assert (await client.event())["choices"][0]["text"] == "one"
        stream.say("two", finish="stop")
        events = parse_events(await client.chunk())
        assert events[-1] == "[DONE]"
        assert await client.chunk() == b""
        assert await client.rest() == b""
        assert not stream.aborted


async def test_f07_half_close_while_the_prompt_is_encoded() -> None:
    engine = FakeEngine(script=None)
    engine.encoding = trio.Event()
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        await engine.encoding.wait()
        await client.stream.send_eof()
        await served.call("GET", "/version")  # by now the end of input has been seen
        engine.may_encode.set()
        assert (await client.head()).status == 200
        assert (await client.chunk()).startswith(b":")
        engine.streams[0].say("x", finish="stop")
        assert b"[DONE]" in await client.rest()


@pytest.mark.parametrize("body", [STREAM, COMPLETION])
async def test_f07_disconnect_while_the_prompt_is_encoded(body: dict[str, Any]) -> None:
    engine = FakeEngine(script=None)
    engine.encoding = trio.Event()
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", body)
        await engine.encoding.wait()
        client.reset()
        await served.call("GET", "/version")
        engine.may_encode.set()
        with trio.fail_after(1):
            while (
                b"trioserve_http_connections 1.0" not in (await served.call("GET", "/metrics")).body
            ):
                pass
        assert all(stream.aborted for stream in engine.streams)


async def test_f07_pipelined_requests_are_answered_in_turn() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        first = request_bytes("POST", "/v1/completions", STREAM)
        second = request_bytes("POST", "/v1/completions", COMPLETION)
        await client.stream.send_all(first + second[:40])
        [stream] = await engine.submitted()
        await client.stream.send_all(second[40:] + request_bytes("GET", "/version"))
        stream.say("x", finish="stop")
        assert (await client.answer()).events[-1] == "[DONE]"
        (await engine.submitted(2))[1].say("y", finish="stop")
        assert (await client.answer()).json["choices"][0]["text"] == "y"
        assert "version" in (await client.answer()).json


async def test_f07_silent_stream_has_heartbeats(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, heartbeat_s=10) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        before = trio.current_time()
        assert (await client.head()).status == 200
        for beat in (1, 2, 3):
            assert (await client.chunk()).startswith(b":")
            assert trio.current_time() - before == pytest.approx(10 * beat, abs=0.5)
        assert not stream.closed.is_set()


async def test_f07_heartbeats_count_from_what_was_last_said(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, heartbeat_s=10) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("first")
        await client.head()
        assert b"first" in await client.chunk()
        before = trio.current_time()
        await trio.sleep(6)
        stream.say("second")
        assert b"second" in await client.chunk()
        assert (await client.chunk()).startswith(b":")
        assert trio.current_time() - before == pytest.approx(16, abs=0.1)


# ---------------------------------------------------------------- 9: cost per chunk


async def test_f09_what_came_meanwhile_is_one_chunk() -> None:
    """One RequestStream item is one event, however many tokens it holds."""
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.push(TextDelta("eight tokens", list(range(8)), finish_reason="length"))
        answer = await client.answer()
        assert [event for event in answer.events if event != "[DONE]"] == [answer.events[0]]
        assert answer.events[0]["choices"][0]["finish_reason"] == "length"


# ------------------------------------------------------------------- 10: pinned internals


@pytest.mark.parametrize("name", ["hypercorn", "quart-trio", "quart", "h11", "trio"])
def test_f10_libraries_whose_internals_are_used_are_bounded(name: str) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    [requirement] = [
        parsed for parsed in map(Requirement, project["dependencies"]) if parsed.name == name
    ]
    assert any(specifier.operator in ("<", "==", "~=") for specifier in requirement.specifier)
    assert requirement.specifier.contains(importlib.metadata.version(name))


def test_f10_the_internals_are_there() -> None:
    import inspect

    import h11
    from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
    from hypercorn.protocol.h11 import H11Protocol
    from hypercorn.trio.tcp_server import TCPServer
    from quart.asgi import ASGIHTTPConnection
    from quart_trio import QuartTrio

    connection = h11.Connection(h11.SERVER)
    assert "_writer" in vars(connection)  # or chunks take the long way
    assert vars(connection)["_receive_buffer_closed"] is False
    connection.receive_data(b"\r")
    assert connection._receive_buffer._data == b"\r"  # line ends before a request
    assert "self.can_read.wait()" in inspect.getsource(H11Protocol._handle_events)
    for owner, name in [
        (h11.Connection, "_extract_next_receive_event"),
        (H2Protocol, "_close_stream"),
        (H2Protocol, "_create_stream"),
        (H2Protocol, "_flush"),
        (StreamBuffer, "drain"),
        (StreamBuffer, "pop"),
        (StreamBuffer, "push"),
        (H11Protocol, "_check_protocol"),
        (H11Protocol, "_create_stream"),
        (H11Protocol, "_close_stream"),
        (H11Protocol, "_maybe_recycle"),
        (H11Protocol, "stream_send"),
        (H11Protocol, "_send_error_response"),
        (TCPServer, "_read_data"),
        (TCPServer, "protocol_send"),
        (ASGIHTTPConnection, "_create_request_from_scope"),
        (QuartTrio, "handle_user_exception"),
        (QuartTrio, "full_dispatch_request"),
    ]:
        assert name in vars(owner), f"{owner.__name__}.{name} is gone; revisit trioserve.http"
