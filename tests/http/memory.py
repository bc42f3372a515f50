"""Connections in memory, so that timeouts can be tested with trio's autojump clock."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from trio.testing import memory_stream_pair

from trioserve.config.schema import Config, HttpConfig
from trioserve.http.server import DrainReport, serve_http
from trioserve.tracing.tracer import Tracer

from .client import Client
from .fake_engine import FakeEngine


class MemorySocket:
    family = socket.AF_INET

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 40000)

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8000)

    def setsockopt(self, *args: Any) -> None:
        pass

    def close(self) -> None:
        self._stream.send_stream.close()
        self._stream.receive_stream.close()


class MemoryStream:
    """What the server needs of a SocketStream."""

    def __init__(self, stream: Any) -> None:
        self.socket = MemorySocket(stream)
        self.send_all = stream.send_all
        self.send_eof = stream.send_eof
        self.receive_some = stream.receive_some
        self.aclose = stream.aclose


class StuckStream(MemoryStream):
    """A client that takes nothing after ``num_sends`` sends."""

    def __init__(self, stream: Any, num_sends: int) -> None:
        super().__init__(stream)
        self._left = num_sends
        self._send = stream.send_all
        self.send_all = self._send_or_hang
        self._closed = trio.Event()
        self.socket.close = self._close  # type: ignore[method-assign]
        self._stream = stream

    def _close(self) -> None:
        self._closed.set()
        self._stream.send_stream.close()
        self._stream.receive_stream.close()

    async def _send_or_hang(self, data: bytes) -> None:
        self._left -= 1
        if self._left >= 0:
            await self._send(data)
            return
        await self._closed.wait()
        raise trio.ClosedResourceError


class MemoryListener:
    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        self.closed = False

    async def accept(self) -> Any:
        return await self._receive.receive()

    def close(self) -> None:
        self.closed = True

    def connect(self, num_sends: int | None = None) -> Client:
        ours, theirs = memory_stream_pair()
        stream = MemoryStream(theirs) if num_sends is None else StuckStream(theirs, num_sends)
        self._send.send_nowait(stream)
        return Client(ours, math.inf)  # type: ignore[arg-type]


@attrs.define
class ServedInMemory:
    engine: FakeEngine
    listener: MemoryListener
    stopping: trio.Event
    done: trio.Event
    reports: list[DrainReport]

    def connect(self, num_sends: int | None = None) -> Client:
        return self.listener.connect(num_sends)


@asynccontextmanager
async def serving_in_memory(
    engine: FakeEngine | None = None,
    *,
    drain_s: float = 30.0,
    tracer: Tracer | None = None,
    **http: Any,
) -> AsyncIterator[ServedInMemory]:
    engine = engine or FakeEngine()
    served = ServedInMemory(engine, MemoryListener(), trio.Event(), trio.Event(), [])

    async def run(task_status: trio.TaskStatus[None]) -> None:
        report = await serve_http(
            engine,
            [served.listener],
            Config(http=HttpConfig(**http)),
            stopping=served.stopping,
            drain_deadline_s=drain_s,
            tracer=tracer,
            task_status=task_status,
        )
        served.reports.append(report)
        served.done.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        yield served
        nursery.cancel_scope.cancel()
