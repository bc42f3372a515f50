"""The HTTP client of ``trioserve top``, against servers that do not behave."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import memory_stream_pair

from trioserve.top import client
from trioserve.top.client import Address, Unreachable, fetch, get, parse_url, reason

HERE = Address("h", 1)


@pytest.mark.parametrize(
    ("url", "address", "shown"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("localhost:9", Address("localhost", 9), "http://localhost:9"),
        ("http://[::1]:8000/", Address("::1", 8000), "http://[::1]:8000"),
        ("https://x", Address("x", 443, None, True), "https://x"),
        ("http://x/llm/", Address("x", 80, None, False, "/llm"), "http://x/llm"),
    ],
)
def test_urls(url: str, address: Address, shown: str) -> None:
    assert parse_url(url) == address
    assert str(address) == shown


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "http://",
            "ftp://x",
            "http://x:port",
            "http://x:70000",
            "http://x?a=b",
            "http://x#a",
        ),
        *("http://user@x", "http://[::1", "http://a b", "http://x\r\nHost: y", "http://é"),
    ],
)
def test_no_urls(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT") as caught:
        parse_url(url)
    assert "\n" not in str(caught.value)


async def answer(raw: bytes, *, close: bool = True) -> tuple[bytes | str, bytes]:
    """What ``get`` makes of these bytes, and what it had sent."""
    ours, theirs = memory_stream_pair()
    result: bytes | str = ""

    async def ask() -> None:
        nonlocal result
        try:
            result = await get(ours, Address("h", 1, prefix="/p"), "/startup")
        except Unreachable as error:
            result = str(error)
        await ours.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        asked = bytes(await theirs.receive_some())
        await theirs.send_all(raw)
        if close:
            await theirs.aclose()
    return result, asked


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["length", "chunked", "until closed", "informational"],
)
async def test_answers(raw: bytes) -> None:
    body, asked = await answer(raw)
    assert body == b"{}"
    assert asked.startswith(b"GET /p/startup HTTP/1.1\r\n")
    assert b"Host: h:1\r\n" in asked


async def test_another_status_is_no_answer() -> None:
    body, _ = await answer(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    assert body == "/startup answers with 404: is it a trioserve server?"


async def test_a_body_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BODY_BYTES", 100)
    body, _ = await answer(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101)
    assert body == "/startup has more than 100 bytes"


def serve_as(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[Address], Awaitable[trio.abc.Stream]]
) -> None:
    monkeypatch.setattr(client, "connect", connect)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "what answers does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "what answers does not speak HTTP"),
        (b"SSH-2.0-x\x1b[2J\r\n\r\n", "what answers does not speak HTTP"),
    ],
)
async def test_what_breaks_off_or_is_no_http(
    monkeypatch: pytest.MonkeyPatch, raw: bytes, why: str
) -> None:
    ours, theirs = memory_stream_pair()

    async def connect(address: Address) -> trio.abc.Stream:
        return ours

    serve_as(monkeypatch, connect)
    await theirs.send_all(raw)
    await theirs.send_eof()
    with pytest.raises(Unreachable, match=why) as caught:
        await fetch(HERE, "/startup")
    assert str(caught.value).isprintable()
    with pytest.raises(trio.ClosedResourceError):
        await ours.receive_some()


async def test_a_server_that_says_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    ours, _theirs = memory_stream_pair()

    async def connect(address: Address) -> trio.abc.Stream:
        return ours

    serve_as(monkeypatch, connect)
    with pytest.raises(Unreachable, match="no answer within 5 s"):
        await fetch(HERE, "/startup")
    with pytest.raises(trio.ClosedResourceError):
        await ours.receive_some()


async def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match=r"^Connection refused$"):
            await fetch(Address("127.0.0.1", bound.getsockname()[1]), "/")
    with pytest.raises(Unreachable, match=r"^No such file or directory$"):
        await fetch(Address(uds=str(tmp_path / "none")), "/")


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listener = trio.socket.socket(socket.AF_UNIX)
    await listener.bind(path)
    listener.listen()

    async def serve() -> None:
        stream = trio.SocketStream((await listener.accept())[0])
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            assert await fetch(Address(uds=path), "/startup") == b"ok"


async def test_tls_to_a_server_without_it_is_said() -> None:
    async with trio.open_nursery() as nursery:

        async def handle(stream: trio.SocketStream) -> None:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        port = listener.socket.getsockname()[1]
        with pytest.raises(Unreachable) as caught:
            await fetch(Address("127.0.0.1", port, tls=True), "/")
        assert str(caught.value).isprintable()
        nursery.cancel_scope.cancel()


def test_reasons_are_the_systems() -> None:
    inner = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    error = OSError("all attempts to connect failed")
    error.__cause__ = ExceptionGroup("several", [inner, OSError(errno.ECONNREFUSED, "no")])
    assert reason(error) == "No route to host"
    assert reason(socket.gaierror(socket.EAI_NONAME, "Name not known")) == "Name not known"
    assert reason(OSError("odd\x1b")) == "odd\\x1b"
    assert reason(trio.BrokenResourceError()) == "the connection broke"
