"""Refusals over HTTP/2, by a client that does what it likes."""

from __future__ import annotations

from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio
import trio.testing

from .client import Client, Served, serving
from .fake_engine import FakeEngine, answer_hello

KEY = "sk-0123456789"


class H2Client:
    """One connection; answers by the number of their stream."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.connection = h2.connection.H2Connection(
            h2.config.H2Configuration(
                validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.connection.initiate_connection()
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: set[int] = set()

    async def send(
        self, stream: int, path: str, body: bytes | None = None, method: str = "", **headers: str
    ) -> None:
        """A request; with a body it is not ended yet."""
        head = [
            (":method", method or ("GET" if body is None else "POST")),
            *((":path", path), (":scheme", "http"), (":authority", "x")),
            *((name.replace("_", "-"), value) for name, value in headers.items()),
        ]
        self.connection.send_headers(stream, head, end_stream=body is None)
        if body is not None:
            self.connection.send_data(stream, body)
        await self.flush()

    async def flush(self) -> None:
        await self._client.stream.send_all(self.connection.data_to_send())

    async def answer(self, stream: int) -> int:
        while stream not in self.ended:
            await self.receive()
        return self.statuses[stream]

    async def receive(self) -> None:
        data = await self._client.stream.receive_some()
        assert data, "the connection has ended"
        for event in self.connection.receive_data(bytes(data)):
            self._note(event)

    async def close(self) -> None:
        await self._client.stream.aclose()

    def _note(self, event: Any) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.statuses[event.stream_id] = int(dict(event.headers)[b":status"])
        elif isinstance(event, h2.events.DataReceived):
            self.bodies.setdefault(event.stream_id, b"")
            self.bodies[event.stream_id] += event.data
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.resets.add(event.stream_id)


async def test_op_02_a_body_after_its_refusal_ends_no_other_stream() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True, api_keys=(KEY,)) as served:
        client = H2Client(await served.connect())
        await client.send(1, "/v1/completions", b'{"prompt": "hi"}', x_api_key=KEY)
        client.connection.end_stream(1)
        await client.flush()
        [stream] = await engine.submitted()
        await client.send(3, "/v1/completions", b"{")
        assert await client.answer(3) == 401
        assert b"missing_api_key" in client.bodies[3]
        for _ in range(20):
            client.connection.send_data(3, b"x" * 16_000)
            await client.flush()
            await client.send(5 + 2 * _, "/health")
            assert await client.answer(5 + 2 * _) == 200
        answer_hello(stream)
        assert await client.answer(1) == 200


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/models", "GET"),
        ("x:/health", "GET"),
        ("http://x/health", "GET"),
        ("//health", "GET"),
        ("/health/", "GET"),
        ("/HEALTH", "GET"),
        ("/health%00", "GET"),
        ("/v1/completions", "get"),
        ("*", "OPTIONS"),
    ],
)
async def test_op_02_paths_over_http2(path: str, method: str) -> None:
    async with serving(http2=True, api_keys=(KEY,)) as served:
        client = H2Client(await served.connect())
        await client.send(1, path, method=method)
        assert await client.answer(1) == 401
        await client.send(3, "/v1/models", authorization=f"Bearer {KEY}")
        assert await client.answer(3) == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("?x", "GET", 200),
        ("*", "GET", 404),
        ("health", "GET", 200),
        ("/\xe9", "GET", 404),
        ("/health?\xe9", "GET", 200),
        ("/health", "\xe9", 405),
        ("", "CONNECT", 400),
    ],
)
async def test_strange_heads_over_http2_end_no_other_stream(
    path: str, method: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True) as served:
        client = H2Client(await served.connect())
        await client.send(1, "/v1/completions", b'{"prompt": "hi"}')
        client.connection.end_stream(1)
        await client.flush()
        [stream] = await engine.submitted()
        head = [(":method", method), *((":path", path),) * bool(path), (":authority", "x")]
        if method != "CONNECT":
            head.append((":scheme", "http"))
        client.connection.send_headers(3, head, end_stream=True)
        await client.flush()
        assert await client.answer(3) == status
        answer_hello(stream)
        assert await client.answer(1) == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_large_heads_over_http2() -> None:
    async with serving(http2=True) as served:
        client = H2Client(await served.connect())
        await client.send(1, "/health", x="y" * 10_000)
        assert await client.answer(1) == 200
        await client.send(3, "/health", x="y" * 40_000)
        with pytest.raises(AssertionError, match="the connection has ended"):
            await client.answer(3)
        answer = await served.call("GET", "/health")
        assert answer.status == 200


# ------------------------------------------------------------------------------- floods


@pytest.mark.parametrize("depends_on", [0, 1, 7])
async def test_a_flood_of_priorities_is_passed_over(
    depends_on: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True) as served:
        client = H2Client(await served.connect())
        await client.send(1, "/v1/completions", b'{"prompt": "hi"}')
        client.connection.end_stream(1)
        await client.flush()
        [stream] = await engine.submitted()
        for number in range(3, 6003, 2):
            if number != depends_on:
                client.connection.prioritize(number, depends_on=depends_on)
        client.connection.prioritize(7, depends_on=1)
        client.connection.prioritize(1, depends_on=7)
        await client.flush()
        answer_hello(stream)
        assert await client.answer(1) == 200
        await client.send(6003, "/health")
        assert await client.answer(6003) == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# ------------------------------------------------------------- clients that take nothing


async def stalled(served: Served) -> H2Client:
    """A client whose request is answered, and who lets nothing of the answer through."""
    client = H2Client(await served.connect())
    client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    await client.send(1, "/v1/completions", b'{"prompt": "hi"}')
    client.connection.end_stream(1)
    await client.flush()
    while 1 not in client.statuses:
        await client.receive()
    return client


async def wait_unloaded(served: Served) -> None:
    while (await served.call("GET", "/load")).json != {"server_load": 0}:
        await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_stream_whose_client_takes_nothing_is_reset() -> None:
    async with serving(http2=True, send_timeout_s=0.2) as served:
        client = await stalled(served)
        while 1 not in client.resets:
            await client.receive()
        assert client.bodies == {}
        await wait_unloaded(served)
        await client.send(3, "/health")
        await client.receive()


async def test_a_stream_whose_client_takes_nothing_is_cancelled() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True, send_timeout_s=0.2) as served:
        client = H2Client(await served.connect())
        client.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.send(1, "/v1/completions", b'{"prompt": "hi", "stream": true}')
        client.connection.end_stream(1)
        await client.flush()
        [stream] = await engine.submitted()
        stream.say("x" * 100_000)
        while 1 not in client.resets:
            await client.receive()
        await wait_unloaded(served)
        assert stream.closed.is_set()


@pytest.mark.parametrize("how", ["close", "drain"])
async def test_a_client_that_takes_nothing_holds_up_no_end(how: str) -> None:
    async with serving(http2=True, send_timeout_s=1000, drain_s=0.1) as served:
        client = await stalled(served)
        if how == "close":
            await client.close()
            await wait_unloaded(served)
        served.stopping.set()
        with trio.fail_after(5):
            await served.done.wait()


async def test_a_connection_is_idle_after_a_reset() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, http2=True, keep_alive_timeout_s=0.2) as served:
        client = H2Client(await served.connect())
        await client.send(1, "/v1/completions", b'{"prompt": "hi"}')
        client.connection.end_stream(1)
        await client.flush()
        await engine.submitted()
        client.connection.reset_stream(1)
        await client.flush()
        with trio.fail_after(5), pytest.raises(AssertionError, match="the connection has ended"):
            while True:
                await client.receive()


# ----------------------------------------------------------------------------- upgrades


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("GET /health HTTP/1.1", ["HTTP2-Settings: AAMAAABkAAQAAP__"], 101),
        ("GET /health HTTP/1.1", ["HTTP2-Settings: AAM"], 200),
        ("GET /health HTTP/1.1", ["HTTP2-Settings: AAIAAAAF"], 200),
        ("GET /health HTTP/1.1", ["HTTP2-Settings: AAT_____"], 200),
        ("GET /health HTTP/1.1", [], 200),
        ("GET http://x/health HTTP/1.1", ["HTTP2-Settings: AAMAAABkAAQAAP__"], 200),
        ("get /health HTTP/1.1", ["HTTP2-Settings: AAMAAABkAAQAAP__"], 400),
        ("GET /health HTTP/2.0", ["HTTP2-Settings: AAMAAABkAAQAAP__"], 505),
        ("GET /health HTTP/1.1", ["HTTP2-Settings: AAMAAABkAAQAAP__", *["a: b"] * 100], 431),
    ],
)
async def test_only_a_sound_request_is_upgraded(
    line: str, headers: list[str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(http2=True) as served:
        client = await served.connect()
        head = [line, "Host: x", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", *headers]
        await client.stream.send_all("\r\n".join([*head, "", ""]).encode())
        answer = bytes(await client.stream.receive_some())
        assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
