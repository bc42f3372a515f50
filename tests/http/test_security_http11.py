"""Heads and bodies that two servers may read in two ways, and heads without an end."""

from __future__ import annotations

import json

import pytest
import trio

from .client import Client, Served, request_bytes, serving
from .fake_engine import FakeEngine, answer_hello

COMPLETION = {"prompt": "hi"}
BODY = json.dumps(COMPLETION).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"POST /admin/drain HTTP/1.1\r\nHost: x\r\n\r\n"


def head(*lines: bytes, method: bytes = b"POST", version: bytes = b"1.1") -> bytes:
    first = b"%b /v1/completions HTTP/%b" % (method, version)
    return b"\r\n".join([first, *lines, b"", b""])


async def still_serves(served: Served) -> None:
    assert (await served.call("POST", "/v1/completions", COMPLETION)).status == 200


# -------------------------------------------------------------------------- smuggling

LENGTH = b"Content-Length: %d" % len(BODY)
TE = b"Transfer-Encoding: chunked"
REFUSED: dict[str, tuple[bytes, int]] = {
    "both": (head(b"Host: x", TE, LENGTH) + CHUNKED, 400),
    "both, the other way round": (head(b"Host: x", LENGTH, TE) + CHUNKED, 400),
    "both, with small letters": (head(b"Host: x", b"transfer-encoding:CHUNKED", LENGTH), 400),
    "two lengths": (head(b"Host: x", LENGTH, b"Content-Length: 5") + BODY, 400),
    "two lengths in one": (head(b"Host: x", LENGTH + b", 5") + BODY, 400),
    "length with a sign": (head(b"Host: x", b"Content-Length: +16") + BODY, 400),
    "length below zero": (head(b"Host: x", b"Content-Length: -1") + BODY, 400),
    "length in hexadecimal": (head(b"Host: x", b"Content-Length: 0x10") + BODY, 400),
    "length with a space": (head(b"Host: x", b"Content-Length: 1 6") + BODY, 400),
    "length in other digits": (head(b"Host: x", b"Content-Length: \xd9\xa1") + BODY, 400),
    "length without digits": (head(b"Host: x", b"Content-Length:") + BODY, 400),
    "two codings": (head(b"Host: x", TE, TE) + CHUNKED, 501),
    "another coding": (head(b"Host: x", b"Transfer-Encoding: gzip, chunked") + CHUNKED, 501),
    "identity": (head(b"Host: x", b"Transfer-Encoding: identity") + CHUNKED, 501),
    "odd coding": (head(b"Host: x", b"Transfer-Encoding: xchunked") + CHUNKED, 501),
    "coding with a tab": (head(b"Host: x", b"Transfer-Encoding:\x0bchunked") + CHUNKED, 400),
    "coding in HTTP/1.0": (head(b"Host: x", TE, version=b"1.0") + CHUNKED, 400),
    "space before the colon": (head(b"Host: x", b"Transfer-Encoding : chunked") + CHUNKED, 400),
    "space before the name": (head(b" Host: x", LENGTH) + BODY, 400),
    "line without a colon": (head(b"Host: x", b"Content-Length", LENGTH) + BODY, 400),
    "name with a NUL": (head(b"Host: x", b"a\0b: c", LENGTH) + BODY, 400),
    "value with a NUL": (head(b"Host: x", b"a: b\0c", LENGTH) + BODY, 400),
    "value with a bare CR": (head(b"Host: x", b"a: b\rContent-Length: 0", LENGTH) + BODY, 400),
    "value with a bare LF": (head(b"Host: x", b"a: b\nContent-Length: 0", LENGTH) + BODY, 400),
    "bare LF at the end": (head(b"Host: x", LENGTH)[:-4] + b"\n\n" + BODY, 400),
    "bare LF alone": (head(b"Host: x", LENGTH).replace(b"\r", b"") + BODY, 400),
    "no name": (head(b"Host: x", b": c", LENGTH) + BODY, 400),
    "name not ASCII": (head(b"Host: x", b"\xc3\xa9: c", LENGTH) + BODY, 400),
    "bad chunk size": (head(b"Host: x", TE) + b"zz\r\n" + BODY, 400),
    "chunk size with a sign": (head(b"Host: x", TE) + b"-5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size with 0x": (head(b"Host: x", TE) + b"0x5\r\nhello\r\n0\r\n\r\n", 400),
    "chunk size too long": (head(b"Host: x", TE) + b"f" * 30 + b"\r\nhello", 400),
    "chunk longer than its size": (head(b"Host: x", TE) + b"5\r\nhello!!\r\n0\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_two_servers_may_read_in_two_ways_is_refused(name: str) -> None:
    raw, status = REFUSED[name]
    async with serving(admin=True) as served:
        client = await served.connect()
        await client.stream.send_all(raw + SMUGGLED)
        answer = await client.answer()
        assert answer.status == status
        assert answer.json["error"]["code"]
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""  # what follows is no request
        assert not served.stopping.is_set()
        assert served.engine.streams == []
        await still_serves(served)


async def test_folded_line_is_one_line() -> None:
    """As RFC 9112 asks of those who do not refuse it: the coding is seen."""
    async with serving() as served:
        client = await served.connect()
        folded = b"Transfer-Encoding:\r\n chunked"
        await client.stream.send_all(head(b"Host: x", folded) + CHUNKED)
        assert (await client.answer()).status == 200
        client = await served.connect()
        await client.stream.send_all(head(b"Host: x", folded, LENGTH) + CHUNKED + SMUGGLED)
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_chunks_with_extensions_and_trailers_are_read() -> None:
    async with serving() as served:
        client = await served.connect()
        chunks = CHUNKED.replace(b"\r\n", b";name=value\r\n", 1).replace(
            b"0\r\n\r\n", b"0\r\nAuthorization: Bearer x\r\nContent-Length: 3\r\n\r\n"
        )
        await client.stream.send_all(head(b"Host: x", TE) + chunks)
        assert (await client.answer()).status == 200
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200


# ------------------------------------------------------------------- line, method, host


@pytest.mark.parametrize("method", [b"post", b"Post", b"gET"])
async def test_methods_have_capital_letters(method: bytes) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(head(b"Host: x", LENGTH, method=method) + BODY)
        assert (await client.answer()).status == 400
        assert served.engine.streams == []


@pytest.mark.parametrize(
    "host",
    [b"x", b"", b"x:80", b"x:", b"[::1]:8000", b"[::1]", b"127.0.0.1", b"a_b.example", b"x%20y"],
)
async def test_hosts(host: bytes) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(head(b"Host: " + host, LENGTH) + BODY)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"Host: x", b"Host: x"],
        [b"Host: x", b"host: y"],
        [b"Host: a b"],
        [b"Host: a/b"],
        [b"Host: a@b"],
        [b"Host: a?b"],
        [b"Host: a#b"],
        [b"Host: a\\b"],
        [b"Host: <script>"],
        [b"Host: \xff"],
        [b"Host: x:port"],
        [b"Host: x:123456"],
        [b"Host: [::1"],
        [b"Host: http://x"],
    ],
    ids=range(15),
)
async def test_bad_hosts(lines: list[bytes]) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(head(*lines, LENGTH) + BODY + SMUGGLED)
        answer = await client.answer()
        assert answer.status == 400
        assert await client.rest() == b""
        await still_serves(served)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/health", 200),
        ("HTTP://[::1]:80/health", 200),
        ("http://x?/health", 400),
        ("http://x#/health", 400),
        ("http://a@b/health", 400),
        ("http:///health", 400),
        ("http://", 400),
    ],
)
async def test_targets_with_a_host(target: str, status: int) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target.encode())
        assert (await client.answer()).status == status


async def send(client: Client, pieces: list[bytes]) -> None:
    for piece in pieces:
        await client.stream.send_all(piece)
        await trio.testing.wait_all_tasks_blocked(0.01)


REQUEST = request_bytes("POST", "/v1/completions", COMPLETION)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\r\n" + REQUEST],
        [b"\r\n\r\n\r\n" + REQUEST],
        [b"\r\n", REQUEST],
        [b"\r", b"\n" + REQUEST],
        [b"\r", b"\n", b"\r", b"\n", REQUEST],
        [REQUEST + b"\r\n"],
        [REQUEST, b"\r\n"],
        [REQUEST + b"\r", b"\n"],
    ],
)
async def test_line_ends_around_a_request_are_passed_over(pieces: list[bytes]) -> None:
    """Old clients send one after a body; RFC 9112 asks servers to ignore it."""
    async with serving() as served:
        client = await served.connect()
        for _ in range(3):
            await send(client, pieces)
            assert (await client.answer()).status == 200
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200


async def test_line_ends_while_a_request_is_answered() -> None:
    async with serving(FakeEngine(script=None)) as served:
        client = await served.connect()
        await client.stream.send_all(REQUEST)
        [stream] = await served.engine.submitted()
        await send(client, [b"\r\n", b"\r", b"\n", b"\r"])
        answer_hello(stream)
        assert (await client.answer()).status == 200
        await send(client, [b"\n"])
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("raw", [b"\n", b"\r\r\n", b"\r \n", b" ", b"\0", b"\r\nx\r\n\r\n"])
async def test_what_else_comes_before_a_request_is_refused(raw: bytes) -> None:
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(raw + REQUEST)
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_line_ends_alone_keep_no_connection_open() -> None:
    async with serving(keep_alive_timeout_s=0.3) as served:
        client = await served.connect()
        with trio.fail_after(3), pytest.raises(trio.BrokenResourceError):
            while True:
                await client.stream.send_all(b"\r\n")
                await trio.sleep(0.05)


# --------------------------------------------------------------------- limits of heads


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"a: " + b"x" * 900], 200),
        ([b"a: " + b"x" * 2000], 431),
        ([b"a: b"] * 17, 200),
        ([b"a: b"] * 30, 431),
        ([b"a" * 2000 + b": b"], 431),
    ],
)
async def test_large_heads_are_refused_however_they_come(lines: list[bytes], status: int) -> None:
    async with serving(max_header_bytes=1500, max_headers=20) as served:
        raw = head(b"Host: x", LENGTH, *lines) + BODY
        for pieces in ([raw], [raw[:50], raw[50:400], raw[400:]]):
            client = await served.connect()
            await send(client, pieces[:-1])
            await client.stream.send_all(pieces[-1])
            assert (await client.answer()).status == status
        await still_serves(served)


async def test_defaults_let_long_tokens_pass_and_bound_the_rest() -> None:
    async with serving() as served:
        for size, status in [(8_000, 200), (15_000, 200), (17_000, 431), (60_000, 431)]:
            client = await served.connect()
            token = b"Authorization: Bearer " + b"x" * size
            await client.stream.send_all(head(b"Host: x", LENGTH, token) + BODY)
            assert (await client.answer()).status == status, size
        client = await served.connect()
        await client.stream.send_all(head(b"Host: x", LENGTH, *[b"a: b"] * 101) + BODY)
        assert (await client.answer()).status == 431


async def test_long_targets() -> None:
    async with serving() as served:
        for size, status in [(10_000, 404), (20_000, 414), (60_000, 414)]:
            client = await served.connect()
            await client.send("GET", "/" + "x" * size)
            assert (await client.answer()).status == status, size


async def test_trailers_without_an_end_are_cut() -> None:
    async with serving() as served:
        client = await served.connect()
        with trio.fail_after(5):
            await client.stream.send_all(head(b"Host: x", TE) + b"0\r\n")
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await client.stream.send_all(b"a: b\r\n" * 1000)
        await still_serves(served)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"5;" + b"x" * 40_000, 400, "invalid_http"),
        (b"2\r\n{}\r\n5;" + b"x" * 40_000, 400, "invalid_http"),
        (b"0\r\nx: " + b"x" * 40_000, 431, "headers_too_large"),
        (b"2\r\n{}\r\n0\r\nx: " + b"x" * 40_000, 431, "headers_too_large"),
    ],
)
async def test_what_is_too_long_within_a_body(body: bytes, status: int, code: str) -> None:
    """The target has long been read: it is not what is too long."""
    async with serving() as served:
        client = await served.connect()
        await client.stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + body
        )
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert answer.headers["connection"] == "close"
