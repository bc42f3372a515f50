"""Shutting down over real sockets and in memory."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from .client import serving
from .fake_engine import FakeEngine
from .memory import serving_in_memory

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}


async def test_sd_05_drain_lets_running_requests_finish() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine) as served:
        kept = await served.connect()
        await kept.send("GET", "/version")
        await kept.answer()
        streamed, plain = await served.connect(), await served.connect()
        await streamed.send("POST", "/v1/completions", STREAM)
        [first] = await engine.submitted()
        first.say("a")
        await streamed.head()
        await streamed.event()
        await plain.send("POST", "/v1/completions", COMPLETION)
        second = (await engine.submitted(2))[1]

        served.stopping.set()
        for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
            answer = await served.call("GET", path)
            assert answer.status == status
            assert answer.headers["connection"] == "close"
        for body in (STREAM, COMPLETION):
            answer = await served.call("POST", "/v1/completions", body)
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
        await kept.send("POST", "/v1/completions", COMPLETION)
        answer = await kept.answer()
        assert answer.status == 503
        assert answer.headers["connection"] == "close"
        assert await kept.rest() == b""
        assert not served.done.is_set()

        first.say("b", finish="stop")
        second.say("c", finish="stop")
        assert (await plain.answer()).json["choices"][0]["text"] == "c"
        assert b"[DONE]" in await streamed.rest()
        with trio.fail_after(1):
            await served.done.wait()
        assert served.reports[0].num_cut == 0
        with pytest.raises(OSError, match=r"."):
            await trio.open_tcp_stream("127.0.0.1", served.port)


async def test_sd_05_past_the_deadline_the_rest_end_with_an_error() -> None:
    engine = FakeEngine(script=None)
    async with serving(engine, drain_s=0.2) as served:
        streamed, several = await served.connect(), await served.connect()
        plain, queued = await served.connect(), await served.connect()
        await streamed.send("POST", "/v1/completions", STREAM)
        [first] = await engine.submitted()
        first.say("a")
        await streamed.head()
        await streamed.event()
        await several.send(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "n": 3, "stream": True},
        )
        (await engine.submitted(4))[1].say("b")
        await several.head()
        await plain.send("POST", "/v1/completions", COMPLETION)
        await engine.submitted(5)
        await queued.send("POST", "/v1/completions", STREAM)
        await engine.submitted(6)

        served.stopping.set()
        error = await streamed.event()
        assert "shutting down" in error["error"]["message"]
        assert error["error"]["type"] == "service_unavailable_error"
        assert b"[DONE]" not in await streamed.rest()
        assert b"shutting down" in (rest := await several.rest())
        assert b"[DONE]" not in rest
        for client in (plain, queued):
            answer = await client.answer()
            assert answer.status == 503
            assert "shutting down" in answer.json["error"]["message"]
        with trio.fail_after(2.5):
            await served.done.wait()
        assert served.reports[0].num_cut == 4
        assert all(stream.aborted for stream in engine.streams)


async def test_sd_05_deadline_is_kept(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, drain_s=30) as served:
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("a")
        before = trio.current_time()
        served.stopping.set()
        await served.done.wait()
        assert 30 <= trio.current_time() - before < 30.5
        assert served.listener.closed


async def test_drain_with_nothing_open_is_quick(autojump_clock: MockClock) -> None:
    async with serving_in_memory() as served:
        never_asked = served.connect()
        half_asked = served.connect()
        await half_asked.stream.send_all(b"POST /v1/comp")
        await trio.sleep(1)
        before = trio.current_time()
        served.stopping.set()
        await served.done.wait()
        assert trio.current_time() - before < 0.1
        assert await never_asked.stream.receive_some() == b""


async def test_upload_under_way_when_the_drain_begins_is_refused() -> None:
    async with serving() as served:
        running = await served.connect()
        engine = served.engine
        engine.script = None
        await running.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        client = await served.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n"
        await client.stream.send_all(head)
        served.stopping.set()
        await client.stream.send_all(b"\r\n" + b'{"prompt": "hi"}')
        assert (await client.answer()).status == 503
        stream.say("x", finish="stop")
        await served.done.wait()


async def test_cancelling_the_server_resets_all_at_once(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    before = 0.0
    async with serving_in_memory(engine, send_timeout_s=1000) as served:
        stuck, idle = served.connect(num_sends=1), served.connect()
        await stuck.send("POST", "/v1/completions", STREAM)
        await idle.send("GET", "/version")
        [stream] = await engine.submitted()
        stream.say("a", "b", "c")
        await trio.sleep(1)
        before = trio.current_time()
    assert trio.current_time() - before < 2
    assert stream.aborted


async def test_out_of_descriptors_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from trioserve.http.listeners import Listener

    accept = Listener.accept
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    async def failing(self: Listener) -> trio.SocketStream:
        if failures:
            await trio.lowlevel.checkpoint()
            raise failures.pop()
        return await accept(self)

    monkeypatch.setattr(Listener, "accept", failing)
    async with serving() as served:
        assert (await served.call("GET", "/version")).status == 200


async def test_out_of_descriptors_the_longest_idle_connection_makes_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of open files may lie far below ``max_connections``."""
    import errno

    from trioserve.http.listeners import Listener

    accept = Listener.accept
    num_open = 0

    async def limited(self: Listener) -> trio.SocketStream:
        nonlocal num_open
        stream = await accept(self)
        if num_open >= 2 and not idle_is_gone.is_set():
            stream.socket.close()
            raise OSError(errno.EMFILE, "Too many open files")
        num_open += 1
        return stream

    idle_is_gone = trio.Event()
    monkeypatch.setattr(Listener, "accept", limited)
    async with serving(keep_alive_timeout_s=1000) as served:
        first = await served.connect()
        await first.send("GET", "/version")
        assert (await first.answer()).status == 200
        second = await served.connect()
        await second.send("GET", "/version")
        assert (await second.answer()).status == 200
        for _ in range(2):
            await served.connect()
        assert await first.rest() == b""  # closed, though its time was not over
        idle_is_gone.set()
        assert (await served.call("GET", "/version")).status == 200
    assert caplog.text.count("cannot accept connections") == 1


async def test_tr_3_no_signal_handlers_are_installed() -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving() as served:
        await served.call("GET", "/version")
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
