"""Corners of HTTP/1.1 that clients do use."""

from __future__ import annotations

import json

import pytest
import trio

from .client import parse_events, request_bytes, serving
from .fake_engine import FakeEngine, answer_hello

COMPLETION = {"prompt": "hi"}
STREAM = COMPLETION | {"stream": True}


async def test_expect_100_continue() -> None:
    async with serving() as served:
        client = await served.connect()
        raw = request_bytes("POST", "/v1/completions", COMPLETION, Expect="100-continue")
        head, _, body = raw.partition(b"\r\n\r\n")
        await client.stream.send_all(head + b"\r\n\r\n")
        assert (await client.head()).status == 100
        await client.stream.send_all(body)
        assert (await client.answer()).status == 200


async def test_head_has_no_body() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send("HEAD", "/health")
        head = await client.head()
        assert head.status == 200
        assert int(head.headers["content-length"]) > 0
        await client.send("GET", "/version")
        assert "version" in (await client.answer()).json


@pytest.mark.parametrize("body", [COMPLETION, STREAM])
async def test_http_1_0(body: dict[str, object]) -> None:
    async with serving() as served:
        client = await served.connect()
        raw = request_bytes("POST", "/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0")
        await client.stream.send_all(raw)
        answer = await client.head()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        rest = await client.rest()
        if "stream" in body:
            assert parse_events(rest)[-1] == "[DONE]"
        else:
            assert json.loads(rest)["choices"]


@pytest.mark.parametrize("body", [COMPLETION, STREAM])
async def test_connection_close(body: dict[str, object]) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", body, Connection="close")
        assert (await client.answer()).status == 200
        assert await client.rest() == b""


async def test_chunked_request_body_byte_by_byte() -> None:
    async with serving() as served:
        client = await served.connect()
        body = json.dumps(COMPLETION).encode()
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for byte in body:
            await client.stream.send_all(b"1\r\n%c\r\n" % byte)
        await client.stream.send_all(b"0\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_client_that_ends_inside_its_body_is_gone() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(request_bytes("POST", "/v1/completions", STREAM)[:-3])
        await client.stream.send_eof()
        assert await client.rest() == b""
        assert served.engine.streams == []


async def test_connection_is_kept_after_errors() -> None:
    async with serving() as served:
        client = await served.connect()
        for status, path, body in [
            (400, "/v1/completions", {"prompt": 1}),
            (404, "/nowhere", {"prompt": 1}),
            (404, "/v1/completions", COMPLETION | {"model": "x"}),
            (405, "/health", COMPLETION),
            (200, "/v1/completions", COMPLETION),
            (200, "/v1/completions", STREAM),
        ]:
            await client.send("POST", path, body)
            assert (await client.answer()).status == status


async def test_half_closed_streams_end_their_connections() -> None:
    async with serving(keep_alive_timeout_s=1000) as served:
        for _ in range(12):
            client = await served.connect()
            await client.send("POST", "/v1/completions", STREAM)
            await client.stream.send_eof()
            assert b"[DONE]" in await client.rest()
        metrics = await served.call("GET", "/metrics")
        assert b"trioserve_http_connections 1.0" in metrics.body


async def test_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("uds") / "s"
    engine = FakeEngine(script=None)
    async with serving(engine, uds=str(path)):
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            await stream.send_all(request_bytes("POST", "/v1/completions", STREAM))
            [request] = await engine.submitted()
        with trio.fail_after(1):
            await request.closed.wait()
        assert request.aborted


@pytest.mark.parametrize(
    ("version", "close"), [(b"HTTP/1.1", b"Connection: close\r\n"), (b"HTTP/1.0", b"")]
)
async def test_what_follows_the_last_request_is_passed_over(version: bytes, close: bytes) -> None:
    """Old clients send a line end after a body; whatever it is, the answer is not lost to it."""
    async with serving() as served:
        raw = request_bytes("POST", "/v1/completions", COMPLETION)
        raw = raw.replace(b"HTTP/1.1", version).replace(b"\r\n", b"\r\n" + close, 1)
        for trailing in (b"\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"):
            client = await served.connect()
            await client.stream.send_all(raw + trailing)
            assert (await client.answer()).status == 200
            assert await client.rest() == b""


async def test_what_follows_the_last_request_is_not_kept() -> None:
    async with serving(FakeEngine(script=None)) as served:
        client = await served.connect()
        await client.send("POST", "/v1/completions", COMPLETION, Connection="close")
        [stream] = await served.engine.submitted()
        for _ in range(32):
            await client.stream.send_all(b"x" * 65536)
        answer_hello(stream)
        assert (await client.answer()).status == 200


async def test_two_ways_to_tell_the_length_of_a_body_are_refused() -> None:
    """One of them may be what a proxy went by: the rest would be a request of its own."""
    async with serving() as served:
        client = await served.connect()
        body = b"5\r\nhello\r\n0\r\n\r\n"
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /version HTTP/1.1\r\n\r\n"
        )
        answer = await client.answer()
        assert answer.status == 400
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""


async def test_an_answer_before_the_bodys_end_says_that_it_closes() -> None:
    """Or a client that keeps connections sends its next request into one that is closing."""
    async with serving() as served:
        raw = request_bytes("POST", "/v1/nothing", COMPLETION)
        head, _, body = raw.partition(b"\r\n\r\n")
        client = await served.connect()
        await client.stream.send_all(head + b"\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        await client.stream.send_all(body)
        assert await client.rest() == b""


async def test_refused_requests_in_a_row_lose_no_connection_unannounced() -> None:
    async with serving() as served:
        client = await served.connect()
        for _ in range(200):
            await client.send("POST", "/v1/nothing", COMPLETION)
            answer = await client.answer()
            assert answer.status == 404
            if answer.headers.get("connection") == "close":
                assert await client.rest() == b""
                client = await served.connect()
