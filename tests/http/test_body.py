"""The body of a request as it arrives: in pieces, too long, too late."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio
import trio.testing
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from trioserve.http import asgi
from trioserve.http.body import RequestBody
from trioserve.http.request_state import RequestState, enter_request

from .client import serving


async def test_pieces_come_out_joined_and_a_whole_body_is_not_waited_for() -> None:
    body = RequestBody(10)
    for piece in (b"ab", b"", b"cd"):
        body.append(piece)
        assert not body.is_here
    body.end()
    assert body.is_here
    assert body.num_bytes == 4
    assert await body.read() == b"abcd"


async def test_a_reader_waits_for_the_end() -> None:
    body = RequestBody(10)
    body.append(b"x")
    async with trio.open_nursery() as nursery:

        async def feed() -> None:
            await trio.testing.wait_all_tasks_blocked()
            body.append(b"y")
            await trio.testing.wait_all_tasks_blocked()
            body.end()

        nursery.start_soon(feed)
        assert await body.read() == b"xy"


async def test_what_is_too_long_wakes_its_reader_and_is_not_kept() -> None:
    body = RequestBody(3)
    async with trio.open_nursery() as nursery:

        async def feed() -> None:
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(100):
                body.append(b"12")

        nursery.start_soon(feed)
        with pytest.raises(RequestEntityTooLarge):
            await body.read()
    assert body._data == b""
    with pytest.raises(RequestEntityTooLarge):
        body.take()


@pytest.mark.parametrize(("announced", "refused"), [(3, False), (4, True)])
async def test_the_head_tells_before_a_byte_has_come(announced: int, refused: bool) -> None:
    body = RequestBody(3, announced=announced)
    assert body.is_here == refused
    body.append(b"abc")
    body.end()
    if refused:
        with pytest.raises(RequestEntityTooLarge):
            await body.read()
    else:
        assert await body.read() == b"abc"


async def test_a_body_that_does_not_come_in_time(autojump_clock: trio.testing.MockClock) -> None:
    body = RequestBody(3, timeout_s=7.0)
    body.append(b"a")
    began = trio.current_time()
    with pytest.raises(RequestTimeout):
        await body.read()
    assert trio.current_time() - began == pytest.approx(7.0)


async def test_many_pieces_and_empty_ones_at_the_start() -> None:
    pieces = [b"", b"", *(bytes([n % 251]) * n for n in range(200))]
    body = RequestBody(10**6)
    for piece in pieces:
        body.append(piece)
    body.end()
    assert await body.read() == b"".join(pieces)
    assert body.take() == b"", "given out once"


async def test_a_cancelled_reader_loses_nothing() -> None:
    body = RequestBody(10)
    body.append(b"a")
    with trio.move_on_after(0):
        await body.read()
    body.append(b"b")
    body.end()
    assert await body.read() == b"ab"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": 3}, 400),
        ("/v1/chat/completions", b"[" * 1000, 400),
        ("/v1/messages", {"messages": []}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, 200),
    ],
)
async def test_what_a_request_held_is_let_go_of_without_the_collector(
    path: str, body: object, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of megabytes that a cycle keeps is one of many, until the collector comes by."""
    states: list[weakref.ref[RequestState]] = []

    def noting(state: RequestState) -> None:
        states.append(weakref.ref(state))
        enter_request(state)

    monkeypatch.setattr(asgi, "enter_request", noting)
    async with serving() as served:
        client = await served.connect()
        await client.send("GET", "/health")
        await client.answer()
        gc.collect()
        gc.disable()
        try:
            await client.send("POST", path, body)
            assert (await client.answer()).status == status
            await client.send("GET", "/health")  # the connection is at another request
            await client.answer()
            assert states[1]() is None
        finally:
            gc.enable()
