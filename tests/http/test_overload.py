"""Clients that are too many or too slow: who is closed, who waits, and who goes on undisturbed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair

from .client import Client, request_bytes, serving
from .fake_engine import FakeEngine
from .memory import MemoryStream, ServedInMemory, serving_in_memory

COMPLETION = {"prompt": "hi", "max_tokens": 100}
STREAM = COMPLETION | {"stream": True}


# ------------------------------------------------------------------ too many connections


async def ask(client: Client, path: str = "/version") -> int:
    await client.send("GET", path)
    return (await client.answer()).status


async def test_one_more_connection_closes_the_longest_idle(autojump_clock: MockClock) -> None:
    async with serving_in_memory(max_connections=3) as served:
        first, second, third = (served.connect() for _ in range(3))
        for client in (first, second, third, first):  # the second is now the longest idle
            assert await ask(client) == 200
        fourth = served.connect()
        assert await ask(fourth) == 200
        assert await second.stream.receive_some() == b""
        fifth = served.connect()
        assert await ask(fifth) == 200
        assert await third.stream.receive_some() == b""
        for client in (first, fourth, fifth):
            assert await ask(client) == 200


async def test_connections_that_never_ask_or_never_finish_asking_are_idle(
    autojump_clock: MockClock,
) -> None:
    async with serving_in_memory(max_connections=2) as served:
        silent, half = served.connect(), served.connect()
        await half.stream.send_all(b"GET /version HTTP/1.1\r\nHo")
        await trio.sleep(1)
        probes = [served.connect() for _ in range(2)]
        for probe in probes:
            assert await ask(probe, "/health/ready") == 200
        assert await silent.stream.receive_some() == b""
        assert await half.stream.receive_some() == b""


async def test_one_more_waits_while_all_are_being_answered(autojump_clock: MockClock) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, max_connections=2) as served:
        busy = [served.connect() for _ in range(2)]
        for index, client in enumerate(busy):
            await client.send("POST", "/v1/completions", STREAM)
            (await engine.submitted(index + 1))[index].say("a")
        late = served.connect()
        await late.send("GET", "/version")
        with trio.move_on_after(50) as patience:
            await late.head()
        assert patience.cancelled_caught
        assert not any(stream.closed.is_set() for stream in engine.streams)
        # The end of an answer makes its connection idle, and that one gives way.
        engine.streams[0].say("b", finish="stop")
        assert (await busy[0].answer()).events[-1] == "[DONE]"
        assert (await late.answer()).status == 200
        assert await busy[0].stream.receive_some() == b""
        assert not engine.streams[1].aborted


async def test_a_flood_of_idle_connections_locks_nobody_out() -> None:
    """Real sockets: a stream goes on and readiness is answered, whatever the flood does."""
    engine = FakeEngine(script=None)
    async with serving(engine, max_connections=20) as served:
        streamed = await served.connect()
        await streamed.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        stream.say("0")
        await streamed.head()
        assert (await streamed.event())["choices"][0]["text"] == "0"
        for number in range(1, 6):
            flood = [await served.connect() for _ in range(40)]
            assert (await served.call("GET", "/health/ready")).status == 200
            stream.say(str(number))
            assert (await streamed.event())["choices"][0]["text"] == str(number)
            metrics = (await served.call("GET", "/metrics")).body.decode()
            [line] = [
                x for x in metrics.splitlines() if x.startswith("trioserve_http_connections ")
            ]
            assert float(line.split()[1]) <= 20
            assert len(flood) == 40
        assert not stream.aborted


async def test_no_connection_is_lost_count_of(autojump_clock: MockClock) -> None:
    async with serving_in_memory(max_connections=4) as served:
        for _ in range(5):
            clients = [served.connect() for _ in range(9)]
            await trio.sleep(1)
            for client in clients[-4:]:
                assert await ask(client) == 200
            for client in clients:
                await client.stream.aclose()
            await trio.sleep(1)
        probe = served.connect()
        await probe.send("GET", "/metrics")
        assert b"trioserve_http_connections 1.0" in (await probe.answer()).body


# ------------------------------------------------------------------------- slow readers


def connect_lockstep(served: ServedInMemory) -> Client:
    """A connection whose server waits until each byte has been read."""
    ours, theirs = lockstep_stream_pair()
    served.listener._send.send_nowait(MemoryStream(theirs))
    return Client(ours, float("inf"))  # type: ignore[arg-type]


async def test_a_reader_of_one_byte_a_second_is_cut_and_its_work_ended(
    autojump_clock: MockClock,
) -> None:
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, send_timeout_s=30) as served:
        slow = connect_lockstep(served)
        await slow.send("POST", "/v1/completions", STREAM)
        [stream] = await engine.submitted()
        before = trio.current_time()
        stream.say("a", "b")

        async def read() -> None:
            data = b"-"
            while data:
                data = await slow.stream.receive_some(1)
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await stream.closed.wait()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - before == pytest.approx(30, abs=1)
        assert stream.aborted


async def test_slow_readers_do_not_delay_each_other(autojump_clock: MockClock) -> None:
    """A stream beside fifty that never read: each word is there before the clock has moved."""
    engine = FakeEngine(script=None)
    async with serving_in_memory(engine, send_timeout_s=30, heartbeat_s=1000) as served:
        for index in range(50):
            await served.connect(num_sends=1).send("POST", "/v1/completions", STREAM)
            (await engine.submitted(index + 1))[index].say("x", "y", "z")
        client = served.connect()
        await client.send("POST", "/v1/completions", STREAM)
        stream = (await engine.submitted(51))[50]
        for number in range(20):
            before = trio.current_time()
            stream.say(str(number))
            if number == 0:
                await client.head()
            assert (await client.event())["choices"][0]["text"] == str(number)
            assert trio.current_time() - before < 1e-3
            await trio.sleep(5)
        assert all(other.aborted for other in engine.streams[:50])
        assert not stream.aborted


# ------------------------------------------------------------------------ slow and large bodies


async def test_a_body_of_one_byte_a_second_gets_408(autojump_clock: MockClock) -> None:
    async with serving_in_memory(body_timeout_s=30) as served:
        client = served.connect()
        raw = request_bytes("POST", "/v1/completions", COMPLETION | {"user": "u" * 100})
        head, _, body = raw.partition(b"\r\n\r\n")
        await client.stream.send_all(head + b"\r\n\r\n")
        before = trio.current_time()

        async def trickle() -> None:
            with trio.CancelScope():
                for byte in body:
                    await client.stream.send_all(bytes([byte]))
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            answer = await client.answer()
            nursery.cancel_scope.cancel()
        assert answer.status == 408
        assert trio.current_time() - before == pytest.approx(30, abs=1)


@pytest.mark.parametrize("chunked", [False, True])
async def test_pf_01_27_mb_beyond_the_limit_are_refused_unread(chunked: bool) -> None:
    async with serving() as served:
        client = await served.connect()
        if chunked:
            head = b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % (27 * 2**20)
        else:
            head = b"Content-Length: %d\r\n\r\n" % (27 * 2**20)
        await client.stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + head + b'{"messages": "'
        )

        async def upload() -> None:
            piece = b"x" * 65536
            try:
                for _ in range(27 * 16):
                    await client.stream.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            answer = await client.answer()
            assert (await served.call("GET", "/health/ready")).status == 200
            nursery.cancel_scope.cancel()
        assert answer.status == 413
        assert served.engine.streams == []


async def test_pf_01_probes_are_answered_between_the_pieces_of_large_bodies() -> None:
    """Counted, not timed: while four bodies of 27 MB are read and parsed, probes keep coming."""
    engine = FakeEngine(max_model_len=10**8)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x" * 1800}] * 15_000,
        "max_tokens": 1,
    }
    raw = json.dumps(body).encode()
    assert len(raw) > 25 * 2**20
    statuses: list[int] = []
    async with serving(engine, max_body_bytes=32 * 2**20, limit_s=90.0) as served:
        num_probes = 0

        async def post() -> None:
            client = await served.connect()
            client._patience_s = 80.0
            await client.send("POST", "/v1/chat/completions", raw)
            statuses.append((await client.answer()).status)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(post)
            probe = await served.connect()
            while len(statuses) < 2:
                assert await ask(probe, "/health/ready") == 200
                num_probes += 1
                await trio.sleep(0.005)
    assert statuses == [200, 200]
    assert num_probes >= 20


async def test_kv_06_small_requests_are_read_into_small_buffers(autojump_clock: MockClock) -> None:
    """And a large body is not read in crumbs."""
    async with serving_in_memory() as served:
        ours, theirs = memory_stream_pair()
        stream = MemoryStream(theirs)
        asked: list[int] = []

        async def recording(max_bytes: int) -> bytes:
            asked.append(max_bytes)
            return bytes(await theirs.receive_some(max_bytes))

        stream.receive_some = recording
        served.listener._send.send_nowait(stream)
        client = Client(ours, float("inf"))  # type: ignore[arg-type]
        for _ in range(5):
            assert await ask(client) == 200
        assert set(asked) == {4096}
        asked.clear()
        await client.send("POST", "/v1/completions", COMPLETION | {"user": "u" * 500_000})
        assert (await client.answer()).status == 200
        assert len(asked) < 20
        assert asked[-1] == 4096
